"""`finetune distil cache` on a whole project: what it prints, what it goes on from, and what a server says in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from finetune.cli.distil import app
from finetune.distil.cache.layout import read_manifest
from finetune.distil.cache.read import TeacherCache
from finetune.errors import UserError
from finetune.pipeline.make_cache import fill_recipe_cache

DISTIL = """\
extends: recipe.yaml
name: distil
train: {method: distil}
distil:
  teacher: {id: tiny-model, dtype: fp32, licence: CC0-1.0}
  targets: cache
  cache: {k: 16}
"""


@pytest.fixture
def recipe(project: Any) -> Path:
    path: Path = project.folder / "distil.yaml"
    path.write_text(DISTIL)
    return path


def call(recipe: Path, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["cache", str(recipe), "--json", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_command_tells_size_mass_and_error(recipe: Path) -> None:
    facts = call(recipe, "--set", "distil.cache.temperatures=[2.0]")
    assert (
        facts["complete"] and facts["targets"] > 100 and facts["bytes_per_target"] == 16 * 2 + 15 * 2 + 2 * 4
    )
    assert set(facts["coverage"]) == set(facts["reconstruction"]) == {"1.0", "2.0"}
    again = CliRunner().invoke(app, ["cache", str(recipe), "--set", "distil.cache.temperatures=[2.0]"])
    assert (
        again.exit_code == 0 and "16 ids x 2 + 15 logits x 2 + 2 normalisers x 4 = 70 bytes" in again.stdout
    )
    assert "temperature 2.0: the top 16 hold" in again.stdout and "KL in nats: rounding" in again.stdout


def test_other_settings_have_a_cache_of_their_own(recipe: Path) -> None:
    first, second = call(recipe), call(recipe, "--set", "distil.cache.k=8")
    assert first["folder"] != second["folder"] and Path(first["folder"]).is_dir()
    assert call(recipe, "--set", "train.learning_rate=1e-5")["folder"] == first["folder"]


def test_a_k_above_the_vocabulary_is_refused(recipe: Path) -> None:
    with pytest.raises(UserError, match="k = 300, but teacher and student share a vocabulary of 259"):
        fill_recipe_cache(str(recipe), ["distil.cache.k=300"], say=lambda line: None)


def test_a_top_k_that_leaves_much_out_is_warned_of(recipe: Path) -> None:
    said: list[str] = []
    fill_recipe_cache(str(recipe), ["distil.cache.k=8"], say=said.append)
    (told,) = [line for line in said if line.startswith("warning: teacher cache: the top 8 hold")]
    assert "raise distil.cache.k" in told
    said.clear()
    fill_recipe_cache(str(recipe), ["distil.cache.k=259"], say=said.append)
    assert not any("warning" in line for line in said)


def test_a_recipe_that_reads_no_cache_is_refused(recipe: Path, project: Any) -> None:
    live = "targets: cache\n  cache: {k: 16}", "targets: live"
    (recipe.parent / "live.yaml").write_text(DISTIL.replace(*live))
    for path, where in ((recipe.parent / "live.yaml", "distil.targets"), (project.recipe, "distil")):
        with pytest.raises(UserError, match="reads no teacher cache") as told:
            fill_recipe_cache(str(path), say=lambda line: None)
        assert told.value.faults[0].where == where


def test_a_server_without_its_name_of_the_teacher_is_refused(recipe: Path) -> None:
    with pytest.raises(UserError, match="--server and --server-model go together"):
        CliRunner().invoke(
            app, ["cache", str(recipe), "--server", "http://localhost:1/v1"], catch_exceptions=False
        )


class Served:
    """The tiny model behind a server that tells the k most likely tokens of every place."""

    url, name = "http://localhost:1/v1", "big"

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    def post(self, path: str, body: dict[str, Any], *, about: str = "") -> dict[str, Any]:
        with torch.no_grad():
            logs = torch.log_softmax(self.model(torch.tensor([body["prompt"]])).logits[0].float(), dim=-1)
        places: list[Any] = [None]
        for one in logs[:-1]:
            values, ids = one.topk(body["prompt_logprobs"])
            places.append({str(int(i)): {"logprob": float(v)} for i, v in zip(ids, values, strict=True)})
        return {"choices": [{"prompt_logprobs": places}]}


def test_a_server_says_what_the_teacher_itself_says(
    recipe: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {}
    for name, server in (("here", None), ("there", Served(tiny_model))):
        monkeypatch.setenv("FINETUNE_RUNS", str(recipe.parent / name))
        facts = fill_recipe_cache(str(recipe), server=server, say=lambda line: None)
        folders[name] = Path(facts["folder"])
    here, there = (read_manifest(folders[name]) for name in ("here", "there"))
    assert here.identity == there.identity and folders["here"].name == folders["there"].name
    n_targets = [1] * here.targets  # a place a target: all are asked for at once
    found = [
        TeacherCache(folders[name], manifest, n_targets).targets(range(here.targets), 1.0)
        for name, manifest in (("here", here), ("there", there))
    ]
    logs = [
        torch.zeros(here.targets, 259).scatter(1, one.ids, one.logits - one.logsumexp[:, None]).exp()
        for one in found
        if one.ids is not None and one.logits is not None and one.logsumexp is not None
    ]
    assert torch.allclose(logs[0], logs[1], atol=1e-4)
