"""What must hold for training to be what its settings say, measured on the user's own model and rows.

Each function returns the largest deviation it found; `finetune doctor invariants RECIPE` compares them with their limits
(doctor/invariants.py), and so do the tests. The model is in eval mode, so that dropout does not blur a comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.chat_spans import is_trained_answer
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, prompt_ids
from finetune.model.adapters import without_adapters
from finetune.recipe.schema import Recipe
from finetune.training.apart import own_attention
from finetune.training.bench import Bench
from finetune.training.head import IGNORED
from finetune.training.sft_data import training_dataset


def with_layout(
    recipe: Recipe, *, packing: bool, micro: int = 1, accumulation: int = 1, pack: int = 0
) -> Recipe:
    """The recipe with another cut of its step; nothing else differs."""
    changes: dict[str, Any] = {
        "packing": packing,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "batch_ramp": None,
        "auto": False,
    }
    if pack:
        changes["pack_tokens"] = pack
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def accumulation_error(recipe: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow]) -> float:
    """k micro-batches of one row against one batch of k rows."""
    one = with_layout(recipe, packing=False, micro=len(rows))
    many = with_layout(recipe, packing=False, micro=1, accumulation=len(rows))
    return _steps_apart(one, many, model, tokenizer, rows)


def packing_error(
    recipe: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow], attention: str
) -> dict[str, float]:
    """Packed rows under `attention` against the rows one by one: per-target losses (largest difference), and the step.

    Raises whatever the attention raises where it does not run on this machine.
    """
    total = sum(len(row.input_ids) for row in rows)
    alone = with_layout(recipe, packing=False, micro=1, accumulation=len(rows))
    packed = with_layout(recipe, packing=True, pack=max(total, 1))
    base = without_adapters(model)
    before = base.config._attn_implementation
    try:
        base.set_attn_implementation(own_attention(base))
        with Bench(alone, model, tokenizer, rows) as bench:
            expected_losses, expected = bench.target_losses(), bench.step()
        base.set_attn_implementation(attention)
        with Bench(packed, model, tokenizer, rows) as bench:
            found_losses, found = bench.target_losses(), bench.step()
    finally:
        base.set_attn_implementation(before)
    return {
        "per-token loss": float((found_losses - expected_losses).abs().max()),
        "gradient": found.distance(expected),
    }


def validation_error(recipe: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow]) -> float:
    """Spread of the validation loss over batch sizes, and over packs where the recipe packs."""
    longest = max(len(row.input_ids) for row in rows)
    layouts = [with_layout(recipe, packing=False, micro=min(micro, len(rows))) for micro in (1, 3)]
    if recipe.train.packing:
        layouts += [with_layout(recipe, packing=True, pack=n * longest) for n in (1, 4)]
    values = []
    for layout in layouts:
        with Bench(layout, model, tokenizer, rows) as bench:
            values.append(bench.trainer.evaluate()["eval_loss"])
    return max(values) - min(values)


def orphaned_tokens(recipe: Recipe, rows: Sequence[TokenisedRow]) -> int:
    """Tokens and labels that packing lost, repeated or moved to another row."""
    dataset: Any = training_dataset(rows, recipe.train)
    seen: dict[int, tuple[list[int], list[int]]] = {}
    wrong = 0
    for example in dataset:
        lengths = example.get("seq_lengths") or [len(example["input_ids"])]
        start = 0
        for row, length in zip(example["rows"], lengths, strict=True):
            part = slice(start, start + length)
            wrong += length if row in seen else 0
            seen[row] = (example["input_ids"][part], example["labels"][part])
            start += length
        wrong += abs(len(example["input_ids"]) - start)
    for index, row in enumerate(rows):
        ids, labels = seen.get(index, ([], []))
        wrong += sum(a != b for a, b in zip(ids, row.input_ids, strict=False)) + abs(
            len(ids) - len(row.input_ids)
        )
        wrong += sum(a != b for a, b in zip(labels, row.labels, strict=False))
    return wrong


def first_token_targets(recipe: Recipe, tokenizer: Any, model: Any, rows: Sequence[TokenisedRow]) -> int:
    """First tokens of packed documents that carry loss: nothing of their own stands before them."""
    total = sum(len(row.input_ids) for row in rows)
    with Bench(with_layout(recipe, packing=True, pack=total), model, tokenizer, rows) as bench:
        count = 0
        for batch in bench.trainer.get_train_dataloader():
            starts = batch["cu_seq_lens_q"][:-1].long()
            count += int((batch["labels"][0, starts] != IGNORED).sum())
    return count


def rendering_differences(
    rows: Sequence[Row], tokenised: Mapping[str, TokenisedRow], tokenizer: Any
) -> list[str]:
    """Ids of rows whose last trained answer stands behind other tokens than the model is given when it answers.

    Rows that `data.long_rows` has shortened are left out: of those the model is given what is left.
    """
    differing = []
    for row in rows:
        trained = tokenised.get(row.id)
        if row.kind != "chat" or trained is None or trained.shortened or not trained.spans():
            continue
        last = max(index for index, turn in enumerate(row.messages) if is_trained_answer(turn))
        served, _ = prompt_ids(row.messages[:last], tokenizer, tools=row.tools)
        if trained.input_ids[: trained.spans()[-1][0]] != served:
            differing.append(row.id)
    return differing


def _steps_apart(
    one: Recipe, other: Recipe, model: Any, tokenizer: Any, rows: Sequence[TokenisedRow]
) -> float:
    with Bench(one, model, tokenizer, rows) as bench:
        expected = bench.step()
    with Bench(other, model, tokenizer, rows) as bench:
        return bench.step().distance(expected)
