"""`make bench`: every measurement in turn; each prints its table and renews its section of RESULTS.md.

    python benchmarks/run.py [NAME …]      # startup spine sft_speed …

Run it on a machine that does nothing else. The long ones (minutes to an hour) come last.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

# Name -> the arguments of each of its runs.
BENCHMARKS: dict[str, list[list[str]]] = {
    "startup": [[]],
    "spine": [[]],
    "sft_speed": [[], ["--common-tokens", "128", "--packs-per-step", "1"]],
    "dpo_speed": [[]],
    "distil_losses": [[]],
    "distil_speed": [[]],
    "data_reading": [[]],
    "near_duplicates": [[]],
    "data_build": [[]],
    "evaluation_speed": [[]],
    "merge_models": [[]],
    "merge_adapter": [[]],
    "merge_search": [[]],
    "memory_forecast": [[]],
    "distil_run": [[]],
    "distil_few_sequences": [[]],
    "diagnose": [[]],
    "stats_calibration": [[]],
}


def main() -> None:
    folder = Path(__file__).parent
    wanted = sys.argv[1:] or list(BENCHMARKS)
    unknown = sorted(set(wanted) - set(BENCHMARKS))
    if unknown:
        sys.exit(f"no benchmark named {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    failed = []
    for name in wanted:
        start = time.monotonic()
        code = max(
            abs(subprocess.run([sys.executable, folder / f"{name}.py", *arguments]).returncode)
            for arguments in BENCHMARKS[name]
        )
        print(f"-- {name}: {'done' if code == 0 else f'failed ({code})'} in {time.monotonic() - start:.0f} s")
        if code:
            failed.append(name)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
