"""The page on which rows of a data set are read and marked: served to this machine, or one file that needs no server."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.data.marks import MarkFile
from finetune.paths import disk_faults
from finetune.report.review.local_page import LocalPage, template_text
from finetune.report.review.rows import ReadRow, row_state

_TEMPLATE = "data_review.html"
_HELD = '<script type="application/json" id="held">null</script>'
# A file has no server to send its policy, so it carries one.
_POLICY_OF_FILE = "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; base-uri 'none'"


class RowPage(LocalPage):
    """Serves rows to read; marks are saved at once to the file of marks."""

    template = _TEMPLATE
    saves_at = "/mark"
    longest_body_bytes = 1 << 20

    def __init__(self, rows: Sequence[ReadRow], marks: MarkFile, title: str, *, port: int = 0) -> None:
        super().__init__(port=port)
        self.rows, self.marks, self.title = list(rows), marks, title

    def state(self) -> dict[str, Any]:
        return page_state(self.rows, self.marks, self.title)

    def save(self, given: Any) -> None:
        """Save the mark {"number", "decision", "note", "answer"} on a row."""
        number, answer = given["number"], given.get("answer")
        if type(number) is not int or not 0 <= number < len(self.rows):
            raise ValueError
        if not (answer is None or isinstance(answer, str)):
            raise TypeError
        self.marks.add(self.rows[number].row, str(given["decision"]), str(given.get("note", "")), answer)


def page_state(rows: Sequence[ReadRow], marks: MarkFile, title: str) -> dict[str, Any]:
    """What the page shows: the rows, and the marks so far."""
    saved = marks.read()
    return {
        "title": title,
        "marks_file": marks.path.name,
        "rows": [row_state(read, saved.get(read.row.content_digest())) for read in rows],
    }


def write_row_page(path: Path, rows: Sequence[ReadRow], marks: MarkFile, title: str) -> Path:
    """The page as one file; its reader downloads the marks, to be put where the build looks for them."""
    nonce = secrets.token_urlsafe(16)
    held = (
        json.dumps(page_state(rows, marks, title))
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
    )
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY_OF_FILE}">'
    page = template_text(_TEMPLATE).replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}', 1)
    page = page.replace("{nonce}", nonce).replace(_HELD, _HELD.replace("null", held))
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    return path
