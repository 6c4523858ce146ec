"""`finetune doctor losses`: every check of the losses as a finding, and exit code 1 when one is broken."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from finetune.cli.doctor import app
from finetune.distil import conformance
from finetune.distil.aligned import conformance as aligned_conformance


def test_every_check_holds_and_is_told() -> None:
    done = CliRunner().invoke(app, ["losses", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    findings = json.loads(done.stdout)["findings"]
    assert [one["check"] for one in findings] == [*conformance.CHECKS, *aligned_conformance.CHECKS]
    assert all(one["status"] == "ok" and one["measured"] <= one["limit"] for one in findings)


def test_a_broken_loss_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_conformance, "CHECKS", {})
    monkeypatch.setattr(conformance, "CHECKS", {"mask": lambda: (2.0, 0.0, "positions with a gradient")})
    done = CliRunner().invoke(app, ["losses"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "fault   mask (2, limit 0): positions with a gradient" in done.stdout
    assert "0 hold, 1 are broken" in done.stdout
