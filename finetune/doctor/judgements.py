"""Preferences: pairs that say the opposite of one another, answers of one kind only, and pairs that were left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from finetune.data.curate.swapped import find_swapped
from finetune.data.rows import Row
from finetune.doctor.finding import Finding, examine, ok, skipped, warning
from finetune.recipe.schema import Recipe

# Annotators disagree now and then; of exact opposites, more than this share is a mistake in how the rows were made.
MOST_SWAPPED_SHARE = 0.01
MOST_USELESS_SHARE = 0.01
# KTO's paper asks for 1 to 4/3 times as much weight on all wanted answers as on all unwanted ones (arXiv:2402.01306, 4.2);
# told where it is out by more than a factor of two.
LEAST_WANTED, MOST_WANTED = 0.5, 8 / 3
_SHOWN = 3
_OF_DATA = "data.spec"


def check_judgements(recipe: Recipe, train: Sequence[Row]) -> Iterator[Finding]:
    """What the train rows of a preference method say of their answers; nothing for other methods."""
    if not recipe.learns_preferences:
        return
    yield from examine("data", "swapped pairs", lambda: check_swapped(train))
    if recipe.train.method == "kto":
        yield from examine("data", "wanted and unwanted", lambda: check_balance(recipe, train))


def check_swapped(train: Sequence[Row]) -> Finding:
    """The same answers to the same question, judged both ways: what one row teaches, another one takes back."""
    name, found = "swapped pairs", find_swapped(train)
    n_rows = sum(len(one.rows) for one in found)
    said = f"{n_rows} of {len(train):,} rows say the opposite of another row with the same prompt and answers"
    if not found:
        return ok(name, said)
    shown = "; ".join(
        f"{train[one.one[0]].id} against {train[one.other[0]].id}" for one in found[:_SHOWN]
    )  # one row of each side: the others say the same
    if n_rows <= MOST_SWAPPED_SHARE * len(train):
        return ok(name, f"{said} ({shown})")
    first = train[found[0].one[0]]
    return warning(
        name,
        f"{said}, e.g. {shown}",
        "keep one judgement of each: look whether two files name chosen and rejected the other way round, or leave out what "
        "annotators do not agree on",
        where=f"row {first.id} ({first.source})",
    )


def check_balance(recipe: Recipe, train: Sequence[Row]) -> Finding:
    """KTO weighs wanted against unwanted answers; with one kind alone there is nothing to tell apart."""
    name, section = "wanted and unwanted", recipe.train.preference
    n_pairs = sum(row.kind == "preference" for row in train)
    n_wanted = n_pairs + sum(row.label is True for row in train)
    n_unwanted = n_pairs + sum(row.label is False for row in train)
    said = f"{n_wanted:,} answers are wanted, {n_unwanted:,} are not"
    if not n_wanted + n_unwanted:
        return skipped(name, "no row says whether its answer is wanted")
    if not n_wanted or not n_unwanted:
        remedy = (
            "learn from wanted answers alone with train.method: sft, or add answers that are not wanted"
            if n_wanted
            else "add answers that are wanted: pushed away from all it has seen, a model writes anything else"
        )
        return warning(
            name, f"{said}: nothing tells what to prefer over the other kind", remedy, where=_OF_DATA
        )
    wanted, unwanted = n_wanted * section.desirable_weight, n_unwanted * section.undesirable_weight
    if wanted and unwanted and not LEAST_WANTED <= wanted / unwanted <= MOST_WANTED:
        key = "undesirable_weight" if wanted > unwanted else "desirable_weight"
        by = max(wanted, unwanted) / min(wanted, unwanted)
        return warning(
            name,
            f"{said}; with their weights, one kind counts {by:.1f} times as much as the other",
            f"set train.preference.{key}: {getattr(section, key) * by:.3g}, so that both count alike",
            where=f"train.preference.{key}",
        )
    return ok(name, said)


def check_useless(counts: Mapping[str, int]) -> Iterator[Finding]:
    """Pairs that were left out because there is nothing to learn from them; nothing where pairs are not counted."""
    if "dropped_identical" not in counts:
        return
    name, read = "pairs left out", max(counts.get("read", 0), 1)
    same, empty = counts["dropped_identical"], counts.get("dropped_empty", 0)
    said = f"of {read:,} rows {same:,} have twice the same tokens, and {empty:,} an answer without text"
    if (same + empty) / read > MOST_USELESS_SHARE:
        yield warning(
            name,
            f"{said}; they are not learnt from",
            "mend how they are made, or take them out of the source; data/tokenised.json of a run names them",
            where=_OF_DATA,
        )
        return
    yield ok(name, said)
