"""What to do after reading the page: prose and commands that follow from the verdict and from what is in the folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from finetune.report.read import RunFiles
from finetune.report.verdict import Verdict, stop_sentence


@dataclass(frozen=True, slots=True)
class Step:
    text: str
    command: str | None = None


def shown_folder(folder: Path) -> str:
    """The run folder as one would type it: relative to the working folder when it lies below it."""
    try:
        folder = folder.resolve().relative_to(Path.cwd())
    except ValueError:
        folder = folder.resolve()
    return folder.as_posix()


def read_next_steps(run: RunFiles, verdict: Verdict) -> tuple[Step, ...]:
    """In the order in which to take them."""
    folder = shlex.quote(shown_folder(run.folder))
    if verdict.primary is None:
        resume = Step(
            "Type the command of this run again: it continues at the first stage that is not complete."
        )
        page = Step("Then write this page again.", f"finetune report {folder}")
        return (_AFTER_DIVERGENCE,) if stop_sentence(run) else (resume, page)
    steps = _READING.get(verdict.judged.style, ())
    has_adapter = (run.folder / "adapter").is_dir()
    merge = Step(
        "Merge the adapter into the base model; the merged weights are checked against base and adapter.",
        f"make merge RUN={folder} OUT=out/merged",
    )
    again = Step("Evaluate again, against the base or another run.", f"make eval RUN={folder} BASELINE=base")
    return (*steps, *((merge,) if has_adapter and verdict.judged.style == "good" else ()), again)


_AFTER_DIVERGENCE = Step(
    "The same command comes to the same end. Read what the diagnosis says of the curve and its rows; then lower "
    "train.learning_rate, or set train.on_divergence: rewind, and run that: another recipe is another run."
)
_READING = {
    "good": (
        Step("Read the broken answers before relying on the average: they are what users will notice first."),
    ),
    "bad": (
        Step(
            "Read the broken answers: one shared cause (format, one intent, one source) is mended in the data."
        ),
        Step("If they have no shared cause, tune less: fewer epochs, a lower learning rate or a lower rank."),
    ),
    "unsure": (
        Step(
            "Evaluate on more items, or on items that differ more from each other; the interval shrinks with the square root of n."
        ),
    ),
    "neutral": (
        Step(
            "See whether training moved at all: a flat loss points at the rate or the labels, a falling one at the data."
        ),
        Step("Read the answers that both arms get wrong: they show what the training rows do not teach."),
    ),
}
