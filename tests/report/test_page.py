"""The page as a file: sealed against what models write, and honest about what is missing."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.paths import read_json, read_jsonl, write_json, write_jsonl
from finetune.report import write_report
from finetune.report.read import read_run
from finetune.report.rendering import _printed
from finetune.report.verdict import read_verdict


class _Page(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.blocks[self._inside] = self.blocks.get(self._inside, "") + data
        else:
            self.text += data

    def flat(self) -> str:
        return re.sub(r"\s+", " ", self.text.replace("\u00a0", " "))


def _written(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def _seen(folder: Path) -> str:
    return _Page(_written(folder)).flat()


def _judge(factory: ModuleType, folder: Path, verdict: str, **changes: Any) -> None:
    entries = [factory.compared(verdict=verdict, **changes)]
    write_json(folder / "eval" / "comparison.json", factory.comparison_of(entries, verdict=verdict))


def test_the_page_names_no_host_and_holds_one_style_and_one_script(run_folder: Path) -> None:
    page = _Page(_written(run_folder))
    names = [tag for tag, _ in page.tags]
    assert (names.count("script"), names.count("style")) == (1, 1)
    assert not {"img", "link", "iframe", "object", "embed", "form", "base", "audio", "video"} & set(names)
    for _, attributes in page.tags:
        assert not [
            name for name in attributes if name.startswith("on") or name in ("style", "src", "srcset")
        ]
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_allows_exactly_the_two_blocks(run_folder: Path) -> None:
    page = _Page(_written(run_folder))
    policy = next(
        attributes["content"] or ""
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    hashes = {
        name: base64.b64encode(hashlib.sha256(page.blocks[name].encode()).digest()).decode()
        for name in ("style", "script")
    }
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'; "
        "base-uri 'none'; form-action 'none'"
    )


def test_hostile_texts_are_shown_as_text(run_folder: Path) -> None:
    html = _written(run_folder)
    page = _Page(html)
    assert '</pre><script>document.title="owned"</script>' in page.text
    assert "<script>alert(1)</script>" in page.text  # the recipe's description
    assert "<b>not bold</b>" in page.text  # a value of the environment
    hidden = set(
        re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]", html)
    )
    assert hidden == set()
    assert "\u27e8U+202E\u27e9" in page.text
    assert "3,800 more characters" in page.text


def test_equal_folders_give_equal_bytes(run_folder: Path) -> None:
    assert _written(run_folder) == _written(run_folder)


def test_improved(run_folder: Path) -> None:
    text = _seen(run_folder)
    assert re.search(
        r"Improved Exact match rose by \d+\.\d points against the few-shot base model "
        r"\(95 % interval \+\d+\.\d to \+\d+\.\d, n = 204 items in 31 clusters\)\.",
        text,
    )
    assert "Regressed general: accuracy fell by 4.0 points" in text  # not hidden behind the good news
    assert "2,074 read = 1,544 kept + 523 dropped + 7 quarantined; no leaks between the splits" in text
    assert "forecast 3.42 GB, used 3.31 GB: the forecast is 3.3 % above" in text
    assert "Evaluation: forecast 1.5 GB, used 1.6 GB: the forecast is 6.2 % below." in text
    assert "make merge RUN=" in text and "make eval RUN=" in text
    assert "40 of 204 items" in text
    assert re.search(r"train rows as tokens read ?1,200 kept ?1,197 dropped too long ?3", text)


def test_regressed(factory: ModuleType, run_folder: Path) -> None:
    _judge(factory, run_folder, "regressed", difference=-0.06, low=-0.1, high=-0.02)
    text = _seen(run_folder)
    assert "Exact match fell by 6.0 points" in text and "interval −10.0 to −2.0" in text
    assert "make merge" not in text


def test_inconclusive_says_what_would_settle_it(factory: ModuleType, run_folder: Path) -> None:
    changes = {
        "difference": 0.01,
        "low": -0.03,
        "high": 0.05,
        "items_to_settle": 1900,
        "least_detectable": 0.31,
    }
    _judge(factory, run_folder, "inconclusive", **changes)
    text = _seen(run_folder)
    assert (
        "moved by +1.0 points" in text and "neither a gain nor a loss beyond the margin can be told" in text
    )
    assert (
        "cannot tell a difference below 31.0 points (80 % power); about 1,900 more would settle it." in text
    )


def test_no_evidence_claims_no_rise(factory: ModuleType, run_folder: Path) -> None:
    _judge(factory, run_folder, "no-evidence", difference=0.01, low=-0.015, high=0.04)
    text = _seen(run_folder)
    assert "No evidence of improvement" in text and "rose by" not in text


def test_no_items_is_no_difference_of_zero(factory: ModuleType, run_folder: Path) -> None:
    empty = dict.fromkeys(
        ("difference", "low", "high", "p_value", "fixed", "broken", "both_right", "both_wrong")
    )
    _judge(factory, run_folder, "inconclusive", n=0, clusters=0, least_detectable=None, **empty)
    text = _seen(run_folder)
    assert "Exact match was not compared: no items" in text
    assert "0.0 points" not in text.split("How each comparison")[0].replace("margin 2.0 points", "")


def test_an_unknown_verdict_keeps_its_word(factory: ModuleType, run_folder: Path) -> None:
    _judge(factory, run_folder, "equivalent<b>")
    assert read_verdict(read_run(run_folder)).judged.word == "Equivalent<b>"
    assert "Equivalent<b>" in _seen(run_folder)


def _drop_evaluation(folder: Path) -> None:
    shutil.rmtree(folder / "eval")


def _drop_arms(folder: Path) -> None:
    shutil.rmtree(folder / "eval")
    shutil.rmtree(folder / "baseline")


def _only(name: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name != name:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return drop


def _empty_objects(folder: Path) -> None:
    for path in folder.rglob("*.json"):
        path.write_text("{}")


def _wrong_shapes(folder: Path) -> None:
    for path in folder.rglob("*.json"):
        path.write_text(
            '{"stages": 3, "comparisons": {"a": 1}, "metrics": [1], "ledger": "x", "terms_bytes": [2]}'
        )


def _damaged(folder: Path) -> None:
    for path in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
        path.write_text('{"half": ')
    (folder / "recipe.resolved.yaml").write_text("a: [1\nb: {")


def _lists(folder: Path) -> None:
    for path in folder.rglob("*.json"):
        path.write_text("[1, 2]")


def _no_events(folder: Path) -> None:
    (folder / "events.jsonl").write_text("")


def _nan_everywhere(folder: Path) -> None:
    for path in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
        path.write_text(re.sub(r"(?<=: )-?\d+\.\d+(e-?\d+)?", "NaN", path.read_text()))


@pytest.mark.parametrize(
    "spoil",
    [
        _drop_evaluation, _drop_arms, _only("recipe.resolved.yaml"), _only("events.jsonl"), _only("eval"),
        _only("baseline"), _only("manifest.json"), _empty_objects, _wrong_shapes, _damaged, _lists, _no_events,
        _nan_everywhere,
    ],
)  # fmt: skip
def test_an_incomplete_run_has_a_page_without_nan(run_folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(run_folder)
    text = _seen(run_folder).replace(str(run_folder), "")
    assert not re.search(
        r"\b(nan|none|undefined|inf|null)\b", text.split("Resolved recipe")[0], re.IGNORECASE
    )


@pytest.mark.parametrize("value", [7, -1.5, ["x"], {"a": 1}, [{"a": []}]])
@pytest.mark.parametrize(
    "field", ["suite", "metric", "baseline", "test", "reason", "verdict", "n", "low", "cells"]
)
def test_a_field_of_the_wrong_kind_is_a_gap_of_the_page(run_folder: Path, field: str, value: Any) -> None:
    path = run_folder / "eval" / "comparison.json"
    held = read_json(path)
    held["comparisons"][0][field] = value
    write_json(path, held)
    assert "Comparisons" in _seen(run_folder)


@pytest.mark.parametrize("item", [["x"], {"a": 1}, None, 1.5])
def test_an_answer_to_no_item_is_left_out(run_folder: Path, item: Any) -> None:
    answers = run_folder / "eval" / "home_intents" / "tuned.jsonl"
    rows = read_jsonl(answers)
    write_jsonl(answers, [*rows, {**rows[0], "item": item}])
    assert len(read_run(run_folder).arm("home_intents", "tuned").items) == len(rows)  # type: ignore[union-attr]


def test_a_run_without_verdict_says_how_far_it_came(factory: ModuleType, run_folder: Path) -> None:
    _drop_evaluation(run_folder)
    factory.write_events(run_folder, 57)
    text = _seen(run_folder)
    assert (
        "No verdict yet The baseline is measured. Training reached step 57; the tuned model is not evaluated"
        in text
    )
    assert "eval/comparison.json is not in the run folder" in text
    assert "continues at the first stage that is not complete" in text


def test_an_arm_that_is_still_running_is_not_shown_as_complete(factory: ModuleType, run_folder: Path) -> None:
    folder = run_folder / "eval" / factory.SUITE
    (folder / "tuned.jsonl").unlink()
    (folder / "tuned.summary.json").unlink()
    rows = [{"key": "k"}, *({"record": {"item": str(n)}, "seconds": 1.0} for n in range(9))]
    factory.rewrite_lines(folder / "tuned.partial.jsonl", rows)
    run = read_run(run_folder)
    assert run.arm(factory.SUITE, "tuned") is None
    assert f"{factory.SUITE} / tuned is not complete: 9 answers so far." in run.gaps


def test_a_peak_that_was_not_recorded_is_not_compared(factory: ModuleType, run_folder: Path) -> None:
    factory.write_forecast(run_folder, used=None)
    text = _seen(run_folder)
    assert "forecast 3.42 GB, peak not recorded (3.1 GB seen at the end of a step)" in text
    assert text.count("the forecast is") == 1  # that of the evaluation


def test_rows_that_do_not_add_up_and_leaks_are_told_in_words(factory: ModuleType, run_folder: Path) -> None:
    factory.write_data_manifest(run_folder, n_lost=4, n_leaks=2)
    text = _seen(run_folder)
    assert "Rows unaccounted for" in text and "does not add up: +4 rows" in text
    assert "2 leaks between the splits" in text


def test_a_profile_is_named_beside_the_verdict(factory: ModuleType, run_folder: Path) -> None:
    factory.write_recipe(run_folder, profile="smoke")
    assert "Run with the profile “smoke”" in _seen(run_folder)
    factory.write_recipe(run_folder)
    assert "Run with the profile" not in _seen(run_folder)


def test_four_counts_that_miss_n_are_told(run_folder: Path) -> None:
    path = run_folder / "eval" / "comparison.json"
    comparison = read_json(path)
    comparison["comparisons"][0]["both_wrong"] += 1
    write_json(path, comparison)
    assert "The four counts add up to 205, not to the 204 items of the comparison." in _seen(run_folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        write_report(tmp_path / "absent")
    with pytest.raises(UserError, match="belongs to a run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_nobody_formatted_is_a_bug() -> None:
    with pytest.raises(TypeError, match="unformatted"):
        _printed(0.1 + 0.2)


def _colours(css: str) -> list[dict[str, str]]:
    blocks = re.findall(r":root \{([^}]*)\}", css)
    return [dict(re.findall(r"--([a-z]+): (#[0-9a-f]{3,6})", block)) for block in blocks]


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    channels = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_text_colour_has_the_contrast_of_wcag_aa(run_folder: Path) -> None:
    themes = _colours(_Page(_written(run_folder)).blocks["style"])
    assert len(themes) == 3  # light, dark, print
    for theme in themes:
        for name in ("ink", "quiet", "good", "bad", "unsure", "neutral", "train", "validation"):
            for ground in ("paper", "wash"):
                bright, dim = sorted((_luminance(theme[name]), _luminance(theme[ground])), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (name, ground)
