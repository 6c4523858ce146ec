"""What depends on `train.method`: how rows become tokens, and which assembly trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from finetune.data.pair_tokens import PreferenceSplit, tokenise_preferences
from finetune.data.rows import Row
from finetune.data.tokenise import TokenisedRow, TokenisedSplit, tokenise_rows
from finetune.paths import runs_root
from finetune.recipe.preference_section import PREFERENCE_METHODS
from finetune.recipe.schema import Recipe
from finetune.training.mismatched import as_trained

Split = TokenisedSplit | PreferenceSplit


def tokenise_side(recipe: Recipe, rows: Sequence[Row], tokenizer: Any) -> Split:
    """Tokens and targets of one side, as the recipe's method learns from them."""
    section, method = recipe.data, recipe.train.method
    if method not in PREFERENCE_METHODS:
        return tokenise_rows(
            rows,
            tokenizer,
            max_tokens=section.max_tokens,
            long_rows=section.long_rows,
            train_on=section.train_on,
        )
    assert section.long_rows != "split", "the recipe refuses it"
    return tokenise_preferences(
        rows,
        tokenizer,
        unit="judged" if method == "kto" else "pair",
        max_tokens=section.max_tokens,
        long_rows=section.long_rows,
        max_identical_share=recipe.train.preference.max_identical_share,
    )


def score_seed(recipe: Recipe) -> int | None:
    """The seed of the head, when what is trained is a reward model."""
    return recipe.seed if recipe.train.method == "reward" else None


def learnt(split: Split) -> list[Any]:
    """Everything that is learnt from a side, for a digest."""
    if isinstance(split, PreferenceSplit):
        return [row.content() for row in split.rows]
    return [[row.input_ids, row.labels, *([row.weights] if row.weights else [])] for row in split.rows]


def plain_rows(split: Split) -> list[TokenisedRow]:
    """The rows of a split that are sequences of tokens; of pairs there are none."""
    return [] if isinstance(split, PreferenceSplit) else split.rows


def longest_example(recipe: Recipe, split: Split) -> int:
    """Tokens of the longest row as it is trained on, all its answers included."""
    if isinstance(split, PreferenceSplit):
        return max(row.n_tokens for row in as_trained(split.rows, recipe.train))
    return max(len(row.input_ids) for row in split.rows)


def train_by_method(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    train: Split,
    validation: Split,
    *,
    run_folder: Path,
    **options: Any,
) -> Any:
    """The TrainResult of the recipe's method; `options` are those that `train_sft` and `train_preference` share, and for
    distil what the teacher says."""
    if recipe.learns_preferences:
        from finetune.training.preference import train_preference

        return train_preference(
            recipe,
            model,
            tokenizer,
            cast(PreferenceSplit, train).rows,
            cast(PreferenceSplit, validation).rows,
            run_folder=run_folder,
            references=runs_root() / "references",
            **options,
        )
    from finetune.distil.train import train_distil
    from finetune.training.sft import train_sft

    learns_text = recipe.distil is None or recipe.distil.way == "answers"
    assert learns_text != ("teaching" in options), (
        "a student of distributions has a teacher, and no other model has"
    )
    train_rows: Any = train_sft if learns_text else train_distil
    return train_rows(
        recipe,
        model,
        tokenizer,
        cast(TokenisedSplit, train).rows,
        cast(TokenisedSplit, validation).rows,
        run_folder=run_folder,
        **options,
    )
