"""RESULTS.md: one section a benchmark, replaced when it is measured again, each with its machine and date."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

PAGE = Path(__file__).parent / "RESULTS.md"
_HEAD = """# Measurements

Printed by `make bench`. Ratios are taken in one run on one machine, medians of at least five unless the line says
otherwise; absolute times belong to the machine named beside them.
"""


def machine() -> str:
    """Processor, cores, memory and versions, in one line."""
    import torch

    from finetune.pipeline.environment import describe_environment

    found = describe_environment()
    devices = ", ".join(device["name"] for device in found["accelerators"]) or "no GPU"
    return (
        f"{found['processor']}, {found['cores']} cores, {found['memory_bytes'] / 1e9:.0f} GB, {devices}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def write_section(title: str, lines: Sequence[str]) -> None:
    """Print the lines and put them into RESULTS.md under `## title`."""
    print(f"\n{title}\n" + "\n".join(lines), flush=True)
    text = PAGE.read_text() if PAGE.exists() else _HEAD
    head, *sections = text.split("\n## ")
    kept = {section.split("\n", 1)[0]: section.split("\n", 1)[1] for section in sections}
    stamp = f"{datetime.now(UTC).date().isoformat()}, {machine()}"
    kept[title] = "\n" + "\n".join(lines) + f"\n\n*{stamp}*\n"
    body = "".join(f"\n## {name}\n{section.rstrip()}\n" for name, section in kept.items())
    PAGE.write_text(head.rstrip() + "\n" + body)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
