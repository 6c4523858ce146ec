"""Reading by hand: a fair draw, blinded sides, verdicts that survive, a page that trusts no model text."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.evaluation.suite import load_suite
from finetune.report.review.sample import ReviewItem, draw_review, readable_suite, scorer_says
from finetune.report.review.server import ReviewServer
from finetune.report.review.verdicts import VerdictFile, review_lines, summarise_review

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202eevil"


def _records(arm: str, scores: list[float]) -> list[dict[str, Any]]:
    return [
        {
            "item": f"item-{index}", "arm": arm, "cluster": "c", "prompt": f"<{arm}> prompt", "question": f"question {index}",
            "reference": "ref",
            "output": f"{arm} {index} {HOSTILE}", "scores": {"m": score},
        }
        for index, score in enumerate(scores)
    ]  # fmt: skip


def _is_right(record: dict[str, Any]) -> bool | None:
    score = record["scores"]["m"]
    return None if score is None else bool(score == 1.0)


def _draw(n: int = 12, seed: int = 3) -> list[ReviewItem]:
    before = [0.0, 1.0, 0.0, 1.0] * 15
    after = [1.0, 0.0, 0.0, 1.0] * 15
    return draw_review(
        "task", _is_right, _records("few_shot", before), _records("tuned", after), n=n, seed=seed
    )


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
    after = _records("tuned", [0.0] * 18 + [1.0] * 2)
    drawn = draw_review("t", _is_right, _records("few_shot", [0.0] * 20), after, n=10, seed=1)
    assert Counter(item.stratum for item in drawn) == {"both_wrong": 8, "fixed": 2}


def test_a_larger_draw_holds_the_smaller_one_with_the_same_sides() -> None:
    few, many = _draw(n=12), {item.item: item for item in _draw(n=40)}
    assert all(many[item.item] == item for item in few)


def test_items_of_which_the_scorer_knows_nothing_are_not_drawn() -> None:
    before, after = _records("few_shot", [0.0, 1.0] * 4), _records("tuned", [1.0] * 8)
    after[3]["scores"]["m"] = None
    drawn = draw_review("t", _is_right, before, after, n=40, seed=1)
    assert len(drawn) == 7 and "item-3" not in {item.item for item in drawn}


def _suite(folder: Path, name: str, scorer: str, task: str = "generate") -> Any:
    (folder / "items.jsonl").write_text("")
    text = f"suite: 1\nname: {name}\ntask: {task}\nitems: {{jsonl: items.jsonl}}\nscorers: [{scorer}]\nprimary_metric: m\n"
    (folder / f"{name}.yaml").write_text(text)
    return load_suite(folder / f"{name}.yaml")


def test_answers_are_read_not_likelihoods(tmp_path: Path) -> None:
    texts = _suite(tmp_path, "texts", "{scorer: nll_per_token, metric: m}", "text")
    written = _suite(tmp_path, "written", "{scorer: text_match, metric: m}")
    assert readable_suite([texts, written], named=False) is written
    with pytest.raises(UserError, match="texts measures likelihoods"):
        readable_suite([texts], named=True)
    with pytest.raises(UserError, match="has no answers to read"):
        readable_suite([texts], named=False)


def test_a_judges_pass_is_what_a_reader_is_compared_with(tmp_path: Path) -> None:
    judged = "{scorer: judge, metric: m, parameters: {rubric: r, local: 'builtin:x', scale: [1, 5]}}"
    says = scorer_says(_suite(tmp_path, "judged", judged))
    assert [says({"scores": {"m": score}}) for score in (3.0, 4.0, None)] == [False, True, None]
    says = scorer_says(_suite(tmp_path, "written", "{scorer: text_match, metric: m}"))
    assert [says({"scores": {"m": score}}) for score in (0.9, 1.0)] == [False, True]


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
    assert saved["answers"] == items[0].digests
    state = json.loads(_ask(server, "GET", f"/state{token}")[1])
    assert state["items"][0]["decided"] == {"key": "2", "note": ""}
    assert state["items"][1]["decided"] is None


def test_a_verdict_counts_for_these_answers_whichever_side_they_stand_on(
    server: ReviewServer, items: list[ReviewItem]
) -> None:
    server.verdicts.add(items[0], "1", "kept")
    server.items[0] = replace(items[0], sides=(items[0].sides[1], items[0].sides[0]))
    assert server.state()["items"][0]["decided"] == {"key": "2", "note": "kept"}
    assert len(server.verdicts.of([items[0]])) == 1
    changed = replace(items[0], answers={**items[0].answers, "tuned": "another answer"})
    server.items[0] = changed
    assert server.state()["items"][0]["decided"] is None
    assert server.verdicts.of([changed]) == []


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


def _verdict(tuned_right: bool, scorer_right: bool = True, n: int = 0) -> dict[str, Any]:
    return {
        "suite": "task", "item": f"i{n}", "note": "", "right": {"baseline": True, "tuned": tuned_right},
        "scorer": {"baseline": True, "tuned": scorer_right},
    }  # fmt: skip


def test_no_failure_in_forty_proves_a_rate_below_seven_percent() -> None:
    found = summarise_review([_verdict(True, n=n) for n in range(40)])
    assert found["failure_rate_below"] == pytest.approx(0.0722, abs=1e-4)
    assert "no tuned answer of 40 was found wrong" in "\n".join(review_lines(found, 40))
    assert "below 7.2% (95 %)" in "\n".join(review_lines(found, 40))
    one = summarise_review([_verdict(n > 0, n=n) for n in range(40)])
    assert one["failure_rate_below"] == pytest.approx(0.1132, abs=1e-4)  # Clopper & Pearson, 1 of 40
    assert "1 tuned answers of 40 were found wrong" in "\n".join(review_lines(one, 40))


def test_agreement_and_kappa_by_hand() -> None:
    outcomes = [(True, True), (False, False), (True, False), (False, True)]
    verdicts = [_verdict(*outcome, n=n) for n, outcome in enumerate(outcomes)]
    found = summarise_review(verdicts)
    assert (found["answers"], found["agreed"], found["tuned_wrong"]) == (8, 6, 2)
    # 8 pairs: both yes 5, both no 1, reader only 1, scorer only 1; chance = .75 * .75 + .25 * .25
    assert found["kappa"] == pytest.approx((0.75 - 0.625) / 0.375)
    assert found["kappa_low"] < found["kappa"] < found["kappa_high"]
    assert "kappa 0.33 [" in "\n".join(review_lines(found, 4))
    assert len(found["disagreements"]) == 2
    assert summarise_review([_verdict(True)])["kappa"] is None
    assert summarise_review([])["agreement"] is None
    assert review_lines(summarise_review([]), 40) == ["0 of 40 items read"]


def _open(tab: Any, url: str) -> None:
    tab.messages.clear()
    tab.requests.clear()
    tab.go(url)
    _until(tab, "document.querySelector('#question').textContent")


_CODES = {"ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}


def _press(tab: Any, key: str) -> None:
    """A key as a keyboard sends it: to whatever has the focus, with its text where it has one."""
    printed = {} if key in _CODES else {"text": key}
    code = _CODES.get(key, ord(key.upper()[0]))
    tab.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **printed)
    tab.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)


def _network(tab: Any, *, offline: bool) -> None:
    tab.send(
        "Network.emulateNetworkConditions",
        offline=offline,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )


def _until(tab: Any, condition: str) -> None:
    assert tab.evaluate(
        f"new Promise((done) => {{ let left = 3000; const look = () => ({condition}) ? done(true) : left-- ? "
        "setTimeout(look, 20) : done(false); look(); })"
    ), condition


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
    _press(tab, "n")
    for key in "odd 3":
        _press(tab, key)  # a digit in a note is no verdict
    _press(tab, "Escape")
    _press(tab, "4")
    _until(tab, "document.querySelector('#count').textContent.startsWith('2 of')")
    saved = server.verdicts.read()
    assert saved["task", items[0].item]["right"] == {"baseline": True, "tuned": True}
    assert saved["task", items[1].item]["note"] == "odd 3"
    _press(tab, "ArrowLeft")
    assert tab.evaluate("document.querySelector('[data-key=\"4\"]').getAttribute('aria-pressed')") == "true"
    assert tab.messages == []
    assert all(request.startswith((f"http://{server.host}/", "data:")) for request in tab.requests)
    _press(tab, "n")
    _press(tab, "x")
    _press(tab, "Escape")  # a note that is changed later is saved at once, with the verdict that stands
    _until(tab, "document.querySelector('#said').textContent === 'Saved.'")
    assert server.verdicts.read()["task", items[1].item]["note"] == "odd 3x"
    assert server.verdicts.read()["task", items[1].item]["key"] == "4"
    tab.screenshot(tmp_path / "review.png")

    _open(tab, server.url)  # a restart goes on at the first item that is open
    assert tab.evaluate("document.querySelector('#place').textContent") == "3 / 12"
    assert tab.evaluate("document.querySelector('#progress').value") == 2


def test_the_page_names_no_arm_and_hides_which_side_is_which(
    tab: Any, server: ReviewServer, items: list[ReviewItem]
) -> None:
    """Everything that reaches the browser, not only what is shown: neither arm is named, and sides differ by item."""
    for item in items:
        for arm in item.answers:
            item.answers[arm] = f"answer {(arm == 'tuned' and 1) or 0} of {item.item}"
    _open(tab, server.url)
    received = tab.evaluate("fetch('/state' + location.search).then((answer) => answer.text())")
    shown = tab.evaluate("document.documentElement.outerHTML")
    for word in ("tuned", "baseline", "few_shot", "stratum", "broken", "both_wrong", "scorer"):
        assert word not in received, word
        assert word not in shown, word
    lefts = [item["left"].startswith("answer 1") for item in json.loads(received)["items"]]
    assert True in lefts and False in lefts
    assert lefts == [item.sides[0] == "tuned" for item in items]


def test_a_wrong_token_shows_nothing_to_the_browser(tab: Any, server: ReviewServer) -> None:
    tab.messages.clear()
    tab.go(f"http://{server.host}/?token=guessed")
    assert "open the address that the command printed" in tab.evaluate("document.body.textContent")
    assert tab.evaluate("document.querySelector('#question')") is None
    tab.messages.clear()


def test_a_verdict_that_cannot_be_saved_is_said(tab: Any, server: ReviewServer) -> None:
    """Cut off by the browser: a closed server still answers on a connection that the browser opened in advance."""
    _open(tab, server.url)
    _network(tab, offline=True)
    try:
        _press(tab, "1")
        _until(tab, "document.querySelector('#said').textContent === 'Not saved: the command has ended'")
    finally:
        _network(tab, offline=False)
    assert tab.evaluate("document.querySelector('#place').textContent") == "1 / 12"
    assert server.verdicts.read() == {}
    tab.messages.clear()  # the browser's own remark on the refused connection


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
