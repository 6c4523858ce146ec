"""The exactness of training on the user's model and rows: every invariant measured, with its limit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow
from finetune.doctor.finding import Finding, at_most, fault
from finetune.model.adapters import without_adapters
from finetune.model.attention import register_document_attention
from finetune.recipe.schema import Recipe
from finetune.training import invariants
from finetune.training.apart import own_attention
from finetune.training.exact_trainer import NotFiniteError

# Relative to the gradient's norm and in nats, for fp32; the issue of rounding alone.
FP32_LIMIT = 1e-5
# Packs run through other attention kernels, whose rounding adds up over the layers: 1.1e-5 was seen on 30 layers. Documents that
# see each other are off by 0.1 and more.
PACKING_LIMIT = 1e-4
# Sums in fp64 differ by a few units in the last place of the largest one.
FP64_LIMIT = 1e-13
ATTENTIONS = ("eager", "sdpa", "document", "flex_attention")
_DISTURBANCE = 0.02
_TOO_SMALL_FOR_FP32, _STRAIGHT = 1e-10, 0.05
_NO_PACKING = "set train.packing: false: this model does not keep packed rows apart"
_REMEDY = (
    "set train.packing: false and train.gradient_accumulation_steps: 1, and report this with the model's name"
)


def choose_rows(rows: Sequence[TokenisedRow], count: int, *, max_tokens: int = 512) -> list[TokenisedRow]:
    """`count` rows of uneven lengths, from short to long, none above `max_tokens` unless all are."""
    ordered = sorted(rows, key=lambda row: (len(row.input_ids), row.row_id))
    short = [row for row in ordered if len(row.input_ids) <= max_tokens] or ordered[:1]
    if len(short) <= count:
        return short
    step = (len(short) - 1) / max(count - 1, 1)
    return [short[round(place * step)] for place in range(count)]


def disturb(model: Any, seed: int = 0) -> None:
    """Give trainable parameters some noise: a fresh adapter is zero, and zeros hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_((_DISTURBANCE * noise).to(parameter))


def check_invariants(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    tokenised: Sequence[TokenisedRow],
) -> Iterator[Finding]:
    """Yield the findings one by one. `model` is in fp32 with its trained part; `tokenised` are the rows to measure on,
    `rows` the same before tokenising. The model is as it was afterwards.
    """
    register_document_attention()
    plain = _plain(recipe)
    base = without_adapters(model)
    before, trained_with = base.config._attn_implementation, training_attention(plain, base)
    base.set_attn_implementation(trained_with)
    try:
        yield from _measure(plain, model, tokenizer, rows, tokenised, trained_with)
    finally:
        base.set_attn_implementation(before)


def training_attention(recipe: Recipe, base: Any) -> str:
    """The attention that a run of the recipe trains `base` with; the same choice as where a model is loaded."""
    return "eager" if own_attention(base) == "eager" else recipe.attention


def _measure(
    plain: Recipe,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    tokenised: Sequence[TokenisedRow],
    trained_with: str,
) -> Iterator[Finding]:
    yield _accumulation(plain, model, tokenizer, tokenised)
    yield _in_fp64(plain, model, tokenizer, tokenised)
    virtual = plain.adapter.kind in ("prompt", "prefix")
    for attention in ATTENTIONS:
        if virtual:
            yield Finding(f"packing, {attention}", "skipped", "virtual tokens are not trained in packs")
            continue
        in_use = plain.train.packing and attention == trained_with
        yield from _packing(plain, model, tokenizer, tokenised, attention, in_use=in_use)
    if not virtual:
        yield at_most(
            "validation",
            invariants.validation_error(plain, model, tokenizer, tokenised),
            FP32_LIMIT,
            "spread of the validation loss over batch sizes" + (" and packs" if plain.train.packing else ""),
        )
        yield at_most(
            "first tokens",
            invariants.first_token_targets(plain, tokenizer, model, tokenised),
            0,
            "first tokens of packed documents that carry loss",
        )
    yield at_most(
        "tokens",
        invariants.orphaned_tokens(plain, tokenised),
        0,
        "tokens that packing lost, repeated or moved",
    )
    differing = invariants.rendering_differences(rows, {row.row_id: row for row in tokenised}, tokenizer)
    shown = f", e.g. row {differing[0]}" if differing else ""
    yield at_most(
        "rendering", len(differing), 0, f"rows trained behind other tokens than the model is given{shown}"
    )


def quick_invariants(
    recipe: Recipe, model: Any, tokenizer: Any, tokenised: Sequence[TokenisedRow]
) -> Iterator[Finding]:
    """Accumulation, and packing under the recipe's own attention, over a few rows; `check_invariants` is the whole of it."""
    register_document_attention()
    plain = _plain(recipe)
    yield _accumulation(plain, model, tokenizer, tokenised)
    if not recipe.train.packing or recipe.adapter.kind in ("prompt", "prefix"):
        yield Finding("packing", "skipped", "rows are not packed")
        return
    base = without_adapters(model)
    attention = training_attention(plain, base)
    deviations = invariants.packing_error(plain, model, tokenizer, tokenised, attention)
    yield at_most(
        "packing",
        max(deviations.values()),
        PACKING_LIMIT,
        f"packed rows against the rows one by one, {attention} attention, loss of a token and gradient",
        remedy=_REMEDY,
    )


def _plain(recipe: Recipe) -> Recipe:
    """The recipe without what makes two passes differ on purpose: noise, dropout, recomputation."""
    loss = recipe.train.loss.model_copy(update={"neftune_alpha": 0.0})
    changes = {
        "loss": loss,
        "gradient_checkpointing": False,
        "activation_offload": False,
        "model_dropout": None,
    }
    return recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update=changes),
            "model": recipe.model.model_copy(update={"dtype": "fp32"}),
        }
    )


def _accumulation(recipe: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow]) -> Finding:
    return at_most(
        "accumulation",
        invariants.accumulation_error(recipe, model, tokenizer, rows),
        FP32_LIMIT,
        f"{len(rows)} micro-batches of one row against one batch, loss and gradient",
        remedy=_REMEDY,
    )


def _in_fp64(recipe: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow]) -> Finding:
    """The same in fp64, on the two shortest rows of a copy; models that compute parts in fp32 are compared as such."""
    check = "accumulation, fp64"
    if recipe.model.quantize != "none":
        return Finding(check, "skipped", "quantized weights have no fp64")
    twin = copy.deepcopy(model).double()
    wide = _stays_fp64(twin, rows[0])
    try:
        error = invariants.accumulation_error(recipe, twin, tokenizer, rows)
    except NotFiniteError:  # fp64's most negative number, with which masks are made, is none in fp32
        return Finding(check, "skipped", "the model computes parts in fp32, which do not hold fp64's numbers")
    if not wide:
        detail = "the model computes parts in fp32 whatever its weights are, so fp32's limit holds"
        return at_most(check, error, FP32_LIMIT, detail)
    return at_most(check, error, FP64_LIMIT, "the same sums in another order")


@torch.no_grad()
def _stays_fp64(model: Any, row: TokenisedRow) -> bool:
    """Whether a change of the embedding too small for fp32 reaches the logits: twice the change, twice the difference."""
    ids = torch.tensor([row.input_ids[:8]])
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    model.eval()
    logits = []
    for times in (0, 1, 2):
        embedding.copy_(before * (1 + times * _TOO_SMALL_FOR_FP32))
        logits.append(model(input_ids=ids).logits.double())
    embedding.copy_(before)
    once, twice = logits[1] - logits[0], logits[2] - logits[0]
    return bool((twice - 2 * once).norm() <= _STRAIGHT * twice.norm())


def _packing(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    rows: Sequence[TokenisedRow],
    attention: str,
    *,
    in_use: bool,
) -> Iterator[Finding]:
    """A fault where the recipe packs rows under this attention; else a model may well not know it."""
    check = f"packing, {attention}"
    try:
        deviations = invariants.packing_error(recipe, model, tokenizer, rows, attention)
    except (
        Exception
    ) as error:  # whatever a kernel that this machine lacks, or a model that does not know it, raises
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        detail = f"does not run here: {first[:120]}"
        yield fault(check, detail, _NO_PACKING) if in_use else Finding(check, "skipped", detail)
        return
    for what, deviation in deviations.items():
        measured = at_most(
            f"{check}, {what}",
            deviation,
            PACKING_LIMIT,
            "packed rows against the rows one by one",
            remedy=_NO_PACKING,
        )
        if measured.status == "fault" and not in_use:
            detail = f"{measured.detail} differ; this recipe does not train so"
            measured = replace(measured, status="warning", detail=detail, remedy="")
        yield measured
