"""`finetune data review`, as a user types it: the page as a file, and what was read so far."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from finetune.cli.data_review import review
from finetune.data.look import rows_to_look_at
from finetune.data.marks import MarkFile
from finetune.errors import UserError
from finetune.report.review.row_page import RowPage

app = typer.Typer()
app.command()(review)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    made = [{"prompt": f"question {n}", "completion": f"answer {n} of its own"} for n in range(8)]
    made.append({"prompt": "help", "completion": "I'm sorry, but I can't help with that."})
    path.write_text("".join(json.dumps(one) + "\n" for one in made))
    return path


def run(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_page_is_written_and_says_what_was_read(
    rows: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    marks, html = tmp_path / "marks.jsonl", tmp_path / "rows.html"
    first, *_, last = rows_to_look_at(str(rows))
    MarkFile(marks).add(first, "drop")
    MarkFile(marks).add(last, "keep")
    done = run(rows, "--model", tiny_model_folder, "--rows", 9, "--marks", marks, "--html", html)
    assert "2 of 9 rows read: keep 1, drop 1, fix 0" in done.output
    assert "of 2 drawn at random 1 are to be dropped or fixed" in done.output
    assert "refusal" in html.read_text() and "im_end" in html.read_text()
    found = json.loads(run(rows, "--marks", marks, "--summary", "--json").stdout)
    assert (found["read"], found["drop"], found["planned"]) == (2, 1, 9)


def test_flagged_rows_are_added_to_those_drawn(rows: Path, tmp_path: Path) -> None:
    options = ("--marks", tmp_path / "m", "--summary", "--json", "--rows", 1, "--seed", 3)
    assert json.loads(run(rows, *options, "--flagged", 0).stdout)["planned"] == 1
    assert 1 < json.loads(run(rows, *options).stdout)["planned"] <= 9


def test_it_serves_until_it_is_interrupted(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []

    def look_and_end(page: RowPage) -> None:
        thread = threading.Thread(target=page.handle_request)
        thread.start()
        served.append(urllib.request.urlopen(page.url).read().decode())
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(RowPage, "serve_forever", look_and_end)
    said = run(rows, "--marks", tmp_path / "m")
    assert "open http://127.0.0.1:" in said.output
    assert "0 of 9 rows read" in said.output
    assert served[0].startswith("<!doctype html>")


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(UserError, match="no rows in"):
        run(path)
