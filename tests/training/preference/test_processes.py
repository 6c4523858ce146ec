"""Two processes compute the step of one: pairs are counted over both, however unevenly they are shared out."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.model.adapters import attach_adapter, trainable_parameters
from finetune.model.attention import register_document_attention
from finetune.recipe.schema import Recipe

# Three short pairs in one pack and a long one in the other: a mean of means would weigh the long one three times too much.
LENGTHS = [(9, 4, 6), (8, 5, 3), (7, 3, 5), (30, 20, 9)]


def pairs() -> list[AnsweredPrompt]:
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 259, (n,), generator=draw).tolist()  # type: ignore[no-any-return]

    made = []
    for index, (prompt, *answers) in enumerate(LENGTHS):
        asked, said = tokens(prompt), [tokens(n) for n in answers]
        made.append(AnsweredPrompt(str(index), asked, tuple(Answer(ids, list(ids)) for ids in said)))
    return made


def judged() -> list[AnsweredPrompt]:
    """Each pair's first answer, every other one wanted."""
    return [
        replace(pair, answers=pair.answers[:1], wanted=index % 2 == 0) for index, pair in enumerate(pairs())
    ]


METHODS: dict[str, tuple[dict[str, Any], Any, int]] = {
    "dpo": ({"losses": ["sigmoid", "sft"]}, pairs, 60),
    "kto": ({"beta": 1.0}, judged, 70),  # its divergence is that of the step, too
}


def first_step(folder: Path, model: Any, tokenizer: Any, *, accumulation: int, method: str) -> dict[str, Any]:
    """Loss, counts, means and gradient of the first optimizer step, by this process."""
    from finetune.training.exact_trainer import ExactTrainer
    from finetune.training.preference import train_preference

    settings, rows, pack_tokens = METHODS[method]
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "model": {"id": "tiny", "dtype": "fp32"},
            "adapter": {"rank": 4, "alpha": 8},
            "data": {"spec": "tiny"},
            "train": {
                "method": method,
                "preference": {"reference": "base", **settings},
                "pack_tokens": pack_tokens,
                "gradient_accumulation_steps": accumulation,
                "max_steps": 1,
                "max_grad_norm": 1e9,
            },
            "eval": {"suites": ["tiny"]},
        }
    )
    register_document_attention()
    model.set_attn_implementation("document")
    model = attach_adapter(model, recipe.adapter, seed=1)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    found: dict[str, Any] = {}
    clip = ExactTrainer._clip_grad_norm

    def capture(self: Any, wrapped: Any) -> Any:
        norm = clip(self, wrapped)
        trained = [p.grad.flatten() for p in trainable_parameters(self.model).values() if p.grad is not None]
        found.update(loss=self.tally.loss, examples=self.tally.n_examples, means=self.tally.example_means())
        found["gradient"] = torch.cat(trained).tolist()
        return norm

    ExactTrainer._clip_grad_norm = capture  # type: ignore[method-assign]
    try:
        train_preference(
            recipe, model, tokenizer, rows(), [], run_folder=folder, owner="o", references=folder / "references",
            say=lambda line: None,
        )  # fmt: skip
    finally:
        ExactTrainer._clip_grad_norm = clip  # type: ignore[method-assign]
    return found


def test_two_processes_compute_the_step_of_one(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.training.session.measure_peak_flops", lambda dtype, device: 1e12)
    expected = {
        method: first_step(
            tmp_path / "one" / method, make_tiny_model(), tiny_tokenizer, accumulation=2, method=method
        )
        for method in METHODS
    }
    assert all(one["examples"] == 4 for one in expected.values())
    assert expected["kto"]["means"]["kl"] > 0.1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    workers = []
    for rank in range(2):
        own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, str(tmp_path)]
        workers.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    complaints = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], complaints
    for rank, method in itertools.product(range(2), METHODS):
        found, wanted = json.loads((tmp_path / f"{method}-{rank}.json").read_text()), expected[method]
        assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert found["examples"] == 4
        assert found["means"] == pytest.approx(wanted["means"], abs=1e-5)
        gradient, of_one = torch.tensor(found["gradient"]), torch.tensor(wanted["gradient"])
        assert (gradient - of_one).norm() / of_one.norm() < 1e-5


def _worker(folder: Path) -> None:
    place = Path(__file__).parents[2] / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny", place)
    assert spec is not None and spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    rank = int(os.environ["RANK"])
    for method in METHODS:
        model, tokenizer = tiny.build_tiny_model(), tiny.build_tiny_tokenizer()
        found = first_step(folder / "two" / method, model, tokenizer, accumulation=2, method=method)
        (folder / f"{method}-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
