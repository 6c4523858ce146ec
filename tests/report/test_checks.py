"""The doctor's checks on the page: what is pressing first, and everything else told as it was found."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.doctor.finding import at_most, fault, ok, skipped, warning
from finetune.paths import write_json
from finetune.report.checks import read_checks
from finetune.report.page import render_page
from finetune.report.read import read_run

EVIL = "<script>alert(1)</script>"


def written(folder: Path, *findings: Any) -> Any:
    write_json(folder / "checks.json", {"findings": [one.to_dict() for one in findings]})
    return read_run(folder)


def test_faults_come_before_warnings_and_carry_their_remedies(run_folder: Path) -> None:
    run = written(
        run_folder,
        ok("BOS once", "no row of 256 begins with two"),
        warning("one language", "6 % of the answers differ", "part the tasks", where="rows 3 and 9"),
        fault("memory forecast", "24 GB needed", "set train.pack_tokens: 256"),
        skipped("refusals", "no suite asks for any"),
    )
    checks = read_checks(run)
    assert checks is not None
    assert [row.name for row in checks.pressing] == ["memory forecast", "one language"]
    assert (checks.judged.word, checks.judged.style) == ("fault", "bad")
    assert checks.sentence == "4 checks before the training: 1 ok, 1 warning, 1 fault, 1 skipped."
    page = render_page(run)
    assert page.index("set train.pack_tokens: 256") < page.index("part the tasks") < page.index("BOS once")
    assert "rows 3 and 9" in page


def test_numbers_stand_beside_their_limits(run_folder: Path) -> None:
    checks = read_checks(written(run_folder, at_most("gradients", 3e-4, 1e-6, "differ", remedy="tell us")))
    assert checks is not None and checks.rows[0].number == "3e−4, limit 1e−6"


def test_only_skipped_checks_are_not_called_ok(run_folder: Path) -> None:
    checks = read_checks(written(run_folder, skipped("refusals", "none asked for")))
    assert checks is not None and checks.judged.word == "skipped" and not checks.pressing


def test_a_finding_is_text_and_nothing_else(run_folder: Path) -> None:
    run = written(run_folder, warning(EVIL, EVIL, EVIL, where=EVIL, group=EVIL))
    page = render_page(run)
    assert EVIL not in page and "&lt;script&gt;alert(1)" in page


def test_a_run_without_checks_and_odd_findings_are_told(factory: ModuleType, run_folder: Path) -> None:
    (run_folder / "checks.json").unlink(missing_ok=True)
    assert "checks are not in the run folder" in render_page(read_run(run_folder))
    odd = [7, {"check": 3}, {"check": "x", "status": ["?"], "detail": None, "measured": "1", "limit": {}}]
    write_json(run_folder / "checks.json", {"findings": odd})
    checks = read_checks(read_run(run_folder))
    assert checks is not None
    assert [(row.name, row.judged.word, row.number) for row in checks.rows] == [("x", "skipped", None)]
    write_json(run_folder / "checks.json", {"findings": "none"})
    assert read_checks(read_run(run_folder)) is None
