"""`finetune stats`: the verdict as exit code, strict JSON, and a start that loads neither torch nor scipy.stats."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from finetune.cli.stats import app
from finetune.errors import UserError


def write(path: Path, scores: list[float], **more: Any) -> str:
    rows = [{"item": f"q{number}", "score": score, **more} for number, score in enumerate(scores)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


A = [0.0] * 60 + [1.0] * 20 + [1.0] * 60 + [0.0] * 60
B = [1.0] * 60 + [0.0] * 20 + [1.0] * 60 + [0.0] * 60


def test_improved(tmp_path: Path) -> None:
    result = run(
        "compare", write(tmp_path / "a.jsonl", A), write(tmp_path / "b.jsonl", B), "--margin", "0.02"
    )
    assert result.return_value == 0
    assert "score on 200 items: A 40.0%, B 60.0%" in result.stdout
    assert "difference +20.0 points, 95% interval +11" in result.stdout
    assert "test: McNemar mid-p; interval: Tango score; scores are right or wrong" in result.stdout
    assert "fixed 60, broken 20, both right 60, both wrong 60" in result.stdout
    assert "non-inferiority at 2.0 points: pass" in result.stdout
    assert result.stdout.rstrip().endswith("verdict: improved")


@pytest.mark.parametrize(
    ("b", "margin", "code", "verdict"),
    [
        (A, "0.02", 12, "no-evidence"),
        (A[:100] + [1 - x for x in A[100:120]] + A[120:], "0.02", 10, "regressed"),
        (A[:1] + [1 - A[1]] + A[2:70] + [0.0] * 5 + A[75:], "0.02", 11, "inconclusive"),
    ],
)
def test_exit_codes(tmp_path: Path, b: list[float], margin: str, code: int, verdict: str) -> None:
    files = write(tmp_path / "a.jsonl", A), write(tmp_path / "b.jsonl", b)
    result = run("compare", *files, "--margin", margin, "--json")
    answer = json.loads(result.stdout)
    assert (result.return_value, answer["exit_code"], answer["verdict"]) == (code, code, verdict)


def test_json_holds_everything(tmp_path: Path) -> None:
    files = write(tmp_path / "a.jsonl", A, cluster="c"), write(tmp_path / "b.jsonl", B, cluster="c")
    answer = json.loads(run("compare", *files, "--cluster", "none", "--json").stdout)
    wanted = "metric n difference low high confidence p_value test reason fixed broken both_right both_wrong clusters verdict"
    assert set(wanted.split()) <= set(answer)
    assert (answer["metric"], answer["fixed"], answer["clusters"], answer["left_out"]) == (
        "score",
        60,
        None,
        {"a": 0, "b": 0},
    )


def test_inner_says_what_it_left_out(tmp_path: Path) -> None:
    files = write(tmp_path / "a.jsonl", A), write(tmp_path / "b.jsonl", B[:150])
    with pytest.raises(UserError, match="50 only in A"):
        run("compare", *files)
    assert (
        "left out because only one file scores them: 50 of A, 0 of B"
        in run("compare", *files, "--inner").stdout
    )


def test_a_loss_is_turned_round(tmp_path: Path) -> None:
    files = (
        write(tmp_path / "a.jsonl", [2.0 + n % 7 for n in range(60)]),
        write(tmp_path / "b.jsonl", [1.5 + n % 7 for n in range(60)]),
    )
    better = run("compare", *files, "--lower-is-better")
    assert better.return_value == 0
    assert "the score is a loss" in better.stdout
    assert run("compare", *files).return_value == 10


def test_few_clusters_are_noted(tmp_path: Path) -> None:
    rows = [{"item": f"q{n}", "score": n % 2, "topic": f"t{n % 4}"} for n in range(40)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("compare", str(path), str(path), "--cluster", "topic")
    assert "note: only 4 clusters" in result.stdout


def test_repeated_samples_show_where_the_noise_is(tmp_path: Path) -> None:
    rows = [{"item": f"q{n}", "score": (n + k) % 2, "repeat": k} for n in range(30) for k in range(3)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("compare", str(path), str(path))
    assert "A: 3 samples an item; sampling makes" in result.stdout
    assert json.loads(run("compare", str(path), str(path), "--json").stdout)["variance"]["a"]["n"] == 30


def test_nothing_never_passes(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UserError, match="holds no items"):
        run("compare", str(empty), str(empty), "--margin", "0.02")


def test_power_side_by_side() -> None:
    result = run("power", "--effect", "0.02", "--discordance", "0.1", "--items", "500", "--margin", "0.02")
    assert "paired    1,960 items" in result.stdout
    assert "unpaired  8,080 per arm" in result.stdout
    assert "to exclude a loss of 2.0 points when there is none: 1,546 items" in result.stdout
    assert "cannot tell a difference below" in result.stdout
    assert "warning: 500 items are too few" in result.stdout


def test_power_from_a_pilot(tmp_path: Path) -> None:
    files = write(tmp_path / "a.jsonl", A), write(tmp_path / "b.jsonl", B)
    answer = json.loads(run("power", "--pilot", *files, "--effect", "0.05", "--json").stdout)
    assert (answer["discordance"], answer["accuracy"]) == (0.4, 0.4)
    assert answer["assumed_discordance"] is False
    graded = write(tmp_path / "c.jsonl", [0.5, 0.2]), write(tmp_path / "d.jsonl", [0.5, 0.4])
    with pytest.raises(UserError, match="no discordant items"):
        run("power", "--pilot", *graded)


def test_starts_light(tmp_path: Path) -> None:
    files = write(tmp_path / "a.jsonl", A), write(tmp_path / "b.jsonl", B)
    code = (
        "import sys; from finetune.cli.stats import app\n"
        f"app(args=['compare', {files[0]!r}, {files[1]!r}], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'scipy.stats', 'statsmodels', 'pandas', 'pyarrow'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("heavy: []")
