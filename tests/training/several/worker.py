"""One process of several: runs the scenarios that are named on its command line, one after the other, in one group.

A scenario is a small training; what came of it lies in the folder of its name. The tests beside this file run the same
functions in one process and compare.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, tokenise_rows
from finetune.model.adapters import attach_adapter
from finetune.model.attention import register_document_attention
from finetune.recipe.schema import Recipe
from finetune.training import session
from finetune.training.exact_trainer import StopWhenAsked
from finetune.training.preference import train_preference
from finetune.training.sft import train_sft

session.measure_peak_flops = lambda dtype, device: 1e12  # type: ignore[assignment]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def tiny() -> ModuleType:
    """tests/conftest.py, which builds the models."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[2] / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe_of(**changes: Any) -> Recipe:
    """A recipe whose step is four rows; `changes` are keys of the train section, or whole sections."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "model": {"id": "tiny", "dtype": "fp32"},
        "adapter": {"rank": 4, "alpha": 8},
        "data": {"spec": "tiny"},
        "train": {
            "learning_rate": 1e-2,
            "epochs": 2,
            "packing": False,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "checkpoint_every_steps": 2,
            "validate_every_steps": 3,
            "warmup_share": 0.0,
        },
        "eval": {"suites": ["tiny"]},
    }
    for name, value in changes.items():
        if name in tree:
            tree[name] |= value
        else:
            tree["train"][name] = value
    return Recipe.model_validate(tree)


def rows_of(tokenizer: Any, n: int = 9) -> list[TokenisedRow]:
    """Rows of uneven length. Nine of them: the last step of an epoch has one row, and the second process none."""
    rows = []
    for index in range(n):
        answer = " ".join([WORDS[index % 10]] * (1 + index % 3))
        messages = ({"role": "user", "content": f"{index}?"}, {"role": "assistant", "content": answer})
        rows.append(Row(id=f"row-{index}", messages=messages, group=str(index), source="test", tags={}))
    return tokenise_rows(rows, tokenizer, max_tokens=256).rows


def pairs() -> list[AnsweredPrompt]:
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 259, (n,), generator=draw).tolist()  # type: ignore[no-any-return]

    made = []
    for index, (prompt, *answers) in enumerate([(9, 4, 6), (8, 5, 3), (7, 3, 5), (30, 20, 9), (6, 7, 2)]):
        asked, said = tokens(prompt), [tokens(n) for n in answers]
        made.append(AnsweredPrompt(str(index), asked, tuple(Answer(ids, list(ids)) for ids in said)))
    return made


def train(folder: Path, recipe: Recipe, *, tie: bool = True, said: list[str] | None = None) -> None:
    """Train the tiny model in `folder`, from the newest checkpoint there."""
    made = tiny()
    tokenizer, model = made.build_tiny_tokenizer(), made.build_tiny_model(tie=tie)
    folder.mkdir(parents=True, exist_ok=True)
    register_document_attention()
    prefers = recipe.train.method == "dpo"
    model.set_attn_implementation(recipe.attention)
    # Otherwise the answers to random embeddings are too close to tell curves apart.
    model.get_input_embeddings().weight.data *= 3
    if recipe.adapter.kind != "none":
        model = attach_adapter(model, recipe.adapter, seed=1)
    say = (said if said is not None else []).append
    if prefers:
        train_preference(
            recipe, model, tokenizer, pairs(), pairs()[:3], run_folder=folder, owner="o" * 64,
            references=folder / "references", say=say,
        )  # fmt: skip
        return
    rows = rows_of(tokenizer)
    train_sft(recipe, model, tokenizer, rows, rows[:3], run_folder=folder, owner="o" * 64, say=say)


def curve(folder: Path) -> None:
    train(folder, recipe_of())


def packed(folder: Path) -> None:
    train(folder, recipe_of(packing=True, pack_tokens=160, micro_batch_size=1, gradient_accumulation_steps=3))


def one_pack(folder: Path) -> None:
    """A step is a single pack, whose rows the processes share out: what they begin with is then computed by each."""
    train(folder, recipe_of(packing=True, pack_tokens=260, micro_batch_size=1, gradient_accumulation_steps=1))


def preference(folder: Path) -> None:
    loss = {"losses": ["sigmoid", "sft"], "reference": "base"}
    tokens = {"packing": True, "pack_tokens": 60, "micro_batch_size": 1, "gradient_accumulation_steps": 1}
    train(folder, recipe_of(method="dpo", preference=loss, learning_rate=1e-3, **tokens))


def best(folder: Path) -> None:
    """Stops where validations no longer bring anything, and takes an earlier step: all processes have to agree."""
    chooses = {"result": "best", "early_stopping": 1, "validate_every_steps": 2, "keep_checkpoints": 1}
    train(folder, recipe_of(epochs=8, learning_rate=5e-2, schedule="constant", **chooses))


def ramp(folder: Path) -> None:
    """Steps of one, two and three rows, some fewer than there are processes."""
    grows = {"start_accumulation": 1, "steps": 4}
    train(folder, recipe_of(micro_batch_size=1, gradient_accumulation_steps=3, batch_ramp=grows))


def preference_ramp(folder: Path) -> None:
    tokens = {"packing": True, "pack_tokens": 60, "micro_batch_size": 1, "gradient_accumulation_steps": 3}
    loss = {"losses": ["sigmoid", "sft"], "reference": "base"}
    grows = {"start_accumulation": 1, "steps": 3}
    train(folder, recipe_of(method="dpo", preference=loss, learning_rate=1e-3, batch_ramp=grows, **tokens))


class KilledError(Exception):
    """Stands for kill -9: nothing is saved on the way out."""


@contextlib.contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Every process of the training in the block ends at this step."""
    original = StopWhenAsked.on_step_end

    def kill(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            raise KilledError
        original(self, args, state, control, **kwargs)

    StopWhenAsked.on_step_end = kill  # type: ignore[method-assign]
    try:
        with contextlib.suppress(KilledError):
            yield
    finally:
        StopWhenAsked.on_step_end = original  # type: ignore[method-assign]


def begun(folder: Path) -> None:
    """Ends in the middle of the second epoch; its last checkpoint is that of step 4."""
    with killed_at(5):
        train(folder, recipe_of())


def begun_again(folder: Path) -> None:
    """Goes on from step 4 and ends, once more, before its next checkpoint is of use to anybody."""
    with killed_at(6):
        train(folder, recipe_of(checkpoint_every_steps=5))


def continued(folder: Path) -> None:
    """The folder holds what `begun` left in another number of processes, or in as many."""
    train(folder, recipe_of())


def continued_rarely(folder: Path) -> None:
    """Continues `interrupted`."""
    train(folder, recipe_of(checkpoint_every_steps=100))


def lion_resumed(folder: Path) -> None:
    """Its state has another name than AdamW's moments, and is read back from a checkpoint."""
    with killed_at(5):
        train(folder, recipe_of(optimizer="lion", learning_rate=1e-3))
    train(folder, recipe_of(optimizer="lion", learning_rate=1e-3))


def momentum_resumed(folder: Path) -> None:
    with killed_at(5):
        train(folder, recipe_of(optimizer="momentum", learning_rate=1e-2))
    train(folder, recipe_of(optimizer="momentum", learning_rate=1e-2))


def dropout(folder: Path) -> None:
    train(folder, recipe_of(adapter={"dropout": 0.2}))


def dropout_resumed(folder: Path) -> None:
    with killed_at(5):
        dropout(folder)
    dropout(folder)


def interrupted(folder: Path) -> None:
    """Ctrl-C reaches the second process only, in the middle of step 3."""
    from finetune.training.sft_trainer import ExactSftTrainer

    original = ExactSftTrainer.compute_loss

    def press(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.process_index == self.args.world_size - 1 and self.state.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args, **kwargs)

    ExactSftTrainer.compute_loss = press  # type: ignore[method-assign]
    try:
        train(folder, recipe_of(checkpoint_every_steps=100))
    except KeyboardInterrupt:
        (folder / f"interrupted-{os.environ.get('RANK', '0')}").touch()
    finally:
        ExactSftTrainer.compute_loss = original  # type: ignore[method-assign]


@contextlib.contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """accelerate spreads weights with torch's fully_shard on GPUs only; here it is made to do so over gloo."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def build(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        fresh = not AcceleratorState._shared_state
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fresh and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    settings = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }
    os.environ.update(settings)
    AcceleratorState.__init__ = build  # type: ignore[method-assign]
    try:
        yield
        assert AcceleratorState._shared_state["distributed_type"] == DistributedType.FSDP, (
            "nothing was spread"
        )
    finally:
        AcceleratorState.__init__ = original  # type: ignore[method-assign]
        for name in settings:
            del os.environ[name]


def fsdp(folder: Path) -> None:
    with fsdp_on_cpu():
        train(folder, recipe_of())


@contextlib.contextmanager
def zero_on_cpu(kind: str) -> Iterator[None]:
    """DeepSpeed over gloo: 'zero2', 'zero3', or 'zero3_offload', as accelerate's launcher asks for it."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    from finetune.training.zero import leave_exchange_to_gloo

    stage, offload = kind[4], "cpu" if kind.endswith("offload") else "none"
    prefix = "ACCELERATE_DEEPSPEED_"
    settings = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        f"{prefix}ZERO_STAGE": stage,
        f"{prefix}OFFLOAD_OPTIMIZER_DEVICE": offload,
        f"{prefix}OFFLOAD_PARAM_DEVICE": offload,
        f"{prefix}ZERO3_INIT": "false",
    }
    leave_exchange_to_gloo()
    os.environ.update(settings)
    try:
        yield
        assert AcceleratorState._shared_state["distributed_type"] == DistributedType.DEEPSPEED
    finally:
        for name in settings:
            del os.environ[name]


def diverged(folder: Path) -> None:
    """The gradient of one process is not finite in step 3; `stopped` has what was said, and the weights then."""
    from finetune.errors import UserError
    from finetune.training.exact_trainer import ExactTrainer

    original, rank = ExactTrainer.step_loss, os.environ.get("RANK", "0")
    trainers = []

    def broken(self: Any, loss_sum: Any, n_items: Any) -> Any:
        trainers.append(self)
        loss = original(self, loss_sum, n_items)
        if self.state.global_step == 2 and rank == "1":
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    ExactTrainer.step_loss = broken  # type: ignore[method-assign]
    try:
        train(folder, recipe_of(checkpoint_every_steps=2))
    except UserError as error:
        weights = trainers[-1].whole_weights()
        if rank == "0":
            save_file(weights, folder / "stopped.safetensors")
            (folder / "stopped").write_text(str(error))
    finally:
        ExactTrainer.step_loss = original  # type: ignore[method-assign]


def half(folder: Path) -> None:
    train(folder, recipe_of(model={"dtype": "bf16"}))


def fsdp_packed(folder: Path) -> None:
    with fsdp_on_cpu():
        packed(folder)


def fsdp_half(folder: Path) -> None:
    with fsdp_on_cpu():
        half(folder)


def fsdp_full(folder: Path) -> None:
    with fsdp_on_cpu():
        train(folder, recipe_of(adapter={"kind": "none"}), tie=False)


def full(folder: Path) -> None:
    train(folder, recipe_of(adapter={"kind": "none"}), tie=False)


def fsdp_begun(folder: Path) -> None:
    """As `begun`, with weights spread; continued without."""
    with fsdp_on_cpu():
        begun(folder)


def fsdp_continued(folder: Path) -> None:
    with fsdp_on_cpu():
        continued(folder)


SCENARIOS: dict[str, Callable[[Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        *(curve, packed, one_pack, preference, full, begun, continued, dropout, dropout_resumed, interrupted),
        continued_rarely,
        diverged,
        begun_again,
        best,
        lion_resumed,
        momentum_resumed,
        ramp,
        preference_ramp,
        *(half, fsdp, fsdp_packed, fsdp_half, fsdp_full, fsdp_begun, fsdp_continued),
    )
}


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        where, _, scenario = name.rpartition(":")
        kind, _, scenario = scenario.rpartition("+")
        with zero_on_cpu(kind) if kind else contextlib.nullcontext():
            SCENARIOS[scenario](folder / (where or scenario))
        torch.distributed.barrier()
    (folder / f"done-{os.environ['RANK']}.json").write_text(json.dumps(names))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
