"""Nothing of a run is read or written as pickle, which runs code while it is read."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.digest import digest_folder
from finetune.paths import read_json, write_json
from finetune.training.checkpoints import list_checkpoints

READERS = {("torch", "load"), ("pickle", "load"), ("pickle", "loads"), ("joblib", "load"), ("dill", "load")}
# Objects that a run hands to its own workers; nothing of them lies on disk.
BETWEEN_OWN_PROCESSES = {"data/stages/ray_runner.py"}


class Payload:
    """What an attacker would put into a checkpoint: unpickling it makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"])
def test_a_checkpoint_with_a_payload_is_passed_over_unread(
    name: str, make_recipe: Any, train: Any, tmp_path: Path
) -> None:
    recipe = make_recipe(train__epochs=2, train__checkpoint_every_steps=1, train__keep_checkpoints=3)
    _, folder, _ = train(recipe)
    expected = digest_folder(folder / "adapter")
    older, newest = list_checkpoints(folder / "checkpoints")[-2:]
    trace = tmp_path / "executed"
    assert pickle.loads(pickle.dumps(Payload(trace))) is None and trace.exists()
    trace.unlink()
    (newest / name).write_bytes(pickle.dumps(Payload(trace)))
    sums = read_json(newest / "sha256.json")
    files = {file: digest for file, digest in digest_folder(newest).items() if file != "sha256.json"}
    write_json(newest / "sha256.json", sums | {"files": files})

    said: list[str] = []
    train(recipe, said=said)
    assert not trace.exists()
    assert f"{name} is a pickle file and is refused" in said[0]
    assert f"continuing from checkpoint {older.name}" in said[1]
    assert digest_folder(folder / "adapter") == expected


def test_the_package_calls_nothing_that_reads_pickle() -> None:
    root = Path(finetune.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            called = (owner.id if isinstance(owner, ast.Name) else "", node.func.attr)
            safe = any(
                word.arg == "weights_only"
                and isinstance(word.value, ast.Constant)
                and word.value.value is True
                for word in node.keywords
            )
            allows = any(
                word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords
            )
            if (called in READERS and not safe) or allows:
                found.append(path.relative_to(root).as_posix())
    assert set(found) <= BETWEEN_OWN_PROCESSES
