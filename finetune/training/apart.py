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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.data.tokenise import TokenisedRow
from finetune.errors import UserError
from finetune.model.adapters import without_adapters
from finetune.model.attention import ATTENTION_NAME, AttentionLeftOutError
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
STATE = "its layers carry a state from token to token"
_NO_PACKING = "set train.packing: false"
_OTHER_MODEL = (
    "choose a model whose layers attend and carry no state, or tune this one with train.method: sft and "
    "train.packing: false"
)


def refuse_state(skeleton: Any, recipe: Recipe) -> None:
    """Raise UserError where it is known without weights: layers that carry a state from token to token and cannot reset it."""
    compares = recipe.learns_preferences
    if not carries_state(skeleton, resets=not compares) or not (compares or recipe.train.packing):
        return
    where, fix = ("train.method", _OTHER_MODEL) if compares else ("train.packing", _NO_PACKING)
    raise rows_seen(STATE, where, fix)


def carries_state(skeleton: Any, *, resets: bool = True) -> bool:
    """Whether a model's layers carry a state through a pack: they have one, and no kernel that begins it anew (`resets`: that
    would do)."""
    if not getattr(skeleton, "_is_stateful", False):
        return False
    return not (resets and importlib.util.find_spec("causal_conv1d") is not None)


def require_sft_rows_apart(trainer: Any, recipe: Recipe) -> None:
    """Raise UserError when packed rows see each other, or attention is not the model's own. `trainer`: an ExactSftTrainer."""

    def losses(batch: dict[str, Any]) -> Tensor:
        found: Tensor = trainer._losses(trainer.model, batch, PLAIN).nll
        return found

    score = pack_score(trainer, recipe, losses)
    _require(trainer, recipe, score, packing=recipe.train.packing, where="train.packing", fix=_NO_PACKING)


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
        found = trainer.score(trainer.model, on_device(batch, trainer.model))
        return [row[:length] for row, length in zip(found.by_target, found.lengths.tolist(), strict=True)]

    _require(trainer, recipe, score, packing=True, where="train.method", fix=_OTHER_MODEL)


def _require(trainer: Any, recipe: Recipe, score: Score, *, packing: bool, where: str, fix: str) -> None:
    base = without_adapters(trainer.model)
    trial = Trial(
        base=base,
        score=score,
        wide=recipe.model.dtype == "fp32",
        fp8=recipe.train.fp8,
        where=where,
        fix=fix,
        attention_fix=f"set model.attention: {own_attention(base)}",
    )
    trial.run(trainer, packing=packing)


def pack_score(trainer: Any, recipe: Recipe, losses: Callable[[dict[str, Any]], Tensor]) -> Score:
    """Documents laid into packs as the trainer's rows are. `losses`: of every target of such a batch, in its order."""
    settings = recipe.train.model_copy(update={"pack_tokens": 2 * (_FIRST_TOKENS + _SECOND_TOKENS)})

    def score(documents: Documents) -> list[Tensor]:
        rows = [
            TokenisedRow(str(n), list(ids), [-100, *ids[1:]], len(ids) - 1) for n, ids in enumerate(documents)
        ]
        examples = list(training_dataset(rows, settings))
        found = losses(on_device(trainer.data_collator(examples), trainer.model))
        order = [index for example in examples for index in example["rows"]]
        parts = torch.split(found, [rows[index].n_targets for index in order])
        by_row = dict(zip(order, parts, strict=True))
        return [by_row[index] for index in range(len(rows))]

    return score


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model to be tried: `base`, below its adapters, by the losses that `score` gives.

    wide: everything is computed in fp32. who, where, fix: how the faults name the model, the key and the remedy;
    attention_where and attention_fix where it is not the packs but the attention.
    """

    base: Any
    score: Score
    wide: bool
    fp8: bool = False
    who: str = "this model"
    where: str
    fix: str
    attention_where: str = "model.attention"
    attention_fix: str

    def run(self, trainer: Any, *, packing: bool) -> None:
        """Raise UserError when documents see each other (`packing`), or when attention is not the model's own.

        One process tries, whatever their number; the others are ended with it.
        """
        by_document = self.base.config._attn_implementation == ATTENTION_NAME
        if not trainer.accelerator.is_main_process or not (packing or by_document):
            return
        documents = _documents(trainer.processing_class)
        with _looking(trainer):
            try:
                if packing:
                    self._try_packs(*documents)
                if by_document:
                    self._try_attention(documents[-1])
            except AttentionLeftOutError as error:
                raise self._other_attention(_first_line(error)) from error

    def _try_packs(self, first: Sequence[int], other: Sequence[int], second: Sequence[int]) -> None:
        """The same document behind two different ones, and alone."""
        together = not self.wide and has_experts(self.base.config)
        together = together or getattr(self.base, "is_loaded_in_8bit", False) or self.fp8
        try:
            behind_first, behind_other = (self.score([ids, second])[1] for ids in (first, other))
            alone = self.score([second])[0]
        except AttentionLeftOutError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise self._refused(f"its layers do not take them: {_first_line(error)}") from error
        if _distance(behind_first, behind_other) > (_SEEN_ROUNDED if together else _SEEN):
            raise self._refused("what it makes of a document changes with the one before it in the row")
        if _distance(behind_first, alone) > self._rounding:
            raise self._refused("behind another document it makes something else of a document")

    def _try_attention(self, document: Sequence[int]) -> None:
        """The same document attended as a pack is, and by transformers."""
        found = self.score([document])[0]
        self.base.set_attn_implementation(own_attention(self.base))
        try:
            expected = self.score([document])[0]
        finally:
            self.base.set_attn_implementation(ATTENTION_NAME)
        if _distance(found, expected) > self._rounding:
            raise self._other_attention(
                "its layers ask for more than queries, keys and values, which would be left out"
            )

    @property
    def _rounding(self) -> float:
        return _APART if self.wide else _APART_ROUNDED

    def _refused(self, why: str) -> UserError:
        return rows_seen(why, self.where, self.fix, self.who)

    def _other_attention(self, why: str) -> UserError:
        return UserError(
            f"attention document by document is not what {self.who} computes",
            where=self.attention_where,
            why=why,
            fix=self.attention_fix,
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


def rows_seen(why: str, where: str, fix: str, who: str = "this model") -> UserError:
    return UserError(
        f"{who} does not keep documents apart that lie in one row", where=where, why=why, fix=fix
    )


def _distance(one: Tensor, other: Tensor) -> float:
    """Mean difference in nats a token."""
    return float((one.float() - other.float()).abs().mean())


def on_device(batch: dict[str, Any], model: Any) -> dict[str, Any]:
    device = next(model.parameters()).device  # sharded models are not yet on the trainer's
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
