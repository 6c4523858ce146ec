"""What every command shares: machine-readable output on standard output, logs on standard error, exit codes."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from finetune.errors import UserError

JsonFlag = Annotated[bool, typer.Option("--json", help="Answer in JSON on standard output.")]


def emit(payload: dict[str, Any], human: str, *, as_json: bool) -> None:
    """Print the answer once: JSON for a machine or `human` for a person, always on standard output."""
    if as_json:
        _print_json(payload)
    else:
        encoding = sys.stdout.encoding or "utf-8"
        print(human.encode(encoding, errors="backslashreplace").decode(encoding))


def _print_json(payload: dict[str, Any]) -> None:
    """As it is where the terminal can show it, else in escapes: half a surrogate pair, or an encoding of few letters."""
    text = json.dumps(payload, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(payload, indent=2, allow_nan=False)
    print(text)


def note(line: str) -> None:
    """Progress and remarks, on standard error so that they never mix with an answer."""
    print(line, file=sys.stderr, flush=True)


def print_user_error(error: UserError, *, as_json: bool) -> None:
    """All faults of one error: prose on standard error, or one JSON object on standard output."""
    if as_json:
        payload = {"error": [fault.to_dict() for fault in error.faults], "exit_code": int(error.exit_code)}
        _print_json(payload)
        return
    for fault in error.faults:
        print(f"error: {fault}", file=sys.stderr)
    if len(error.faults) > 1:
        print(f"({len(error.faults)} faults)", file=sys.stderr)
