"""How long the light commands take, as a user waits for them: whole processes, median of nine, torch left out."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from results import table, write_section

COMMANDS = {
    "finetune --help": (["--help"], 0.3),
    "finetune recipe validate": (["recipe", "validate", "sft/home_intents_lora"], 0.6),
}
RUNS = 9


def main() -> None:
    command = Path(sys.executable).parent / "finetune"
    rows = []
    for name, (arguments, limit) in COMMANDS.items():
        seconds = []
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            subprocess.run([command, *arguments], check=True, capture_output=True)
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[1:])
        rows.append([f"`{name}`", f"{median:.2f} s", f"{limit} s", f"{median / limit:.2f}"])
    write_section("Start-up", table(["command", "median of 9", "limit", "median / limit"], rows))


if __name__ == "__main__":
    main()
