"""Failures that users of fine-tuning tools report again and again and that no test of a single module covers.

Here are those that need a whole training run: checkpoints of somebody else's making, the order of rows after a resume,
padding that looks like an end of turn, and several processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.tokenise import TokenisedRow
from finetune.digest import digest_folder
from finetune.model.adapters import attach_adapter, trainable_parameters
from finetune.model.attention import register_document_attention
from finetune.paths import read_json, write_json
from finetune.recipe.schema import Recipe
from finetune.telemetry.callback import StepTally
from finetune.training.checkpoints import list_checkpoints
from finetune.training.sft import count_steps, train_sft, trainer_arguments, training_dataset
from finetune.training.sft_trainer import ExactSftTrainer, StopWhenAsked

IGNORED = -100


def recipe_of(*, kind: str = "lora", **train: Any) -> Recipe:
    """fp32, one row a step, not packed, a checkpoint after every step; `train` overrides keys of that section."""
    given = {
        "packing": False,
        "checkpoint_every_steps": 1,
        "keep_checkpoints": 99,
        "warmup_share": 0.0,
        "epochs": 1,
        "learning_rate": 1e-3,
    }
    tree = {
        "name": "tiny",
        "model": {"id": "tiny", "dtype": "fp32"},
        "adapter": {"kind": kind, "rank": 4, "alpha": 8},
        "data": {"spec": "tiny"},
        "train": {**given, **train},
        "eval": {"suites": ["tiny"]},
    }
    return Recipe.model_validate(tree)


def rows_of(lengths: Sequence[int]) -> list[TokenisedRow]:
    """Rows of random tokens that end in the end-of-turn token, which is also the pad token; all but the first learnt.

    The second token is 3 + the row's index, so that a batch tells which rows it holds.
    """
    generator = random.Random(0)
    rows = []
    for index, length in enumerate(lengths):
        ids = [1, 3 + index, *(generator.randrange(3, 259) for _ in range(length - 3)), 2]
        rows.append(TokenisedRow(str(index), ids, [IGNORED, *ids[1:]], length - 1))
    return rows


def adapted(model: Any, recipe: Recipe) -> Any:
    register_document_attention()
    model.set_attn_implementation("document" if recipe.train.packing else "sdpa")
    return model if recipe.adapter.kind == "none" else attach_adapter(model, recipe.adapter, seed=recipe.seed)


def trainer_of(
    recipe: Recipe, model: Any, tokenizer: Any, rows: list[TokenisedRow], folder: Path
) -> ExactSftTrainer:
    train_set = training_dataset(rows, recipe.train)
    return ExactSftTrainer(
        checkpoint_root=folder,
        owner="o",
        settings=recipe.train,
        tally=StepTally(),
        model=adapted(model, recipe),
        args=trainer_arguments(recipe, count_steps(len(train_set), recipe.train), folder),
        train_dataset=train_set,
        processing_class=tokenizer,
    )


@pytest.fixture
def train(
    tmp_path: Path, tiny_tokenizer: Any, make_tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """train(recipe, rows, name) trains in `tmp_path / name`, or goes on there, and returns that folder."""
    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)

    def run(
        recipe: Recipe, rows: list[TokenisedRow], name: str = "run", said: list[str] | None = None
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        train_sft(
            recipe,
            adapted(make_tiny_model(), recipe),
            tiny_tokenizer,
            rows,
            [],
            run_folder=folder,
            owner="o" * 64,
            say=(said if said is not None else []).append,
        )
        return folder

    return run


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def plant(checkpoint: Path, name: str, marker: Path) -> None:
    """Put a bomb into a checkpoint and write its checksums anew, as somebody would who means harm."""
    (checkpoint / name).write_bytes(pickle.dumps(Bomb(marker)))
    sums = read_json(checkpoint / "sha256.json")
    (checkpoint / "sha256.json").unlink()
    write_json(checkpoint / "sha256.json", {**sums, "files": digest_folder(checkpoint)})


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_a_resume_never_runs_a_pickle(kind: str, train: Any, tmp_path: Path) -> None:
    recipe, rows, marker = recipe_of(kind=kind), rows_of([8, 9, 10]), tmp_path / "ran"
    checkpoints = train(recipe, rows) / "checkpoints"
    shutil.rmtree(list_checkpoints(checkpoints)[-1])
    pristine = shutil.copytree(checkpoints, tmp_path / "pristine")

    def resume(*planted: str, without: str = "nothing") -> list[str]:
        """What is said when step 2 of 3 is resumed from with these files planted in it and others taken out."""
        shutil.rmtree(checkpoints)
        shutil.copytree(pristine, checkpoints)
        for path in (checkpoints / "step-2").glob(without):
            path.unlink()
        for name in planted:
            plant(checkpoints / "step-2", name, marker)
        said: list[str] = []
        train(recipe, rows, said=said)
        return said

    assert "continuing from checkpoint step-2" in resume()[0]
    # Nothing of ours is a pickle, neither weights nor states, even where the checksums say so: the one before is used.
    weights = ("pytorch_model.bin", "adapter_model.bin", "pytorch_model.bin.index.json")
    for name in (*weights, "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        said = resume(name)
        assert f"{name} is a pickle file and is refused" in said[0]
        assert "continuing from checkpoint step-1" in said[1]
    assert "is refused" in resume("adapter_model.bin", "pytorch_model.bin", without="*.safetensors")[0]
    assert not marker.exists()


@pytest.mark.parametrize("stop_after", [5, 10, 13, 20])
def test_a_resume_sees_the_rows_that_were_still_to_come(
    stop_after: int, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps an epoch: inside the first, at its end, inside the second, at the end of the second."""
    recipe, rows = (
        recipe_of(epochs=3, micro_batch_size=2, checkpoint_every_steps=stop_after),
        rows_of([6] * 20),
    )
    seen: list[list[int]] = []
    original = ExactSftTrainer._losses

    def watched(self: Any, model: Any, inputs: Any, *shape: Any) -> Any:
        seen.append((inputs["input_ids"][:, 1] - 3).tolist())
        return original(self, model, inputs, *shape)

    monkeypatch.setattr(ExactSftTrainer, "_losses", watched)
    whole = train(recipe, rows, "whole")
    expected, seen[:] = list(seen), []
    assert len(expected) == 30
    assert expected[:10] != expected[10:20]

    def stop(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == stop_after + 1:
            raise SystemExit  # after kill -9: what came after the checkpoint is lost

    with monkeypatch.context() as patch:
        patch.setattr(StopWhenAsked, "on_step_end", stop)
        with pytest.raises(SystemExit):
            train(recipe, rows, "stopped")
    seen.clear()
    stopped = train(recipe, rows, "stopped")
    assert seen == expected[stop_after:]
    assert digest_folder(stopped / "adapter") == digest_folder(whole / "adapter")


def test_padding_hides_no_end_of_turn_though_both_are_one_token(
    tiny_tokenizer: Any, tiny_model: Any, tmp_path: Path
) -> None:
    assert tiny_tokenizer.pad_token_id == 2
    recipe = recipe_of(micro_batch_size=2)
    trainer = trainer_of(recipe, tiny_model, tiny_tokenizer, rows_of([5, 9]), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    padding = batch["attention_mask"] == 0
    assert int(padding.sum()) == 4
    assert bool((batch["labels"][padding] == IGNORED).all())
    assert int((batch["labels"] == 2).sum()) == 2  # one real end of turn a row


def test_two_processes_compute_the_loss_and_gradient_of_one(make_tiny_model: Any, tmp_path: Path) -> None:
    """Rows of 11 and 101 tokens, one a process: a mean of means would weigh the short one ten times too much."""
    rows = rows_of([11, 101])
    model = adapted(make_tiny_model(), recipe_of())
    nll = torch.zeros(())
    for row in rows:
        logits = model(input_ids=torch.tensor([row.input_ids])).logits[0, :-1]
        nll = nll + torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels[1:]), reduction="sum")
    loss = nll / 110
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.flatten() for p in trainable_parameters(model).values()])  # type: ignore[union-attr]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            env={
                **os.environ,
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "CUDA_VISIBLE_DEVICES": "",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    complaints = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], complaints
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["logged_loss"] == pytest.approx(float(loss), abs=1e-5)
        assert (found["n_targets"], found["n_tokens"]) == (110, 112)
        gradient = torch.tensor(found["gradient"])
        assert (gradient - expected).norm() / expected.norm() < 1e-5


def _worker(folder: Path) -> None:
    """One process of two: the first optimizer step on the rows of the test above, up to the clipped gradient."""
    place = Path(__file__).with_name("conftest.py")
    spec = importlib.util.spec_from_file_location("tiny", place)
    assert spec is not None and spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    rank = int(os.environ["RANK"])
    recipe = recipe_of(max_grad_norm=1e9, max_steps=1, gradient_accumulation_steps=2)
    trainer = trainer_of(
        recipe, tiny.build_tiny_model(), tiny.build_tiny_tokenizer(), rows_of([11, 101]), folder / str(rank)
    )
    clip = trainer._clip_grad_norm

    def capture(model: Any) -> Any:
        norm = clip(model)
        trained = trainable_parameters(trainer.model).values()
        found = {
            "logged_loss": trainer.tally.nll_sum / trainer.tally.n_targets,
            "n_targets": trainer.tally.n_targets,
            "n_tokens": trainer.tally.n_tokens,
            "gradient": torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).tolist(),
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(found))
        return norm

    trainer._clip_grad_norm = capture  # type: ignore[method-assign]
    trainer.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
