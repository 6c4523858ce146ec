"""Reading by hand: a fair draw, blinded sides, verdicts that survive, a page that trusts no model text."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.report.review.sample import ReviewItem, draw_review
from finetune.report.review.server import ReviewServer
from finetune.report.review.verdicts import VerdictFile, review_lines, summarise_review

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202eevil"


def _records(arm: str, scores: list[float]) -> list[dict[str, Any]]:
    return [
        {
            "item": f"item-{index}", "arm": arm, "cluster": "c", "prompt": f"question {index}", "reference": "ref",
            "output": f"{arm} {index} {HOSTILE}", "scores": {"m": score},
        }
        for index, score in enumerate(scores)
    ]  # fmt: skip


def _draw(n: int = 12, seed: int = 3) -> list[ReviewItem]:
    before = [0.0, 1.0, 0.0, 1.0] * 15
    after = [1.0, 0.0, 0.0, 1.0] * 15
    return draw_review("task", "m", _records("few_shot", before), _records("tuned", after), n=n, seed=seed)


@pytest.fixture
def items() -> list[ReviewItem]:
    return _draw()


@pytest.fixture
def server(items: list[ReviewItem], tmp_path: Path) -> Iterator[ReviewServer]:
    with ReviewServer(items, VerdictFile(tmp_path / "eval" / "review.jsonl")) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def _ask(
    server: ReviewServer, method: str, path: str, body: Any = None, *, host: str | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    connection.request(method, path, data, {"Host": host or server.host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def test_the_draw_is_even_over_the_strata_and_seeded(items: list[ReviewItem]) -> None:
    assert Counter(item.stratum for item in items) == dict.fromkeys(
        ("fixed", "broken", "both_wrong", "both_right"), 3
    )
    assert _draw() == items
    assert _draw(seed=4) != items
    assert {item.sides for item in _draw(n=60)} == {("baseline", "tuned"), ("tuned", "baseline")}
    assert len(_draw(n=500)) == 60
    for item in items:
        assert (item.right["baseline"], item.right["tuned"]) == {
            "fixed": (False, True), "broken": (True, False), "both_wrong": (False, False), "both_right": (True, True),
        }[item.stratum]  # fmt: skip


def test_a_small_stratum_is_filled_up_from_the_others() -> None:
    drawn = draw_review(
        "t", "m", _records("few_shot", [0.0] * 20), _records("tuned", [0.0] * 18 + [1.0] * 2), n=10, seed=1
    )
    assert Counter(item.stratum for item in drawn) == {"both_wrong": 8, "fixed": 2}


def test_the_state_names_no_arm_and_shows_hidden_characters(server: ReviewServer) -> None:
    state = server.state()
    assert set(state["items"][0]) == {"suite", "item", "question", "reference", "left", "right", "decided"}
    assert "\u202e" not in json.dumps(state, ensure_ascii=False)
    assert "⟨U+202E⟩" in state["items"][0]["left"]


def test_verdicts_are_saved_at_once_and_the_last_one_counts(
    server: ReviewServer, items: list[ReviewItem]
) -> None:
    token = f"?token={server.token}"
    assert _ask(server, "POST", f"/verdict{token}", {"number": 0, "key": "1", "note": "left ✓"})[0] == 200
    assert _ask(server, "POST", f"/verdict{token}", {"number": 0, "key": "2"})[0] == 200
    lines = server.verdicts.path.read_text().splitlines()
    assert len(lines) == 2
    saved = server.verdicts.read()["task", items[0].item]
    assert saved["right"] == {items[0].sides[0]: False, items[0].sides[1]: True}
    state = json.loads(_ask(server, "GET", f"/state{token}")[1])
    assert state["items"][0]["decided"] == {"key": "2", "note": ""}
    assert state["items"][1]["decided"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"number": 99, "key": "1"},
        {"number": -1, "key": "1"},
        {"number": True, "key": "1"},
        {"number": 0, "key": "5"},
        {"number": 0},
        {"number": 0, "key": "1", "note": "x" * 5000},
        [1],
        b"not json",
        b"x" * 70_000,
    ],
)
def test_a_faulty_verdict_is_refused_and_not_saved(server: ReviewServer, body: Any) -> None:
    assert _ask(server, "POST", f"/verdict?token={server.token}", body)[0] == 400
    assert not server.verdicts.path.exists()


@pytest.mark.parametrize("path", ["/", "/state", "/?token=wrong", "/state?token="])
def test_without_the_token_nothing_is_shown(server: ReviewServer, path: str) -> None:
    status, text, _ = _ask(server, "GET", path)
    assert status == 403
    assert "question" not in text


def test_another_host_name_is_refused(server: ReviewServer) -> None:
    assert _ask(server, "GET", f"/state?token={server.token}", host="evil.example")[0] == 403
    assert (
        _ask(
            server,
            "POST",
            f"/verdict?token={server.token}",
            {"number": 0, "key": "1"},
            host="evil.example:80",
        )[0]
        == 403
    )


def test_it_listens_on_this_machine_only_and_forbids_everything_else(server: ReviewServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, text, headers = _ask(server, "GET", f"/?token={server.token}")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy and "http" not in policy
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "{nonce}" not in text
    assert _ask(server, "GET", f"/other?token={server.token}")[0] == 404


def test_a_port_in_use_is_a_user_error(server: ReviewServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        ReviewServer([], VerdictFile(tmp_path / "x"), port=server.server_address[1])


def _verdict(tuned_right: bool, scorer_right: bool = True) -> dict[str, Any]:
    return {
        "suite": "task", "item": "i", "note": "", "right": {"baseline": True, "tuned": tuned_right},
        "scorer": {"baseline": True, "tuned": scorer_right},
    }  # fmt: skip


def test_no_failure_in_forty_proves_a_rate_below_seven_percent() -> None:
    found = summarise_review([_verdict(True)] * 40)
    assert found["failure_rate_below"] == pytest.approx(0.0722, abs=1e-4)
    assert "below 7.2% (95 %)" in "\n".join(review_lines(found, 40))
    assert summarise_review([_verdict(True)] * 39 + [_verdict(False)])["failure_rate_below"] is None


def test_agreement_and_kappa_by_hand() -> None:
    verdicts = [_verdict(True, True), _verdict(False, False), _verdict(True, False), _verdict(False, True)]
    found = summarise_review(verdicts)
    assert (found["answers"], found["agreed"], found["tuned_wrong"]) == (8, 6, 2)
    # 8 pairs: both yes 5, both no 1, reader only 1, scorer only 1; chance = .75 * .75 + .25 * .25
    assert found["kappa"] == pytest.approx((0.75 - 0.625) / 0.375)
    assert len(found["disagreements"]) == 2
    assert summarise_review([_verdict(True)])["kappa"] is None
    assert summarise_review([])["agreement"] is None
    assert review_lines(summarise_review([]), 40) == ["0 of 40 items read"]


def _open(tab: Any, url: str) -> None:
    tab.messages.clear()
    tab.requests.clear()
    tab.send("Page.navigate", url=url)
    tab.evaluate(
        "new Promise((done) => { const look = () => document.querySelector('#question')?.textContent ? done(true) : "
        "setTimeout(look, 20); look(); })"
    )


def _press(tab: Any, key: str) -> None:
    tab.evaluate(f"document.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")


def _until(tab: Any, condition: str) -> None:
    tab.evaluate(
        f"new Promise((done) => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
    )


def test_the_page_is_read_with_keys_and_model_text_stays_text(
    tab: Any, server: ReviewServer, items: list[ReviewItem], tmp_path: Path
) -> None:
    _open(tab, server.url)
    assert tab.evaluate("document.title") == "Review"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert "<script>" in tab.evaluate("document.querySelector('#left').textContent")
    _press(tab, "3")
    _until(tab, "document.querySelector('#count').textContent.startsWith('1 of')")
    assert tab.evaluate("document.querySelector('#place').textContent") == "2 / 12"
    tab.evaluate("document.querySelector('#note').value = 'odd'")
    _press(tab, "4")
    _until(tab, "document.querySelector('#count').textContent.startsWith('2 of')")
    saved = server.verdicts.read()
    assert saved["task", items[0].item]["right"] == {"baseline": True, "tuned": True}
    assert saved["task", items[1].item]["note"] == "odd"
    _press(tab, "ArrowLeft")
    assert tab.evaluate("document.querySelector('[data-key=\"4\"]').getAttribute('aria-pressed')") == "true"
    assert tab.messages == []
    assert all(request.startswith((f"http://{server.host}/", "data:")) for request in tab.requests)
    tab.screenshot(tmp_path / "review.png")

    _open(tab, server.url)  # a restart goes on at the first item that is open
    assert tab.evaluate("document.querySelector('#place').textContent") == "3 / 12"


def test_the_page_fits_a_phone_and_says_when_all_is_read(
    tab: Any, server: ReviewServer, items: list[ReviewItem]
) -> None:
    for item in items[:-1]:
        server.verdicts.add(item, "3", "")
    tab.send("Emulation.setDeviceMetricsOverride", width=380, height=900, deviceScaleFactor=1, mobile=True)
    _open(tab, server.url)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380
    _press(tab, "1")
    _until(tab, "document.querySelector('#said').textContent.startsWith('All read')")
    assert len(server.verdicts.read()) == len(items)
