"""The data: how many rows, what was cut, whether the answers agree with one another, and whether sides are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from finetune.data.check import CheckResult
from finetune.data.curate.account import Account, account_for_answers
from finetune.data.rows import Row
from finetune.doctor.finding import Finding, examine, fault, ok, skipped, warning
from finetune.errors import UserError

# A task is learnt from hundreds to a few thousand good rows; below it is mostly form that is learnt, above it the same kind
# of row adds little: LIMA's 1,000 (Zhou et al. 2023, arXiv:2305.11206); OpenAI's guide asks for 50 to 100 at the least.
FEW_ROWS, MANY_ROWS = 500, 5_000
# Rows that are read for forms, in the seeded order, which is a random sample.
ROWS_READ_FOR_FORMS = 2_000
MOST_CUT_SHARE = 0.01
MOST_CONTRADICTING_SHARE = 0.01
MOST_REFUSALS_SHARE = 0.2
_TOO_MANY_EMPTY_SHARE = 0.01
_SHOWN = 3
_OF_DATA = "data.spec"


def check_rows(
    train: Sequence[Row], n_kept: int, counts: Mapping[str, int], *, seed: int
) -> Iterator[Finding]:
    """What the train rows show by themselves. `n_kept` and `counts`: how many were tokenised, and what became of them."""
    yield check_number(n_kept)
    yield check_cuts(counts)
    yield from check_answers(train, seed=seed)


def check_answers(train: Sequence[Row], *, seed: int) -> Iterator[Finding]:
    """Whether the answers agree with one another, as they stand in the rows, before any tokenizer."""
    try:
        account = account_for_answers(train[:ROWS_READ_FOR_FORMS], seed=seed)
    except UserError:
        yield skipped("answers", "running text and tokens have no answers that could disagree")
        return
    yield from examine("data", "one form", lambda: check_forms(account))
    yield from examine("data", "contradictions", lambda: check_contradictions(account))
    yield from examine("data", "refusals", lambda: check_refusals(account))
    yield from examine("data", "empty answers", lambda: check_empty(account))


def check_number(n_rows: int) -> Finding:
    """The 500 to 5,000 rule."""
    if n_rows < FEW_ROWS:
        return warning(
            "number of rows",
            f"{n_rows} train rows are few: from about {FEW_ROWS} on a task is learnt rather than its form",
            "add rows, or look whether examples in the prompt do as well (the few_shot baseline tells)",
            where=_OF_DATA,
        )
    many = (
        ""
        if n_rows <= MANY_ROWS
        else f"; beyond {MANY_ROWS:,}, more variety helps and more of the same does not"
    )
    return ok("number of rows", f"{n_rows:,} train rows{many}")


def check_cuts(counts: Mapping[str, int]) -> Finding:
    """Rows that the length limit cut or dropped."""
    read = max(counts.get("read", 0), 1)
    cut, dropped = counts.get("truncated", 0), counts.get("dropped_too_long", 0)
    lost = counts.get("lost_targets", 0)
    said = f"of {read:,} rows {cut:,} are cut and {dropped:,} dropped for their length"
    if lost:
        said += f"; {lost:,} tokens of answers are in no part"
    if (cut + dropped) / read > MOST_CUT_SHARE or lost:
        return warning(
            "cut rows",
            said,
            "raise data.max_tokens (and train.pack_tokens); `finetune data lengths` shows how far",
            where="data.max_tokens",
        )
    return ok("cut rows", said)


def check_forms(account: Account) -> Iterator[Finding]:
    """A minority form of 5 % or more makes a model mix forms."""
    for mix in account.warnings:
        largest, *others = mix.told
        other = others[0] if others else largest
        of_what = "answers" if len(mix.told) == len(mix.piles) else f"answers whose {mix.aspect} can be told"
        yield warning(
            f"one {mix.aspect}",
            f"{mix.minority_share:.1%} of the {of_what} differ in {mix.aspect} from the majority: {largest.value} ({largest.share:.0%}) "
            f"beside {other.value} ({other.share:.0%})",
            "bring the answers into one form, or part the tasks; `finetune data consistency` shows both piles",
            where=_OF_DATA,
        )
    if not account.warnings:
        yield ok("one form", f"no minority form reaches 5 % of {len(account.rows):,} answers")


def check_contradictions(account: Account) -> Finding:
    """The same question with different answers."""
    if any(row.kind != "chat" for row in account.rows):
        return skipped(
            "contradictions", "several answers to a question are what pairs and judged answers are made of"
        )
    groups = account.contradictions
    n_rows = sum(len(one.rows) for one in groups)
    said = f"{len(groups)} questions in {n_rows} of {len(account.rows):,} rows have several answers"
    if n_rows / len(account.rows) > MOST_CONTRADICTING_SHARE:
        first = ", ".join(account.rows[row].id for row in groups[0].rows[:_SHOWN])
        return warning(
            "contradictions",
            f"{said}, e.g. rows {first}",
            "keep one answer a question (curate: in the dataset spec), unless several are wanted",
            where=_row(account.rows[groups[0].rows[0]]),
        )
    return ok("contradictions", said)


def check_refusals(account: Account) -> Finding:
    """Whether the rows show how to decline, and do not do it too often."""
    n_refusals, n_rows = len(account.refusals), len(account.rows)
    share = n_refusals / n_rows
    said = f"{n_refusals} of {n_rows:,} answers decline ({share:.1%})"
    if share > MOST_REFUSALS_SHARE:
        return warning(
            "refusals",
            said,
            "a model that is shown this many learns to decline what it could answer: keep fewer of them",
            where=_row(account.rows[account.refusals[0]]),
        )
    if n_refusals:
        return ok("refusals", said)
    formats = next((mix for mix in account.mixes if mix.aspect == "format"), None)
    if formats is not None and formats.piles[0].value.lower().startswith(("json", "number", "label")):
        return skipped(
            "refusals", "the answers are data, and which of them declines cannot be told from their text"
        )
    return warning(
        "refusals",
        f"{said}: what should not be answered will be answered all the same",
        "add rows of questions that are out of scope, with the answer you want there, if such questions will come",
        where=_OF_DATA,
    )


def check_empty(account: Account) -> Finding:
    """Answers without a letter, digit or sign."""
    share = len(account.empty) / len(account.rows)
    said = f"{len(account.empty)} of {len(account.rows):,} answers hold no text"
    if share > _TOO_MANY_EMPTY_SHARE:
        first = ", ".join(account.rows[row].id for row in account.empty[:_SHOWN])
        return warning(
            "empty answers",
            f"{said}, e.g. rows {first}",
            "leave them out in the dataset spec (curate:)",
            where=_row(account.rows[account.empty[0]]),
        )
    return ok("empty answers", said)


def check_sides(n_rows: Mapping[str, int], validation_every: int | None) -> Finding:
    """Whether there is something to validate on."""
    if not n_rows.get("validation"):
        return warning(
            "validation rows",
            "the dataset has none, so that overfitting cannot be seen"
            + (" and train.validate_every_steps validates nothing" if validation_every else ""),
            "give the dataset spec a validation share",
            where=_OF_DATA,
        )
    return ok("validation rows", f"{n_rows['validation']:,} of them")


def check_leaks(result: CheckResult) -> Iterator[Finding]:
    """Rows of two sides that share what has to be on one side only; files that are not as they were written."""
    for one in result.faults():
        yield fault("leaks", one.what, one.fix or "build the dataset again from its spec", where=one.where)
    if result.passed:
        yield ok("leaks", result.describe())


def check_contamination(report: Mapping[str, object]) -> Finding:
    """Train rows that hold a question of a suite: they are left out of the training, and that is said."""
    rows = report.get("rows")
    n_rows = len(rows) if isinstance(rows, list | dict) else 0
    if n_rows:
        return warning(
            "questions of the suites",
            f"{n_rows} train rows hold a question of a suite; the run leaves them out",
            "nothing has to be done; take them out of the source if they are used elsewhere",
            where=_OF_DATA,
        )
    return ok("questions of the suites", "no train row holds one")


def _row(row: Row) -> str:
    return f"row {row.id} ({row.source})"
