"""Folders for a hub: what the card says, what is refused, and that no folder of this machine is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from finetune.cli.export import app
from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.paths import write_json
from finetune.pipeline.provenance import licence_of
from finetune.pipeline.publish import HubFolder, prepare_publication, write_hub_folder

ELSEWHERE = "/" + "home/me"  # a folder of somebody's machine
RECIPE = """recipe: 1
name: lamps
description: Lamps | and <b>blinds</b>
seed: 17
model:
  id: {base}
  dtype: bf16
  quantize: none
adapter:
  kind: lora
  rank: 4
  alpha: 8.0
data:
  spec: {spec}
train:
  method: sft
  epochs: 2.0
  optimizer: adamw_fused
  learning_rate: 0.001
  schedule: cosine
"""
METRIC = {"suite": "lamps", "metric": "exact_match", "baseline": "few_shot", "arm": "tuned", "n": 240, "mean_a": 0.1,
          "mean_b": 0.75, "difference": 0.65, "low": 0.55, "high": 0.72, "confidence": 0.95, "verdict": "improved",
          "least_detectable": 0.12, "clusters": 60}  # fmt: skip


def save_adapter(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{at}.lora_{part}.weight": torch.randn(4, 4, generator=draw) for part in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    write_json(
        folder / "adapter_config.json", config | {"base_model_name_or_path": f"{ELSEWHERE}/models/base"}
    )
    (folder / "README.md").write_text("an empty form")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def save_run(
    folder: Path, base: str = "builtin:smollm2-135m-instruct", licence: str | None = "CC-BY-4.0"
) -> Path:
    adapter = save_adapter(folder / "adapter")
    (folder / "recipe.resolved.yaml").write_text(
        RECIPE.format(base=base, spec=f"{ELSEWHERE}/data/lamps.yaml")
    )
    outputs = {f"adapter/{name}": digest_file(adapter / name) for name in ("adapter_model.safetensors",)}
    write_json(
        folder / "manifest.json",
        {"format": 1, "recipe_name": "lamps", "recipe_digest": "d" * 64, "inputs": {"model": "b" * 64},
         "stages": {"train": {"completed": "2026-01-01", "seconds": 60.0, "outputs": outputs}}},
    )  # fmt: skip
    write_json(
        folder / "data" / "manifest.json",
        {"name": "lamps", "digest": "a" * 64, "licence": licence, "splits": {"train": {"rows": 1200}}},
    )
    entry = {"suite": "lamps", "primary_metric": "exact_match", "against": "few_shot", "verdict": "improved"}
    write_json(folder / "eval" / "comparison.json", {**entry, "comparisons": [METRIC]})
    for place, mean in (("baseline/lamps/few_shot", 0.1), ("eval/lamps/tuned", 0.75)):
        held = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 240, "method": "wilson"}
        write_json(folder / f"{place}.summary.json", {"n": 240, "metrics": {"exact_match": held}})
        (folder / f"{place}.jsonl").write_text("")
    return folder


def save_model(folder: Path, adapter: Path | None = None) -> Path:
    folder.mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", {"model_type": "llama", "_name_or_path": f"{ELSEWHERE}/models/base"})
    (folder / ".hidden.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"pickle")
    if adapter is not None:
        proof = {"dtype": "bf16", "kind": "LoRA", "base": "builtin:smollm2-135m-instruct", "base_digest": "b" * 64,
                 "adapter_sha256": digest_file(adapter / "adapter_model.safetensors"), "quantize": "none",
                 "onto": "original", "n_prompts": 6, "n_positions": 36, "max_logit_difference": 0.1, "mean_kl": 1e-4,
                 "noise_floor_kl": 9e-5, "weights_kl": 1e-5, "effect_kl": 0.5, "greedy_tokens": 48,
                 "greedy_identical": 48}  # fmt: skip
        write_json(folder / "merge_proof.json", proof)
    return folder


def export(target: Path, out: Path, **options: Any) -> tuple[HubFolder, str]:
    source, publication, unknown = prepare_publication(target, **options)
    made = write_hub_folder(source, publication, out, unknown)
    return made, (out / "README.md").read_text()


def everything(folder: Path) -> str:
    return "".join(
        path.read_text() for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return save_run(tmp_path / "run")


def test_the_card_of_an_adapter_names_its_origin_by_digest_and_its_scores_with_intervals(
    run: Path, tmp_path: Path
) -> None:
    made, card = export(run, tmp_path / "out", licence="Apache-2.0", base_id="owner/base")
    assert made.evaluated
    assert made.unknown_licences == ()
    data = ModelCard(card).data
    assert (data.license, data.base_model, data.library_name) == ("apache-2.0", ["owner/base"], "peft")
    assert [(one.metric_type, one.metric_value) for one in data.eval_results] == [("exact_match", 0.75)]
    weights = digest_file(run / "adapter" / "adapter_model.safetensors")
    for word in ("b" * 64, "a" * 64, weights, "CC-BY-4.0", "1200 rows", "Lamps \\| and &lt;b>blinds"):
        assert word in card, word
    row = next(line for line in card.splitlines() if line.startswith("| lamps |"))
    for word in ("10.0", "5.0–15.0", "75.0", "70.0–80.0", "+65.0", "+55.0 to +72.0", "240", "improved"):
        assert word in row, word
    assert "cannot tell a difference below 12.0 points" in card
    assert "PeftModel" in card
    assert "an empty form" not in card


def test_no_folder_of_this_machine_is_published(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", base_id="owner/base")
    assert ELSEWHERE not in everything(tmp_path / "out")
    assert "lamps.yaml" in (tmp_path / "out" / "training_recipe.yaml").read_text()
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "owner/base"
    export(save_model(tmp_path / "merged"), tmp_path / "out2")
    assert ELSEWHERE not in everything(tmp_path / "out2")


def test_a_merged_model_has_the_evaluation_of_the_run_it_was_made_of(run: Path, tmp_path: Path) -> None:
    merged = save_model(tmp_path / "merged", run / "adapter")
    made, card = export(merged, tmp_path / "out", run=run, title="Lamps")
    assert (made.kind, made.licence) == ("merged", "Apache-2.0")
    assert "+55.0 to +72.0" in card.replace("\u00a0", " ")
    assert "The answers are those of the adapter on its base" in card
    assert ModelCard(card).data.library_name == "transformers"
    assert sorted(made.files) == [
        "README.md", "config.json", "evaluation.json", "merge_proof.json", "model.safetensors", "training_recipe.yaml",
    ]  # fmt: skip
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], torch.ones(4))


def test_the_evaluation_of_another_run_is_not_taken(run: Path, tmp_path: Path) -> None:
    merged = save_model(tmp_path / "merged", save_adapter(tmp_path / "other", seed=1))
    with pytest.raises(UserError, match="was not made of the adapter of"):
        prepare_publication(merged, run=run)


def test_weights_that_changed_since_the_evaluation_are_refused(run: Path) -> None:
    save_file({"x": torch.zeros(1)}, run / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="is not the adapter that this run trained"):
        prepare_publication(run)


def test_an_adapter_whose_base_lies_here_needs_its_hub_id(run: Path) -> None:
    with pytest.raises(UserError, match="known on this machine only"):
        prepare_publication(run)


def test_damaged_weights_leave_nothing(tmp_path: Path) -> None:
    merged = save_model(tmp_path / "merged")
    (merged / "model.safetensors").write_bytes((merged / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged"):
        export(merged, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_of_unknown_origin_says_so(tmp_path: Path) -> None:
    made, card = export(save_model(tmp_path / "model"), tmp_path / "out")
    assert made.licence is None
    assert made.unknown_licences == ("the base (not recorded)",)
    assert len(made.remarks) == 2
    assert "No evaluation was recorded with this model" in card
    assert ModelCard(card).data.license is None


def test_a_licence_stands_in_the_card_of_a_base_folder(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: our-own\n---\n")
    assert licence_of(str(tmp_path)) == "our-own"
    (tmp_path / "README.md").write_text("no front matter")
    assert licence_of(str(tmp_path)) is None


def test_a_licence_the_hub_does_not_know_is_called_other(run: Path, tmp_path: Path) -> None:
    _, card = export(run, tmp_path / "out", base_id="owner/base", licence="Our Own 1.0")
    data = ModelCard(card).data
    assert (data.license, data.license_name) == ("other", "Our Own 1.0")


def test_the_licence_of_a_base_is_looked_up_under_the_id_that_others_find_it_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def card(id: str, *, online: bool) -> Path:
        asked.append((id, online))
        (tmp_path / "card.md").write_text("---\nlicense: mit\n---\n")
        return tmp_path / "card.md"

    monkeypatch.setattr("finetune.pipeline.provenance._hub_card_of", card)
    adapter = save_adapter(tmp_path / "adapter")
    for hub_id in (None, "owner/lamps"):
        _, publication, unknown = prepare_publication(adapter, base_id="owner/base", hub_id=hub_id)
        assert (publication.licence, unknown) == ("mit", [])
    assert asked == [("owner/base", False), ("owner/base", True)]


class Hub:
    """A hub that takes everything and remembers it."""

    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}

    def whoami(self) -> None:
        pass

    def repo_info(self, id: str) -> Any:
        return SimpleNamespace(private=True)

    def upload_folder(self, **given: Any) -> Any:
        self.sent = given
        return SimpleNamespace(oid="c0ffee")

    def list_repo_files(self, id: str, revision: str) -> list[str]:
        folder = Path(self.sent["folder_path"])
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def test_the_command_pushes_what_it_made(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("finetune.model.hub_push.hub_api", lambda: hub)
    chosen = [str(run), "--out", str(tmp_path / "out"), "--base-id", "owner/base", "--push", "owner/lamps"]
    answer = CliRunner().invoke(app, ["hub", *chosen, "--json"], catch_exceptions=False)
    told = json.loads(answer.stdout)
    assert told["pushed"] == {
        "id": "owner/lamps", "url": "https://huggingface.co/owner/lamps", "commit": "c0ffee", "private": True,
    }  # fmt: skip
    assert hub.sent["folder_path"] == str(tmp_path / "out")
    assert '"owner/lamps"' in (tmp_path / "out" / "README.md").read_text()


def test_nothing_is_pushed_whose_licence_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub()
    monkeypatch.setattr("finetune.model.hub_push.hub_api", lambda: hub)
    run = save_run(tmp_path / "run", licence=None)
    chosen = ["hub", str(run), "--base-id", "owner/base", "--push", "owner/lamps"]
    with pytest.raises(UserError, match=r"no licence is known of the data lamps"):
        CliRunner().invoke(app, [*chosen, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert not (tmp_path / "out").exists()
    assert hub.sent == {}
    CliRunner().invoke(
        app, [*chosen, "--out", str(tmp_path / "out"), "--licence", "mit"], catch_exceptions=False
    )
    assert hub.sent
