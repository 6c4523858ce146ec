"""Whether a model gives documents that lie in one row what it gives each of them alone, tried before the first step.

Not every model does. Layers that carry a state from token to token (Mamba), that count places by the row, or that have an
attention of their own (Bloom, MPT, XGLM) let documents see each other without a word, and an attention with parts that
the kernel in use leaves out is another model. Such a training would end in a lower loss and a worse model.

The trial is made with the trainer's own collator and loss on a few made-up documents; nothing is trained or counted.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.data.tokenise import TokenisedRow
from finetune.errors import UserError
from finetune.model.adapters import without_adapters
from finetune.model.attention import ATTENTION_NAME
from finetune.recipe.preference_section import PREFERENCE_METHODS
from finetune.recipe.schema import Recipe
from finetune.training.branches import Pack
from finetune.training.losses import PLAIN
from finetune.training.sft_data import training_dataset
from finetune.training.sharding import has_experts

Documents = Sequence[Sequence[int]]
Score = Callable[[Documents], list[Tensor]]  # the losses of every document's tokens, all of them in one row

_FIRST_TOKENS, _SECOND_TOKENS, _PROMPT_TOKENS = 40, 24, 8
# Nats a token. A document that cannot see the one before it gives the very same numbers whatever that one is: to the bit,
# with experts in fp32 within 4e-8 (70 architectures). In half precision experts, and int8, round by all tokens of a batch.
_SEEN, _SEEN_ROUNDED = 1e-6, 5e-2
# In a row of another length products are rounded at other places; in half precision that is some hundredths of a nat.
_APART, _APART_ROUNDED = 1e-3, 0.2
_NO_PACKING = "set train.packing: false"
_OTHER_MODEL = (
    "choose a model whose layers attend and carry no state, or tune this one with train.method: sft and "
    "train.packing: false"
)


def refuse_state(skeleton: Any, recipe: Recipe) -> None:
    """Raise UserError where it is known without weights: layers that carry a state from token to token and cannot reset it."""
    compares = recipe.train.method in PREFERENCE_METHODS
    resets = importlib.util.find_spec("causal_conv1d") is not None and not compares
    if not getattr(skeleton, "_is_stateful", False) or resets or not (compares or recipe.train.packing):
        return
    where, fix = ("train.method", _OTHER_MODEL) if compares else ("train.packing", _NO_PACKING)
    raise _refused("its layers carry a state from token to token", where, fix)


def require_sft_rows_apart(trainer: Any, recipe: Recipe) -> None:
    """Raise UserError when packed rows see each other, or attention is not the model's own. `trainer`: an ExactSftTrainer."""
    settings = recipe.train.model_copy(update={"pack_tokens": 2 * (_FIRST_TOKENS + _SECOND_TOKENS)})

    def score(documents: Documents) -> list[Tensor]:
        rows = [
            TokenisedRow(str(n), list(ids), [-100, *ids[1:]], len(ids) - 1) for n, ids in enumerate(documents)
        ]
        examples = list(training_dataset(rows, settings))
        batch = trainer.data_collator(examples)
        losses = trainer._losses(trainer.model, _on_device(batch, trainer.model), PLAIN).nll
        order = [index for example in examples for index in example["rows"]]
        found = dict(zip(order, losses.split([rows[index].n_targets for index in order]), strict=True))
        return [found[index] for index in range(len(rows))]

    _require(trainer, recipe, score, packing=settings.packing, where="train.packing", fix=_NO_PACKING)


def require_answers_apart(trainer: Any, recipe: Recipe) -> None:
    """The same for a trainer that compares answers, which always lie in one row. `trainer`: an AnswerTrainer."""

    def score(documents: Documents) -> list[Tensor]:
        examples = [
            AnsweredPrompt(
                str(n),
                list(ids[:_PROMPT_TOKENS]),
                (Answer(list(ids[_PROMPT_TOKENS:]), list(ids[_PROMPT_TOKENS:])),),
            )
            for n, ids in enumerate(documents)
        ]
        batch = trainer.data_collator([Pack(examples)])
        found = trainer.score(trainer.model, _on_device(batch, trainer.model))
        return [row[:length] for row, length in zip(found.by_target, found.lengths.tolist(), strict=True)]

    _require(trainer, recipe, score, packing=True, where="train.method", fix=_OTHER_MODEL)


def _require(trainer: Any, recipe: Recipe, score: Score, *, packing: bool, where: str, fix: str) -> None:
    """One process tries, whatever their number; the others are ended with it."""
    model = trainer.model
    base = without_adapters(model)
    by_document = base.config._attn_implementation == ATTENTION_NAME
    if not trainer.accelerator.is_main_process or not (packing or by_document):
        return
    wide = recipe.model.dtype == "fp32"
    together = not wide and has_experts(base.config)
    together = together or getattr(base, "is_loaded_in_8bit", False) or recipe.train.fp8
    apart = _APART if wide else _APART_ROUNDED
    first, other, second = _documents(trainer.processing_class)
    with _looking(trainer):
        if packing:
            try:
                behind_first, behind_other = (score([ids, second])[1] for ids in (first, other))
                alone = score([second])[0]
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
                raise _refused(f"its layers do not take them: {_first_line(error)}", where, fix) from error
            if _distance(behind_first, behind_other) > (_SEEN_ROUNDED if together else _SEEN):
                raise _refused(
                    "what it makes of a document changes with the one before it in the row", where, fix
                )
            if _distance(behind_first, alone) > apart:
                raise _refused("behind another document it makes something else of a document", where, fix)
        if by_document:
            own = own_attention(base)
            found = score([second])[0]
            base.set_attn_implementation(own)
            try:
                expected = score([second])[0]
            finally:
                base.set_attn_implementation(ATTENTION_NAME)
            if _distance(found, expected) > apart:
                raise UserError(
                    "attention document by document is not what this model computes",
                    where="model.attention",
                    why="its layers ask for more than queries, keys and values, which would be left out",
                    fix=f"set model.attention: {own}",
                )


def own_attention(base: Any) -> str:
    """transformers' attention that computes what the model's own does: torch's fused one where the model's class allows it."""
    return "sdpa" if base._supports_sdpa else "eager"


def _documents(tokenizer: Any) -> list[list[int]]:
    """Two documents of the same length to stand before a third, of ordinary tokens: one token over and over, another token
    over and over, and tokens at random. Two random ones would look alike to a layer that takes means.
    """
    special = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    ordinary = sorted(set(tokenizer.get_vocab().values()) - special)
    draw = random.Random(0)
    one, another = draw.sample(ordinary, k=2)
    return [[one] * _FIRST_TOKENS, [another] * _FIRST_TOKENS, draw.choices(ordinary, k=_SECOND_TOKENS)]


@contextmanager
def _looking(trainer: Any) -> Iterator[None]:
    """As in a validation: no gradient, no dropout, the compute type of training."""
    model = trainer.model
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            yield
    finally:
        model.train(was_training)


def _refused(why: str, where: str, fix: str) -> UserError:
    what = "this model does not keep documents apart that lie in one row"
    return UserError(what, where=where, why=why, fix=fix)


def _distance(one: Tensor, other: Tensor) -> float:
    """Mean difference in nats a token."""
    return float((one.float() - other.float()).abs().mean())


def _on_device(batch: dict[str, Any], model: Any) -> dict[str, Any]:
    device = next(model.parameters()).device  # sharded models are not yet on the trainer's
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
