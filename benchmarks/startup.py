"""How long the light commands take, as a user waits for them: whole processes, median of nine, torch left out."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import table, write_section

COMMANDS = {
    "finetune --help": (["--help"], 0.3),
    "finetune recipe validate": (["recipe", "validate", "sft/home_intents_lora"], 0.6),
}
ITEMS = 100_000
RUNS = 9


def write_arm(path: Path, share_right: float, seed: int) -> str:
    """Scores of many items, five to a cluster, as another harness would have written them."""
    draw = random.Random(seed)
    with path.open("w") as stream:
        for item in range(ITEMS):
            right = int(draw.random() < share_right)
            stream.write(json.dumps({"item": f"q{item}", "score": right, "cluster": f"c{item // 5}"}) + "\n")
    return str(path)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arms = [write_arm(Path(folder) / f"{seed}.jsonl", 0.60 + seed / 100, seed) for seed in (1, 2)]
        measure(COMMANDS | {f"finetune stats compare ({ITEMS:,} items)": (["stats", "compare", *arms], 3.0)})


def measure(commands: dict[str, tuple[list[str], float]]) -> None:
    command = Path(sys.executable).parent / "finetune"
    rows = []
    for name, (arguments, limit) in commands.items():
        seconds = []
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            subprocess.run([command, *arguments], check=arguments[0] != "stats", capture_output=True)
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[1:])
        rows.append([f"`{name}`", f"{median:.2f} s", f"{limit} s", f"{median / limit:.2f}"])
    write_section("Start-up", table(["command", "median of 9", "limit", "median / limit"], rows))


if __name__ == "__main__":
    main()
