"""The page as a reader sees it, in a headless browser: quiet console, no network, plots drawn, nothing cut off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from finetune.plan.cost import break_even
from finetune.report import write_report
from finetune.report.break_even import write_break_even_page

_PLOTS = """[...document.querySelectorAll(".plot")].map((plot) => {
  const boxes = [...plot.querySelectorAll("path.curve, circle.mark")].filter((one) => one.closest(".area"))
    .map((one) => one.getBoundingClientRect());
  const texts = [...plot.querySelectorAll(".y-axis text, .x-axis text")].map((one) => one.textContent);
  return {name: plot.id, drawn: boxes.some((box) => box.width + box.height > 4), texts: texts.length,
    stroke: getComputedStyle(plot.querySelector(".area .curve")).stroke};
})"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [380, 1280])
def test_the_page_is_quiet_complete_and_fits(tab: Any, run_folder: Path, width: int, dark: bool) -> None:
    page = write_report(run_folder)
    tab.messages.clear()
    tab.requests.clear()
    tab.open(page, width=width, dark=dark)
    assert tab.messages == []
    assert tab.requests == [page.resolve().as_uri()]
    assert tab.evaluate("document.title") == "home_intents_lora: Improved"  # no answer ran and changed it
    plots = tab.evaluate(_PLOTS)
    assert len(plots) == 5
    assert all(plot["drawn"] and plot["texts"] >= 4 and plot["stroke"] != "none" for plot in plots), plots
    assert tab.evaluate("document.querySelectorAll('svg.forest .estimate').length") == 7
    told = tab.evaluate("[...document.querySelectorAll('main section')].map((one) => one.id)")
    assert {"verdict", "checks", "training", "memory", "data"} <= set(told)
    assert tab.evaluate("document.querySelectorAll('#memory rect').length") >= 10
    assert tab.evaluate("document.querySelectorAll('#checks tbody tr').length") == 3
    assert tab.evaluate("document.querySelectorAll('#training details.sampled tbody tr').length") == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 21, 23)" if dark else "rgb(253, 253, 252)")
    tab.screenshot(page.with_name(f"report-{width}-{'dark' if dark else 'light'}.png"))


def test_what_was_diagnosed_is_marked_on_the_drawn_curve(tab: Any, run_folder: Path) -> None:
    lines = (run_folder / "events.jsonl").read_text().splitlines()[:-1]  # the last one is torn
    events = [json.loads(line) for line in lines]
    for event in events:
        if event["event"] == "step" and event["step"] in (60, 120):
            event["loss"] = 9.0
        elif event.get("loss") == "nan":
            event["loss"] = 0.2
    (run_folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    tab.messages.clear()
    tab.open(write_report(run_folder), width=1280)
    assert tab.messages == []
    boxes = tab.evaluate(
        "[...document.querySelectorAll('#plot-loss .findings > *')]"
        ".map((one) => one.getBoundingClientRect()).map((box) => [box.left, box.width + box.height])"
    )
    area = tab.evaluate(
        "(() => { const box = document.querySelector('#plot-loss .area').getBoundingClientRect();"
        " return [box.left, box.right]; })()"
    )
    assert len(boxes) >= 2
    assert all(area[0] <= left <= area[1] and size > 2 for left, size in boxes)
    told = tab.evaluate("document.querySelector('#training > div > .checks').innerText")
    assert "spike" in told.lower() and "Remedy" in told


def test_nothing_is_wider_than_a_phone(tab: Any, run_folder: Path) -> None:
    """Also what sits in a clipped or scrolling parent, except tables in a scroller of their own."""
    tab.open(write_report(run_folder), width=380)
    tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    wide = tab.evaluate(
        "[...document.querySelectorAll('body *')].filter((one) => !one.closest('.scroller, .skip, svg') &&"
        " one.getBoundingClientRect().right > 380.5).map((one) => one.tagName + '.' + one.className)"
    )
    assert wide == []


def test_the_pointer_and_the_keys_read_values_off_a_plot(tab: Any, run_folder: Path) -> None:
    tab.open(write_report(run_folder), width=1280)
    box = tab.evaluate(
        "(() => { const area = document.querySelector('#plot-rate .area'); area.scrollIntoView({block: 'center'});"
        " const box = area.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    middle = {"x": box[0] + box[2] / 2, "y": box[1] + box[3] / 2}
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", **middle)
    readout = "document.querySelector('#plot-rate .readout').textContent"
    assert tab.evaluate(readout).startswith("step 75: learning rate 0.000")
    tab.evaluate("document.querySelector('#plot-rate .frame').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.send("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert tab.evaluate(readout).startswith("step 76: ")


def test_an_injected_script_does_not_run(tab: Any, run_folder: Path) -> None:
    """Should escaping ever fail, the policy is the second wall: plant a script behind its back and see it stopped."""
    page = write_report(run_folder)
    html = page.read_text(encoding="utf-8")
    page.write_text(
        html.replace("<main>", "<main><script>document.title='owned'</script>", 1), encoding="utf-8"
    )
    tab.messages.clear()
    tab.open(page, width=1280)
    assert tab.evaluate("document.title") == "home_intents_lora: Improved"
    assert any("Content Security Policy" in message for message in tab.messages)
    tab.messages.clear()


def _bare(factory: ModuleType, folder: Path) -> None:
    factory.write_recipe(folder)


def _three_steps(factory: ModuleType, folder: Path) -> None:
    factory.write_run(folder, n_items=4, n_steps=3, n_broken=1)


def _very_long(factory: ModuleType, folder: Path) -> None:
    factory.write_run(folder, n_items=90, n_steps=20_000)


@pytest.mark.parametrize("build", [_bare, _three_steps, _very_long])
def test_small_and_large_runs_fit_a_phone(
    tab: Any, factory: ModuleType, tmp_path: Path, build: Callable[[ModuleType, Path], None]
) -> None:
    build(factory, tmp_path / "run")
    tab.messages.clear()
    tab.open(write_report(tmp_path / "run"), width=380)
    assert tab.messages == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= 380
    assert all(plot["drawn"] for plot in tab.evaluate(_PLOTS))


@pytest.mark.parametrize("width", [380, 1280])
def test_the_page_of_costs_over_volume_draws_both_curves(tab: Any, tmp_path: Path, width: int) -> None:
    result = break_even(
        tuning_cost=5000,
        amortise_months=12,
        large_price_per_million_tokens=5.0,
        small_price_per_million_tokens=0.3,
        gpu_per_month=700,
    )
    tab.messages.clear()
    page = write_break_even_page(
        tmp_path / "cost.html", result, months=12, query_costs={"large": 0.002, "tuned": 0.0001}
    )
    tab.open(page, width=width, dark=width == 380)
    assert tab.messages == []
    (plot,) = tab.evaluate(_PLOTS)
    assert plot["drawn"] and plot["texts"] >= 4
    assert tab.evaluate("document.querySelectorAll('#plot-cost .area path.curve').length") == 2
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.screenshot(page.with_name(f"cost-{width}.png"))
