"""A process that is killed in the middle of an arm, as the system kills it: what it saved is kept, the rest is answered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from finetune.evaluation.items import Item
from finetune.evaluation.records import partial_path, read_records, records_path
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.suite import load_suite

# Loads the model from a folder, answers, and stands still behind the sixth answer until it is killed.
CHILD = """
import signal, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from finetune.evaluation import records
from finetune.evaluation.run import evaluate_arm
from finetune.evaluation.suite import load_suite
from finetune.evaluation.suite_data import read_items

folder = Path(sys.argv[1])
add, saved = records.PartialRecords.add, []

def add_and_stand_still(self, record, seconds):
    add(self, record, seconds)
    saved.append(record)
    if len(saved) == 6:
        print("six", flush=True)
        signal.pause()

records.PartialRecords.add = add_and_stand_still
evaluate_arm(
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32"),
    AutoTokenizer.from_pretrained(folder / "model"),
    load_suite(folder / "suite.yaml"),
    read_items(folder / "items.jsonl"),
    arm="zero_shot", batch_size=4, out_folder=folder / "killed", key="k",
)
"""
SUITE = """\
suite: 1
name: killed
items: {jsonl: items.jsonl}
decoding: {max_new_tokens: 10, temperature: 0.9, repeats: 2}
scorers: [normalised_match]
primary_metric: normalised_match
"""


def _without_clock(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        del record["latency_seconds"]  # the clock is all that may differ
    return records


def test_a_killed_process_leaves_answers_that_the_next_one_continues_from(
    lively_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    lively_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "suite.yaml").write_text(SUITE)
    items = [Item(f"i{n}", ({"role": "user", "content": f"say {n}"},), str(n), f"i{n}") for n in range(6)]
    lines = [{"id": item.id, "messages": item.messages, "reference": item.reference} for item in items]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "six\n"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    kept = [
        json.loads(line) for line in partial_path(tmp_path / "killed", "zero_shot").read_text().splitlines()
    ]
    assert len(kept) == 6
    assert not records_path(tmp_path / "killed", "zero_shot").exists()

    suite = load_suite(tmp_path / "suite.yaml")
    for folder in ("killed", "whole"):
        evaluate_arm(
            lively_model,
            tiny_tokenizer,
            suite,
            items,
            arm="zero_shot",
            batch_size=4,
            out_folder=tmp_path / folder,
            key="k",
        )
    finished = read_records(tmp_path / "killed", "zero_shot")
    assert len(finished) == 12
    latencies = {record["key"]: record["latency_seconds"] for record in finished}
    assert all(latencies[one["record"]["key"]] == one["record"]["latency_seconds"] for one in kept)
    killed, whole = (_without_clock(tmp_path / folder / "zero_shot.jsonl") for folder in ("killed", "whole"))
    assert json.dumps(killed) == json.dumps(whole)
