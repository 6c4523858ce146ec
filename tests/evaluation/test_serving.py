"""A server of ours is waited for, its log is shown when it fails, and it never outlives us."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.evaluation.serving import VllmModel, find_vllm, running_server

# Writes its process id beside it, and lists its models once it has been asked `delay` times.
SERVER = """
import http.server, os, sys
open(sys.argv[2], "w").write(str(os.getpid()))
print("loading weights", flush=True)
left = [int(sys.argv[3])]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        left[0] -= 1
        self.send_response(200 if left[0] < 0 else 503)
        self.end_headers()
        self.wfile.write(b'{"data": []}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Callable[[int], list[str]]]:
    def make(script: str = SERVER, delay: int = 0) -> Callable[[int], list[str]]:
        return lambda port: [sys.executable, "-c", script, str(port), str(tmp_path / "pid"), str(delay)]

    return make


def _lives(tmp_path: Path) -> bool:
    try:
        os.kill(int((tmp_path / "pid").read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_waited_for_and_ended(
    command: Callable[..., Callable[[int], list[str]]], tmp_path: Path
) -> None:
    said: list[str] = []
    with running_server(command(delay=2), tmp_path / "log", say=said.append) as url:
        with urllib.request.urlopen(f"{url}/models") as response:
            assert json.load(response) == {"data": []}
        assert _lives(tmp_path)
    assert not _lives(tmp_path)
    assert said[-1].startswith("serve: ready after")
    assert "loading weights" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_it_is_ended_whatever_happens(
    command: Callable[..., Callable[[int], list[str]]], tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), running_server(command(), tmp_path / "log"):
        raise error
    assert not _lives(tmp_path)


def test_sigterm_ends_it_too(command: Callable[..., Callable[[int], list[str]]], tmp_path: Path) -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), running_server(command(), tmp_path / "log"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not _lives(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_ends_by_itself_shows_its_last_lines(
    command: Callable[..., Callable[[int], list[str]]], tmp_path: Path
) -> None:
    script = "print('first'); print('\\n' * 20); raise SystemExit('CUDA out of memory')"
    with (
        pytest.raises(UserError, match="ended with exit code 1 before it was ready") as caught,
        running_server(command(script), tmp_path / "log"),
    ):
        pytest.fail("it never was ready")
    assert "CUDA out of memory" in str(caught.value)
    assert "first" not in str(caught.value)


def test_a_server_that_is_never_ready_is_given_up(
    command: Callable[..., Callable[[int], list[str]]], tmp_path: Path
) -> None:
    slow = running_server(command(delay=10**9), tmp_path / "log", timeout_seconds=0.5)
    with pytest.raises(UserError, match=r"was not ready after 0\.5 s"), slow:
        pytest.fail("it never was ready")
    assert not (tmp_path / "pid").exists() or not _lives(tmp_path)


def test_vllm_that_is_not_installed_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="vllm is not installed") as caught:
        find_vllm()
    assert "--server" in str(caught.value)


def test_the_command_serves_base_and_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    model = VllmModel(
        Path("/m/base"), "base", "bf16", adapter=Path("/r/adapter"), adapter_rank=24, more=("--seed=1",)
    )
    assert model.command(8123) == [
        str(tmp_path / "vllm"), "serve", "/m/base", "--host", "127.0.0.1", "--port", "8123", "--served-model-name",
        "base", "--dtype", "bfloat16", "--generation-config", "vllm", "--enable-lora", "--lora-modules",
        "tuned=/r/adapter", "--max-lora-rank", "32", "--seed=1",
    ]  # fmt: skip
    assert "--enable-lora" not in VllmModel(Path("/m/merged"), "tuned", "fp32").command(8123)
