"""Verifiers: functions, files, commands; none of them can empty a data set, hang a build or leave a process behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune.data.curate.command import CommandVerifier, verify_batch
from finetune.data.curate.functions import function_digest, load_function
from finetune.data.curate.verifiers import Verdict, as_verdict, load_verifier, verifier_of, verify_rows
from finetune.errors import UserError

ROWS = [{"id": f"r{n}", "messages": [{"role": "assistant", "content": "x" * n}]} for n in range(6)]

ECHO = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    n = len(row["messages"][0]["content"])
    print(json.dumps({"keep": n % 2 == 0, "reason": "odd" if n % 2 else ""}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(code: str, name: str = "check.py") -> list[str]:
        (tmp_path / name).write_text(code)
        return [sys.executable, "-S", name]

    return write


@pytest.mark.parametrize(
    ("answer", "keep", "reason", "score"),
    [
        (True, True, "", None),
        (False, False, "rejected", None),
        (0.7, True, "", 0.7),
        (0, False, "score 0 is below 0.5", 0.0),
        ((False, "too short"), False, "too short", None),
        ({"keep": True, "score": 0.1}, True, "", 0.1),
        ({"score": 0.9, "reason": "fine"}, True, "fine", 0.9),
        ({"score": 0.2, "reason": "thin"}, False, "score 0.2 is below 0.5: thin", 0.2),
        ({"keep": False}, False, "rejected", None),
        (Verdict(True, "as it is"), True, "as it is", None),
    ],
)
def test_the_forms_of_an_answer(answer: Any, keep: bool, reason: str, score: float | None) -> None:
    assert as_verdict(answer) == Verdict(keep, reason, score)


@pytest.mark.parametrize("answer", [None, "yes", float("nan"), {}, {"keep": "yes"}, [True], {"score": True}])
def test_an_answer_that_says_nothing_is_a_failure_not_a_yes(answer: Any) -> None:
    verdict = as_verdict(answer)
    assert verdict.failed and not verdict.keep and "verifier failed" in verdict.reason


def test_a_function_of_a_file_and_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def is_long(row):\n    return len(row['messages'][0]['content']) > 2\n"
    )
    verdicts = list(verify_rows(ROWS, load_verifier("mine.py:is_long", folder=tmp_path)))
    assert [verdict.keep for verdict in verdicts] == [False, False, False, True, True, True]
    assert load_function("json:dumps")({"a": 1}) == '{"a": 1}'
    before = function_digest("mine.py:is_long", folder=tmp_path)
    (tmp_path / "mine.py").write_text("def is_long(row):\n    return True\n")
    assert function_digest("mine.py:is_long", folder=tmp_path) != before
    assert load_function("mine.py:is_long", folder=tmp_path)({}) is True


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "names no function"),
        ("mine.py:", "names no function"),
        ("absent.py:f", "there is no file"),
        ("no_such_module_here:f", "cannot be imported"),
        ("json:dunps", "did you mean 'dumps'"),
        ("broken.py:f", "SyntaxError"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_reason(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=message) as caught:
        load_function(name, folder=tmp_path, where="curate.filters[0]")
    assert caught.value.faults[0].where == "curate.filters[0]"


def test_an_exception_fails_one_row_and_many_of_them_the_build() -> None:
    def picky(row: Any) -> bool:
        if row["id"] == "r3":
            raise ValueError("no such field")
        return True

    verdicts = list(verify_rows(ROWS * 4, verifier_of(picky), max_failed_share=0.2))
    assert [verdict.failed for verdict in verdicts] == [row["id"] == "r3" for row in ROWS * 4]
    assert verdicts[3].reason == "verifier failed: ValueError: no such field"
    with pytest.raises(UserError, match="failed on 1 of 6 rows") as caught:
        list(verify_rows(ROWS, verifier_of(picky)))
    assert "no such field" in str(caught.value)


def test_several_threads_keep_the_order() -> None:
    def slow_first(row: Any) -> Any:
        time.sleep(0.05 if row["id"] == "r0" else 0)
        return {"keep": True, "reason": row["id"]}

    verdicts = verify_rows(ROWS, verifier_of(slow_first), workers=4)
    assert [verdict.reason for verdict in verdicts] == [row["id"] for row in ROWS]


def test_a_command_is_asked_row_by_row_and_ends_with_the_block(script: Any, tmp_path: Path) -> None:
    with CommandVerifier(script(ECHO), folder=tmp_path) as verifier:
        verdicts = list(verify_rows(ROWS, verifier))
        process = psutil.Process(verifier._process.pid)  # type: ignore[union-attr]
    assert [verdict.keep for verdict in verdicts] == [True, False] * 3
    assert verdicts[1].reason == "odd"
    assert not process.is_running()


def test_a_batch_at_once(script: Any, tmp_path: Path) -> None:
    unbuffered = ECHO.replace(", flush=True", "")
    verdicts = verify_batch(script(unbuffered), ROWS, folder=tmp_path)
    assert [verdict.keep for verdict in verdicts] == [True, False] * 3
    cut = verify_batch(script("print('true')"), ROWS, folder=tmp_path)
    assert len(cut) == 6 and all(verdict.failed for verdict in cut)
    assert "1 answers to 6 rows" in cut[0].reason
    late = verify_batch(script("import time; time.sleep(60)"), ROWS, folder=tmp_path, seconds_per_row=0.05)
    assert "no answers within" in late[0].reason


def test_a_command_that_dies_or_hangs_fails_that_row_and_is_started_again(
    script: Any, tmp_path: Path
) -> None:
    code = ECHO.replace(
        "    print(",
        '    if n == 2: sys.exit("out of luck")\n    if n == 4: import time; time.sleep(60)\n    print(',
    )
    with CommandVerifier(script(code), folder=tmp_path, seconds_per_row=3.0) as verifier:
        verdicts = [verifier(row) for row in ROWS]
    assert [verdict.failed for verdict in verdicts] == [False, False, True, False, True, False]
    assert "the command ended" in verdicts[2].reason
    assert "no answer within 3 s" in verdicts[4].reason


def test_a_command_that_starts_others_leaves_none_behind(script: Any, tmp_path: Path) -> None:
    code = "import os, sys, time\nif os.fork() == 0:\n    open('child', 'w').write(str(os.getpid())); time.sleep(60)\ntime.sleep(60)\n"
    with CommandVerifier(script(code), folder=tmp_path, seconds_per_row=3.0) as verifier:
        assert verifier(ROWS[0]).failed
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_wants_too_much_memory_fails(script: Any, tmp_path: Path) -> None:
    code = "import sys\nfor line in sys.stdin:\n    x = bytearray(2 << 30)\n    print('true', flush=True)\n"
    with CommandVerifier(script(code), folder=tmp_path, max_memory_bytes=1 << 30) as verifier:
        assert "the command ended" in verifier(ROWS[0]).reason


@pytest.mark.parametrize("answer", ["nonsense", '"yes"', "x" * (1 << 21)])
def test_an_answer_that_is_no_verdict_is_a_failure(script: Any, tmp_path: Path, answer: str) -> None:
    code = f"import sys\nfor line in sys.stdin:\n    print({answer!r}, flush=True)\n"
    with CommandVerifier(script(code), folder=tmp_path) as verifier:
        assert verifier(ROWS[0]).failed


def test_a_row_larger_than_a_pipe_and_a_command_that_does_not_read(script: Any, tmp_path: Path) -> None:
    big = {"id": "big", "messages": [{"role": "assistant", "content": "x" * (1 << 20)}]}
    with CommandVerifier(script(ECHO), folder=tmp_path) as verifier:
        assert verifier(big).keep
    with CommandVerifier(
        script("import time; time.sleep(60)"), folder=tmp_path, seconds_per_row=0.5
    ) as verifier:
        assert verifier(big).failed


def test_a_program_that_is_not_there_is_a_user_error() -> None:
    with (
        pytest.raises(UserError, match="there is no program 'no-such-program-here'"),
        CommandVerifier("no-such-program-here -x"),
    ):
        pass
