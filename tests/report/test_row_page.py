"""Reading rows by hand: a fair draw, what is learnt in colour, marks that are saved, text that stays text."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.data.marks import MarkFile
from finetune.data.rows import Row
from finetune.report.review.row_page import RowPage, write_row_page
from finetune.report.review.rows import ReadRow, by_turn, draw_rows, prepare_rows, row_state, summarise_marks

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>\u202eevil {nonce}"


def row_of(n: int, answer: str = "answer") -> Row:
    turns = (
        {"role": "user", "content": f"question {n} {HOSTILE}"},
        {"role": "assistant", "content": f"{answer} {n}"},
    )
    return Row(f"row-{n}", turns, f"g{n}", f"rows.jsonl:{n}", {"topic": "even" if n % 2 == 0 else "odd"})


@pytest.fixture
def read(tiny_tokenizer: Any) -> list[ReadRow]:
    rows = [row_of(n) for n in range(6)]
    flags = [["refusal"] if n == 5 else [] for n in range(6)]
    return prepare_rows(rows, flags, [(n, n < 5) for n in range(6)], tiny_tokenizer)


@pytest.fixture
def page(read: list[ReadRow], tmp_path: Path) -> Iterator[RowPage]:
    with RowPage(read, MarkFile(tmp_path / "marks.jsonl"), "mine, train") as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_the_draw_is_seeded_even_and_tells_flagged_rows_apart() -> None:
    rows = [row_of(n) for n in range(1000)]
    flags = [["refusal"] if n % 10 == 0 else [] for n in range(1000)]
    drawn = draw_rows(rows, flags, n=100, n_flagged=50, seed=1)
    assert drawn == draw_rows(rows, flags, n=100, n_flagged=50, seed=1) != draw_rows(rows, flags, seed=2)
    assert len(drawn) == len({index for index, _ in drawn}) == 150
    assert sum(is_drawn for _, is_drawn in drawn) == 100
    assert all(flags[index] for index, is_drawn in drawn if not is_drawn)
    assert 2 <= sum(bool(flags[index]) for index, is_drawn in drawn if is_drawn) <= 25
    assert len(draw_rows(rows[:3], flags[:3], n=100)) == 3


def test_segments_are_the_tokens_of_training(read: list[ReadRow]) -> None:
    learnt = [text for text, is_learnt in read[0].segments if is_learnt]
    assert learnt == ["answer 0<|im_end|>"]
    whole = "".join(text for text, _ in read[0].segments)
    assert whole.startswith("<|im_start|>system\nYou are tiny.") and whole.endswith("<|im_end|>\n")
    assert read[0].n_targets == len("answer 0") + 1


def test_without_a_tokenizer_rows_are_shown_turn_by_turn() -> None:
    marked = Row(
        "r",
        ({"role": "assistant", "content": "no", "train": False}, {"role": "assistant", "content": "yes"}),
        "g",
        "s",
    )
    assert [text for text, is_learnt in by_turn(marked) if is_learnt] == ["yes\n\n"]
    pair = Row("p", ({"role": "user", "content": "q"},), "g", "s", kind="preference",
               chosen=({"role": "assistant", "content": "good"},), rejected=({"role": "assistant", "content": "bad"},))  # fmt: skip
    assert [text for text, is_learnt in by_turn(pair) if is_learnt] == ["good\n\n"]
    assert "rejected assistant\n" in [text for text, _ in by_turn(pair)]
    text = Row("t", (), "g", "s", kind="text", text="words")
    assert by_turn(text) == [("words", True)]
    steps = Row(
        "s",
        ({"role": "user", "content": "q"},),
        "g",
        "s",
        kind="stepwise",
        steps=({"text": "1", "correct": True},),
    )
    assert ("step, right\n", False) in by_turn(steps)


def test_a_row_that_cannot_be_rendered_is_shown_and_flagged(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace(
        "{{ message['content'] }}", "{{ message['content'][:1] }}"
    )
    tiny_tokenizer.chat_template = tiny_tokenizer.chat_template.replace("[:1]", "|replace('7', '')")
    (shown,) = prepare_rows([row_of(7)], [[]], [(0, True)], tiny_tokenizer)
    assert shown.flags == ("cannot be rendered",)
    assert "rewrites the answer" in shown.segments[0][0]


def test_the_state_shows_hidden_characters_and_cuts_long_rows() -> None:
    (read,) = prepare_rows([row_of(1, "x" * 50_000)], [["empty"]], [(0, True)])
    state = row_state(read, None)
    shown = "".join(segment["text"] for segment in state["segments"])
    assert "\u202e" not in shown and "⟨U+202E⟩" in shown
    assert len(shown) < 21_000 and shown.endswith("… cut")
    assert (state["flags"], state["mark"], state["tags"]) == (["empty"], None, {"topic": "odd"})


def ask(page: RowPage, method: str, path: str, body: Any = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", page.server_address[1], timeout=10)
    connection.request(method, path, None if body is None else json.dumps(body).encode(), {"Host": page.host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_marks_are_saved_at_once_and_shown_again(page: RowPage) -> None:
    at = f"/mark?token={page.token}"
    assert ask(page, "POST", at, {"number": 0, "decision": "drop", "note": "spam"})[0] == 200
    assert ask(page, "POST", at, {"number": 1, "decision": "fix", "answer": "better"})[0] == 200
    state = json.loads(ask(page, "GET", f"/state?token={page.token}")[1])
    assert state["rows"][0]["mark"] == {"decision": "drop", "note": "spam", "answer": None}
    assert state["rows"][1]["mark"]["answer"] == "better"
    assert state["rows"][2]["mark"] is None
    assert page.marks.read()[page.rows[0].row.content_digest()].decision == "drop"


@pytest.mark.parametrize(
    "body",
    [{"number": 6, "decision": "keep"}, {"number": True, "decision": "keep"}, {"number": 0, "decision": "perhaps"}, {"number": 0},
     {"number": 0, "decision": "drop", "answer": "x"}, {"number": 0, "decision": "fix", "answer": 1}, [1], "x"],
)  # fmt: skip
def test_a_faulty_mark_is_refused(page: RowPage, body: Any) -> None:
    assert ask(page, "POST", f"/mark?token={page.token}", body)[0] == 400
    assert not page.marks.path.exists()


def test_nothing_without_the_token(page: RowPage) -> None:
    assert [ask(page, "GET", path)[0] for path in ("/", "/state", "/?token=x")] == [403] * 3
    assert ask(page, "POST", "/mark", {"number": 0, "decision": "drop"})[0] == 403
    status, _, headers = ask(page, "GET", f"/?token={page.token}")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_the_summary_speaks_of_the_random_rows_only(read: list[ReadRow], tmp_path: Path) -> None:
    marks = MarkFile(tmp_path / "m.jsonl")
    for one, decision in zip(read, ["keep", "keep", "drop", "keep", "fix", "drop"], strict=True):
        marks.add(one.row, decision)
    found = summarise_marks(read, marks.read())
    assert (found["read"], found["keep"], found["drop"], found["fix"]) == (6, 3, 2, 1)
    assert (found["drawn_read"], found["drawn_faulty"]) == (5, 2)
    assert found["faulty_low"] < 0.4 < found["faulty_high"]
    assert summarise_marks(read, {})["faulty_low"] is None


def test_the_page_as_one_file_holds_no_markup_of_rows(read: list[ReadRow], tmp_path: Path) -> None:
    path = write_row_page(tmp_path / "out" / "rows.html", read, MarkFile(tmp_path / "m.jsonl"), "mine")
    text = path.read_text()
    assert "<img" not in text and "onerror" in text
    assert len(re.findall(r"</script>", text)) == 2
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', text))
    assert f"script-src 'nonce-{nonce}'" in text
    assert not re.search(r"https?://", text.split('id="held"')[0])


def _open(tab: Any, url: str) -> None:
    tab.messages.clear()
    tab.requests.clear()
    tab.send("Page.navigate", url=url)
    _until(tab, "document.querySelector('#text')?.textContent")


def _until(tab: Any, condition: str) -> None:
    tab.evaluate(
        f"new Promise((done) => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
    )


def _press(tab: Any, key: str) -> None:
    tab.evaluate(f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")


def _read(tab: Any, n: int) -> None:
    _until(tab, f"document.querySelector('#count').textContent.startsWith('{n} of')")


def test_rows_are_read_with_keys_filtered_and_mended(tab: Any, page: RowPage, tmp_path: Path) -> None:
    _open(tab, page.url)
    assert tab.evaluate("document.title") == "mine, train"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert tab.evaluate("document.querySelector('#text .learnt').textContent") == "answer 0<|im_end|>"
    tab.send("Emulation.setDeviceMetricsOverride", width=900, height=900, deviceScaleFactor=1, mobile=False)
    tab.screenshot(tmp_path / "rows.png")
    _press(tab, "1")
    _read(tab, 1)
    _press(tab, "2")
    _read(tab, 2)
    _press(tab, "3")
    _read(tab, 3)
    assert tab.evaluate("document.querySelector('#mending').hidden") is False
    tab.evaluate(
        "document.querySelector('#answer').value = 'mended'; document.querySelector('#mend').click()"
    )
    _until(tab, "document.querySelector('#place').textContent === '4 / 6'")
    saved = page.marks.read()
    decisions = [saved[one.row.content_digest()].decision for one in page.rows[:3]]
    assert decisions == ["keep", "drop", "fix"]
    assert saved[page.rows[2].row.content_digest()].answer == "mended"

    def choose(name: str, value: str) -> str:
        tab.evaluate(
            f"document.querySelector('#{name}').value = '{value}'; document.querySelector('#{name}').dispatchEvent(new Event('change'))"
        )
        return str(tab.evaluate("document.querySelector('#place').textContent"))

    assert choose("which", "open") == "1 / 3"
    assert choose("flag", "refusal") == "1 / 1"
    assert choose("tag", "topic: even") == "no row of this kind"
    assert choose("flag", "") == "1 / 1"
    assert tab.messages == []
    assert all(request.startswith((f"http://{page.host}/", "data:")) for request in tab.requests)


def test_the_file_works_alone_and_gives_its_marks(tab: Any, read: list[ReadRow], tmp_path: Path) -> None:
    path = write_row_page(tmp_path / "rows.html", read, MarkFile(tmp_path / "m.jsonl"), "alone")
    tab.send("Emulation.setDeviceMetricsOverride", width=380, height=900, deviceScaleFactor=1, mobile=True)
    _open(tab, path.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380
    assert tab.evaluate("document.querySelector('#download').hidden") is False
    _press(tab, "2")
    _read(tab, 1)
    lines = tab.evaluate(
        "new Promise((done) => { const make = URL.createObjectURL; URL.createObjectURL = (blob) => { blob.text().then(done); "
        "return make.call(URL, blob); }; document.querySelector('#download').click(); })"
    )
    target = tmp_path / "downloaded.jsonl"
    target.write_text(lines)
    (mark,) = MarkFile(target).read().values()
    assert (mark.decision, mark.digest) == ("drop", read[0].row.content_digest())
    assert tab.messages == []
    assert all(request.startswith(("file:", "data:", "blob:")) for request in tab.requests)
