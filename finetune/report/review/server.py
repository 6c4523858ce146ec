"""The page of a blinded review of answers, served to this machine only (see `local_page`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.report.review.local_page import LocalPage
from finetune.report.review.sample import ReviewItem
from finetune.report.review.verdicts import VerdictFile, key_of
from finetune.report.untrusted import visible


class ReviewServer(LocalPage):
    """Serves one review; verdicts are saved at once."""

    template = "review.html"
    saves_at = "/verdict"

    def __init__(self, items: Sequence[ReviewItem], verdicts: VerdictFile, *, port: int = 0) -> None:
        super().__init__(port=port)
        self.items, self.verdicts = list(items), verdicts

    def state(self) -> dict[str, Any]:
        """What the page shows: the items with left and right answer, and the decisions so far. Arms are not named."""
        saved = self.verdicts.read()
        return {
            "items": [
                {
                    "suite": visible(item.suite),
                    "item": visible(item.item),
                    "question": visible(item.question),
                    "reference": visible(item.reference),
                    "left": visible(item.answers[item.sides[0]]),
                    "right": visible(item.answers[item.sides[1]]),
                    "decided": _decision(item, saved.get((item.suite, item.item))),
                }
                for item in self.items
            ]
        }

    def save(self, given: Any) -> None:
        """Save the verdict {"number", "key", "note"} on an item."""
        number = given["number"]
        if type(number) is not int or not 0 <= number < len(self.items):
            raise ValueError
        self.verdicts.add(self.items[number], str(given["key"]), str(given.get("note", "")))


def _decision(item: ReviewItem, saved: dict[str, Any] | None) -> dict[str, str] | None:
    """A saved decision as a key of this draw, whichever sides the arms stood on then; None when it was on other answers."""
    if saved is None or saved["answers"] != item.digests:
        return None
    return {"key": key_of(saved["right"], item.sides), "note": saved["note"]}
