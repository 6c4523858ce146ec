"""A run folder as the pipeline leaves it, invented: realistic shapes and sizes, hostile texts, and odd values."""

from __future__ import annotations

import hashlib
import json
import math
import random
from pathlib import Path
from typing import Any

from finetune.paths import write_atomic, write_json

SUITE = "home_intents"
SYSTEM = "<|im_start|>system\nAnswer with one JSON object: the intent and its slots. Nothing else.<|im_end|>\n<|im_start|>user\n"
TURN = "<|im_end|>\n<|im_start|>assistant\n"
HOSTILE = [
    '</pre><script>document.title="owned"</script><img src=x onerror="alert(1)">',
    "\"quotes\" 'and' `ticks` & ampersands <b>bold</b> {{ 7 * 7 }} {% raw %}",
    "right \u202eot tfel\u202c and \u2066isolated\u2069, zero\u200bwidth, \x1b[31mred\x1b[0m, nul\x00, bell\x07",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u4f60\u597d \U0001f600 e\u0301\u0301\u0301\u0301\u0301\u0301",
    "line one\nline two\r\nline three\u2028line four\ttab",
    "x" * 5000,
    "a lone surrogate \ud800 here",
    "</style></script><!-- --><svg onload=alert(1)>",
    "",
]
_ROOMS = ("kitchen", "living room", "bedroom", "hallway", "garage", "office")
_ASKED = (
    ("turn on the lights in the {}", "HassTurnOn", "domain", "light"),
    ("set the thermostat in the {} to 21 degrees", "HassClimateSetTemperature", "temperature", "21"),
    ("is the window open in the {}", "HassGetState", "device_class", "window"),
    ("close the blinds in the {}", "HassTurnOff", "domain", "cover"),
    ("add milk to the list from the {}", "HassListAddItem", "item", "milk"),
)
_METRICS = ("exact_match", "valid_json", "intent_accuracy", "slot_f1")


def write_run(folder: Path, *, n_items: int = 204, n_steps: int = 150, n_broken: int = 3) -> Path:
    """Every file of a finished run. `n_broken` of the items that the few-shot arm gets right are wrong when tuned."""
    chance = random.Random(5)
    write_recipe(folder)
    write_manifest(folder)
    write_data_manifest(folder)
    write_events(folder, n_steps, sampled=True)
    write_forecast(folder)
    write_environment(folder)
    write_checks(folder)
    few = [index % 8 == 0 for index in range(n_items)]
    right_before = [index for index, right in enumerate(few) if right]
    tuned = [right or chance.random() < 0.7 for right in few]
    for index in right_before[:n_broken]:
        tuned[index] = False
    for arm, outcomes in (("zero_shot", [False] * n_items), ("few_shot", few), ("tuned", tuned)):
        write_arm(folder, arm, outcomes, chance)
    write_comparison(folder, few, tuned)
    (folder / "adapter").mkdir(exist_ok=True)
    return folder


def write_recipe(folder: Path, *, profile: str | None = None) -> None:
    lines = [
        "recipe: 1",
        "name: home_intents_lora",
        'description: "Spoken smart-home commands to one strict JSON object <script>alert(1)</script>"',
        "seed: 17",
        "model:\n  id: builtin:smollm2-135m-instruct\n  quantize: none",
        "adapter:\n  kind: lora\n  rank: 32",
        "data:\n  spec: home_intents",
        "train:\n  max_grad_norm: 1.0\n  learning_rate: 0.0005",
        "eval:\n  suites: [home_intents]\n  against: few_shot",
        f"profile: {profile or 'null'}",
    ]
    write_atomic(folder / "recipe.resolved.yaml", "\n".join(lines) + "\n")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(folder: Path) -> None:
    seconds = {"data": 21.4, "baseline": 148.0, "train": 402.7, "evaluate": 41.2, "compare": 0.4}
    stages = {
        name: {
            "digest": _digest(name),
            "completed": "2026-01-15T10:12:00+00:00",
            "seconds": time,
            "outputs": {},
        }
        for name, time in seconds.items()
    }
    stages["report"] = {"digest": _digest("report"), "inputs": {}, "completed": None}
    manifest = {
        "format": 1,
        "recipe_name": "home_intents_lora",
        "recipe_digest": _digest("recipe"),
        "created": "2026-01-15T09:58:11+00:00",
        "inputs": {
            "data": _digest("spec"),
            "model": _digest("model"),
            "suite.home_intents": _digest("suite"),
        },
        "stages": stages,
    }
    write_json(folder / "manifest.json", manifest)


def write_data_manifest(folder: Path, *, n_lost: int = 0, n_leaks: int = 0) -> None:
    dropped = {"not_recognised": 402, "duplicate": 118, "too_long": 3}
    splits = {"train": 1200, "validation": 140, "test": 204, "regressions": 0}
    kept = sum(splits.values())
    ledger = {
        "read": kept + sum(dropped.values()) + 7 + n_lost,
        "kept": kept,
        "dropped": dropped,
        "quarantined": 7,
    }
    manifest = {
        "format": 1,
        "name": "home_intents",
        "digest": _digest("build"),
        "spec_digest": _digest("spec"),
        "source": {"kind": "home_intents", "package": "home-assistant-intents", "version": "2026.11.5"},
        "licence": "Apache-2.0",
        "seed": 17,
        "splits": {name: {"rows": n, "digest": _digest(name)} for name, n in splits.items()},
        "ledger": ledger,
        "leaks": {"exact": n_leaks, "group": 0},
    }
    write_json(folder / "data" / "manifest.json", manifest)
    counts = {"read": 1200, "kept": 1197, "dropped_too_long": 3, "truncated": 0, "dropped_no_target": 0}
    held = {"train": {"counts": counts, "dropped": [], "target_tokens": 46_500}}
    write_json(
        folder / "data" / "tokenised.json", {"digest": _digest("tokens"), "max_tokens": 512, "splits": held}
    )


def write_events(folder: Path, n_steps: int, *, torn: bool = True, sampled: bool = False) -> None:
    chance = random.Random(11)
    lines: list[str] = []
    for step in range(1, n_steps + 1):
        warm = min(1.0, step / max(1, n_steps // 20))
        rate = 5e-4 * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / n_steps)))
        loss: Any = 0.12 + 2.4 * math.exp(-step / (n_steps / 6)) + chance.gauss(0, 0.05)
        event = {
            "event": "step",
            "step": step,
            "epoch": 2 * step / n_steps,
            "tokens": 1000 * step,
            "target_tokens": 310 * step,
            "loss": "nan" if step == n_steps // 2 else loss,
            "grad_norm": 0.3
            + 3 * math.exp(-step / 20)
            + abs(chance.gauss(0, 0.1))
            + (4 if step == n_steps * 2 // 3 else 0),
            "weight_norm": 31.2,
            "update_ratio": 2e-3 * rate / 5e-4 * (1 + chance.random() / 4),
            "learning_rate": rate,
            "tokens_per_second": 330 + chance.gauss(0, 9),
            "mfu": 0.21,
            "memory_bytes": 3_100_000_000,
        }
        lines.append(json.dumps(event))
        if step % max(1, n_steps // 6) == 0:
            lines.append(
                json.dumps({"event": "validation", "step": step, "loss": loss + 0.06, "target_tokens": 8000})
            )
            lines.append(
                json.dumps({"event": "checkpoint", "step": step, "path": f"checkpoints/step-{step}"})
            )
        if step == n_steps // 3:
            lines.append(json.dumps({"event": "resume", "step": step}))
            answer = {"event": "sample", "step": step, "name": "row-1", "prompt": "on", "output": HOSTILE[0]}
            lines += [json.dumps(answer)] if sampled else []
    write_atomic(folder / "events.jsonl", "\n".join(lines) + ('\n{"event": "st' if torn else "\n"))


def write_forecast(folder: Path, *, used: int | None = 3_310_000_000) -> None:
    terms = {
        "weights": 269_000_000,
        "adapter": 39_100_000,
        "gradients": 39_100_000,
        "optimizer": 78_200_000,
        "activations": 1_630_000_000,
        "logits": 402_000_000,
        "process": 610_000_000,
        "fragmentation": 352_600_000,
    }
    forecast = {
        "terms_bytes": terms,
        "total_bytes": sum(terms.values()),
        "used_peak_bytes": used,
        "basis": "rss",
        "evaluation": {"total_bytes": 1_500_000_000, "used_peak_bytes": 1_600_000_000},
    }
    write_json(folder / "forecast.json", forecast)


def write_checks(folder: Path) -> None:
    kept = {"measured": None, "limit": None, "where": "", "changes": {}, "exit_code": 2}
    found = [
        {"check": "BOS once", "status": "ok", "group": "tokens", "detail": "no row of 256 begins with two"},
        {"check": "refusals", "status": "skipped", "group": "data", "detail": "no suite asks for any"},
        {
            "check": "one language",
            "status": "warning",
            "group": "data",
            "detail": "6.4% of the answers differ <b>not bold</b>",
            "remedy": "bring the answers into one form",
        },
    ]
    findings = [{**kept, "remedy": "", **one} for one in found]
    write_json(folder / "checks.json", {"findings": findings})


def write_environment(folder: Path) -> None:
    environment = {
        "finetune": "0.1.0",
        "python": "3.11.9",
        "platform": "Linux-6.1-x86_64 <b>not bold</b>",
        "cores": 2,
        "memory_bytes": 25_000_000_000,
        "accelerators": [],
        "cuda": None,
        "packages": {"torch": "2.13.0", "transformers": "5.24.0"},
    }
    write_json(folder / "environment.json", environment)


def write_arm(folder: Path, arm: str, right: list[bool], chance: random.Random) -> None:
    """Records and summary of one arm; wrong answers of the tuned arm are the hostile texts, in turn."""
    records, n_wrong = [], 0
    for index, is_right in enumerate(right):
        asked, intent, slot, value = _ASKED[index % len(_ASKED)]
        room = _ROOMS[index % len(_ROOMS)]
        reference = json.dumps({"intent": intent, "area": room, slot: value})
        output = reference
        if not is_right:
            n_wrong += 1
            output = _wrong(arm, index, n_wrong, intent, room)
        seconds = {"zero_shot": 0.9, "few_shot": 1.6, "tuned": 0.5}[arm] * (0.8 + 0.4 * chance.random())
        shots = (
            ""
            if arm != "few_shot"
            else "turn off the fan<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n" * 6
        )
        scores = {"exact_match": float(is_right), "valid_json": float(is_right or arm == "few_shot")}
        scores |= {"intent_accuracy": float(is_right), "slot_f1": 1.0 if is_right else 0.25}
        records.append(
            {
                "item": f"{SUITE}-{index:04d}",
                "arm": arm,
                "cluster": f"template-{index % 31}",
                "tags": {"intent": intent},
                "prompt": f"{SYSTEM}{shots}{asked.format(room)}{TURN}",
                "reference": reference,
                "output": output,
                "prompt_tokens": 400 if arm == "few_shot" else 60,
                "output_tokens": max(1, len(output) // 4),
                "finish_reason": "length" if len(output) > 1000 else "stop",
                "latency_seconds": seconds,
                "scores": scores,
            }
        )
    root = folder / ("eval" if arm == "tuned" else "baseline") / SUITE
    rewrite_lines(root / f"{arm}.jsonl", records)
    write_summary(root / f"{arm}.summary.json", arm, records)


def _wrong(arm: str, index: int, n_wrong: int, intent: str, room: str) -> str:
    if arm == "tuned":
        turn = (n_wrong - 1) % (len(HOSTILE) + 5)
        return HOSTILE[turn] if turn < len(HOSTILE) else json.dumps({"intent": intent, "area": "attic"})
    if arm == "few_shot":
        return json.dumps(
            {"intent": intent, "area": room} if index % 3 else {"intent": "HassTurnOff", "area": room}
        )
    return f"Sure! I can help you with the {room}. Here is what I would do for you."


def _wilson(mean: float, n: int) -> tuple[float, float]:
    z = 1.96
    middle, half = mean + z * z / (2 * n), z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def write_summary(path: Path, arm: str, records: list[dict[str, Any]]) -> None:
    metrics = {}
    for name in _METRICS:
        mean = sum(record["scores"][name] for record in records) / len(records)
        low, high = _wilson(mean, len(records))
        metrics[name] = {"mean": mean, "low": low, "high": high, "n": len(records), "method": "Wilson"}
    latencies = sorted(record["latency_seconds"] for record in records)
    n_cut = sum(record["finish_reason"] == "length" for record in records)
    summary = {
        "suite": SUITE,
        "suite_digest": _digest("suite"),
        "arm": arm,
        "n": len(records),
        "metrics": metrics,
        "output_tokens": sum(record["output_tokens"] for record in records),
        "seconds": sum(latencies) / 8,
        "latency_seconds": {
            "p50": latencies[len(latencies) // 2],
            "p95": latencies[int(len(latencies) * 0.95)],
        },
        "finish_reasons": {"stop": len(records) - n_cut, "length": n_cut},
        "adapter_sha256": _digest("adapter") if arm == "tuned" else None,
        "key": _digest(arm),
    }
    write_json(path, summary)


def compared(**changes: Any) -> dict[str, Any]:
    """One entry of comparison.json; the default is a clear improvement."""
    entry = {
        "suite": SUITE,
        "metric": "exact_match",
        "baseline": "few_shot",
        "arm": "tuned",
        "n": 204,
        "difference": 0.613,
        "low": 0.539,
        "high": 0.682,
        "confidence": 0.95,
        "p_value": 1e-30,
        "test": "cluster sign flips",
        "reason": "items share templates: whole clusters are flipped",
        "fixed": 128,
        "broken": 3,
        "both_right": 22,
        "both_wrong": 51,
        "clusters": 31,
        "verdict": "improved",
        "margin": 0.02,
        "least_detectable": 0.084,
        "items_to_settle": None,
    }
    return entry | changes


def write_comparison(folder: Path, before: list[bool], after: list[bool]) -> None:
    n = len(before)
    cells = {
        "fixed": sum(b and not a for a, b in zip(before, after, strict=True)),
        "broken": sum(a and not b for a, b in zip(before, after, strict=True)),
        "both_right": sum(a and b for a, b in zip(before, after, strict=True)),
        "both_wrong": sum(not a and not b for a, b in zip(before, after, strict=True)),
    }
    difference = (cells["fixed"] - cells["broken"]) / n
    primary = compared(n=n, difference=difference, low=difference - 0.07, high=difference + 0.07, **cells)
    no_cells = dict.fromkeys(cells)
    entries = [
        primary,
        compared(metric="valid_json", n=n, difference=-0.03, low=-0.055, high=0.011, verdict="inconclusive", items_to_settle=310),
        compared(metric="intent_accuracy", n=n, difference=0.58, low=0.50, high=0.65),
        compared(metric="slot_f1", n=n, difference=0.47, low=0.41, high=0.53, **no_cells),
        compared(baseline="zero_shot", n=n, difference=0.735, low=0.66, high=0.79, fixed=150, broken=0, both_right=0, both_wrong=54),
        compared(suite="general", metric="accuracy", n=150, difference=-0.04, low=-0.081, high=-0.002, verdict="regressed", clusters=None, test="McNemar mid-p", p_value=0.031, fixed=2, broken=8, both_right=101, both_wrong=39),
        compared(suite="forgetting", metric="nll_per_token", n=400, difference=0.021, low=-0.004, high=0.046, verdict="no-evidence", margin=0.05, test="paired t", p_value=0.1, least_detectable=None, **no_cells),
    ]  # fmt: skip
    write_json(folder / "eval" / "comparison.json", comparison_of(entries))


def comparison_of(entries: list[dict[str, Any]], *, verdict: str = "improved") -> dict[str, Any]:
    return {
        "suite": SUITE,
        "primary_metric": "exact_match",
        "against": "few_shot",
        "verdict": verdict,
        "exit_code": 0,
        "comparisons": entries,
    }


def rewrite_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """A JSONL file of `rows`, in ASCII: a lone surrogate survives as an escape."""
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
