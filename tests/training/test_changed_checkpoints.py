"""Checkpoints whose contents were changed together with their checksums are refused by name, and the one before them is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from finetune.digest import digest_folder
from finetune.errors import UserError
from finetune.paths import read_json, write_json
from finetune.training.exact_trainer import StopWhenAsked


def edit_json(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def harm(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        changed = change(content)
        (checkpoint / name).write_text(json.dumps(content if changed is None else changed))

    return harm


def drop_a_tensor(name: str) -> Callable[[Path], None]:
    def harm(checkpoint: Path) -> None:
        tensors = load_file(str(checkpoint / name))
        tensors.pop(min(tensors))
        save_file(tensors, str(checkpoint / name))

    return harm


def other_shape(checkpoint: Path) -> None:
    tensors = load_file(str(checkpoint / "adapter_model.safetensors"))
    first = min(tensors)
    save_file(
        {**tensors, first: tensors[first][:1].contiguous()}, str(checkpoint / "adapter_model.safetensors")
    )


def drop_a_moment(state: Any) -> None:
    """JSON keys of a state are text or, for a dict with whole numbers as keys, pairs."""
    (pairs,) = state["state"].values()
    del pairs[0][1]["exp_avg"]


HARMS: dict[str, Callable[[Path], None]] = {
    "a moment of one parameter": edit_json("optimizer.json", drop_a_moment),
    "all of the optimizer": edit_json("optimizer.json", lambda state: {}),
    "a rate": edit_json("optimizer.json", lambda state: state["param_groups"][0].pop("lr") and None),
    "tensors of the optimizer": drop_a_tensor("optimizer.safetensors"),
    "the step of the schedule": edit_json("scheduler.json", lambda state: state.pop("last_epoch") and None),
    "a schedule that is a list": edit_json("scheduler.json", lambda state: []),
    "the random generator": edit_json("random.json", lambda state: state.pop("python") and None),
    "another step": edit_json("trainer_state.json", lambda state: state.update(global_step=3)),
    "an unknown key": edit_json("trainer_state.json", lambda state: state.update(other=1)),
    "a trainer's state that is no JSON": lambda checkpoint: (
        (checkpoint / "trainer_state.json").write_text("{") and None
    ),
    "a weight": drop_a_tensor("adapter_model.safetensors"),
    "the shape of a weight": other_shape,
    "weights that are no safetensors": lambda checkpoint: (
        (checkpoint / "adapter_model.safetensors").write_bytes(b"x" * 99) and None
    ),
}


def harm_and_sign(checkpoint: Path, harm: Callable[[Path], None]) -> None:
    harm(checkpoint)
    note = read_json(checkpoint / "sha256.json")
    files = {name: digest for name, digest in digest_folder(checkpoint).items() if name != "sha256.json"}
    write_json(checkpoint / "sha256.json", {**note, "files": files})


@pytest.fixture
def interrupted(make_recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path, Path]:
    """A recipe, the folder of its whole run, and that of one killed after step 5 with checkpoints at 2 and 4."""
    recipe = make_recipe(train__epochs=4, train__pack_tokens=128, train__max_steps=6)
    _, whole, _ = train(recipe, name="whole")

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", kill)
        with pytest.raises(SystemExit):
            train(recipe, name="killed")
    return recipe, whole, whole.parent / "killed"


def test_the_checkpoint_before_a_changed_one_is_used_and_the_run_ends_in_the_same_bytes(
    interrupted: tuple[Any, Path, Path], train: Any
) -> None:
    recipe, whole, killed = interrupted
    for number, (what, harm) in enumerate(HARMS.items()):
        folder = killed.with_name(f"harm-{number}")
        shutil.copytree(killed, folder)
        harm_and_sign(folder / "checkpoints" / "step-4", harm)
        said: list[str] = []
        train(recipe, name=folder.name, said=said)
        assert any("step-4 cannot be continued from" in line for line in said), (what, said)
        assert any("training continues from step-2" in line for line in said), (what, said)
        assert (folder / "checkpoints" / "step-4.refused").is_dir(), what
        assert digest_folder(folder / "adapter") == digest_folder(whole / "adapter"), what


def test_without_one_before_it_the_run_says_so_and_then_starts_anew(
    interrupted: tuple[Any, Path, Path], train: Any
) -> None:
    recipe, whole, killed = interrupted
    shutil.rmtree(killed / "checkpoints" / "step-2")
    harm_and_sign(killed / "checkpoints" / "step-4", HARMS["a moment of one parameter"])
    with pytest.raises(UserError, match=r"step-4 cannot be continued from .*exp_avg.* kept as") as refused:
        train(recipe, name="killed")
    assert "starts the training anew" in refused.value.faults[0].fix
    train(recipe, name="killed")
    assert digest_folder(killed / "adapter") == digest_folder(whole / "adapter")
