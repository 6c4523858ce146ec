"""`train.auto`: the fastest way to cut an optimizer step that fits the memory, found by forecast and then by measuring.

The forecast (plan/memory.py) sorts out what cannot fit; of the rest, a few are run: forward and backward over the
longest batches of the real rows, and the fastest whose measured peak leaves room for the optimizer is taken. What was
chosen and why is printed and lies in `auto.json`; a resumed run takes the same choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.data.tokenise import TokenisedRow
from finetune.errors import ExitCode, UserError
from finetune.model.memory import release_memory
from finetune.paths import read_json, write_json
from finetune.plan.batching import Batching, batchings, own_batching
from finetune.plan.memory import forecast_training
from finetune.plan.states import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.telemetry.memory import current_memory_bytes, peak_memory_bytes, reset_peak_memory
from finetune.units import format_bytes

FILE_NAME = "auto.json"
# Probes cost time that training could have used: the most promising ones only, each a few micro-batches.
_MAX_PROBES = 5
_TIMED_BATCHES = 2

RunBatch = Callable[[Recipe, int], int]
"""(recipe, number) -> tokens: forward and backward over the number-th longest batch that the recipe would train on."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What is known of one way: the forecast, and where it was run what that took. None: not forecast, not run."""

    batching: Batching
    forecast_bytes: int | None
    peak_bytes: int | None = None
    tokens_per_second: float | None = None
    fits: bool = False
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The chosen way, the memory it had to fit, everything that was tried, and the reason in a sentence."""

    batching: Batching
    budget_bytes: int
    reason: str
    probes: tuple[Probe, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "chosen": asdict(self.batching),
            "budget_bytes": self.budget_bytes,
            "reason": self.reason,
            "probes": [probe.to_dict() for probe in self.probes],
        }


def settle_batching(
    recipe: Recipe,
    rows: Sequence[TokenisedRow],
    config: dict[str, Any],
    *,
    run_batch: RunBatch,
    n_trainable: int,
    run_folder: Path,
    owner: str,
    say: Callable[[str], None],
) -> Recipe:
    """The recipe with the batching that `choose_batching` finds, or that an earlier session of this run found."""
    path = run_folder / FILE_NAME
    if path.is_file() and (stored := read_json(path)).get("owner") == owner:
        say(f"auto: as before, {_told(Batching(**stored['chosen']), recipe)}")
        return Batching(**stored["chosen"]).apply(recipe)
    longest = max(len(row.input_ids) for row in rows)
    choice = choose_batching(
        recipe,
        longest,
        budget_bytes=memory_budget(recipe.train.memory_share),
        forecast=lambda candidate: _forecast(candidate, config, longest),
        run_batch=run_batch,
        optimizer_bytes=round(OPTIMIZERS[recipe.train.optimizer].bytes_per_parameter * n_trainable),
    )
    write_json(path, {"owner": owner, **choice.to_dict()})
    say(f"auto: {_told(choice.batching, recipe)}; {choice.reason}")
    return choice.batching.apply(recipe)


def choose_batching(
    recipe: Recipe,
    longest_row_tokens: int,
    *,
    budget_bytes: int,
    forecast: Callable[[Recipe], int | None],
    run_batch: RunBatch,
    optimizer_bytes: int,
) -> AutoChoice:
    """Forecast every way, run the most promising of those that may fit, and take the fastest that does.

    Raises UserError when nothing fits, with exit code 13.
    """
    ways = batchings(recipe, longest_row_tokens)
    forecasts = {way: forecast(way.apply(recipe)) for way in ways}
    possible = [way for way in ways if (forecasts[way] or 0) <= budget_bytes]
    probes = [
        Probe(way, forecasts[way], note="the forecast does not fit") for way in ways if way not in possible
    ]
    run: list[Probe] = []
    for way in _promising(possible, own_batching(recipe)):
        run.append(_probe(way, recipe, forecasts[way], run_batch, budget_bytes - optimizer_bytes))
    fitting = [probe for probe in run if probe.fits]
    if not fitting:
        smallest = min((size for size in forecasts.values() if size is not None), default=0)
        raise UserError(
            f"no way to cut an optimizer step fits {format_bytes(budget_bytes)}",
            where="train.auto",
            why=f"the smallest is forecast at {format_bytes(smallest)}; {len(run)} were run",
            fix="finetune plan RECIPE --memory SIZE names what to change: quantization, rank, shorter rows",
            exit_code=ExitCode.WILL_NOT_FIT,
        )
    best = max(fitting, key=lambda probe: probe.tokens_per_second or 0.0)
    assert best.tokens_per_second is not None and best.peak_bytes is not None
    reason = (
        f"{best.tokens_per_second:.0f} tokens/s, the fastest of {len(fitting)} that fit {format_bytes(budget_bytes)} "
        f"(peak {format_bytes(best.peak_bytes)})"
    )
    return AutoChoice(best.batching, budget_bytes, reason, (*run, *probes))


def memory_budget(share: float) -> int:
    """`share` of what training may use now: free memory, and what this process holds already."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return round(share * (free + torch.cuda.memory_reserved()))
    return round(share * (psutil.virtual_memory().available + current_memory_bytes()))


def _promising(possible: Sequence[Batching], own: Batching) -> list[Batching]:
    """The few to run: largest forward passes first, each with the least recomputation that the forecast allows, and the
    recipe's own."""
    by_size: dict[tuple[int, int], Batching] = {}
    for way in possible:
        by_size.setdefault((way.micro_batch_size, way.pack_tokens), way)
    chosen = sorted(by_size.values(), key=lambda way: -way.micro_batch_size * way.pack_tokens)
    chosen = chosen[: _MAX_PROBES - 1]
    if own in possible and own not in chosen:
        chosen.append(own)
    return chosen


def _probe(
    way: Batching, recipe: Recipe, forecast_bytes: int | None, run_batch: RunBatch, room_bytes: int
) -> Probe:
    """Run one way: the longest batch once to warm up and to see its peak, then a few more against the clock."""
    candidate = way.apply(recipe)
    release_memory()
    reset_peak_memory()
    try:
        run_batch(candidate, 0)
        started, tokens = _now(), 0
        for number in range(_TIMED_BATCHES):
            tokens += run_batch(candidate, number)
        rate = tokens / (_now() - started)
    except torch.OutOfMemoryError:
        release_memory()
        return Probe(way, forecast_bytes, note="ran out of memory")
    peak = peak_memory_bytes()
    fits = peak <= room_bytes
    return Probe(
        way, forecast_bytes, peak, rate, fits, "" if fits else "its peak leaves no room for the optimizer"
    )


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _forecast(recipe: Recipe, config: dict[str, Any], longest: int) -> int | None:
    """Forecast bytes; None for an architecture that the forecast does not know, which is then only measured."""
    pack_tokens = recipe.train.pack_tokens if recipe.train.packing else longest
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return forecast_training(recipe, config, longest_pack_tokens=pack_tokens, device=device).total_bytes
    except UserError:
        return None


def _told(way: Batching, recipe: Recipe) -> str:
    """The way in words."""
    size = (
        f"packs of {way.pack_tokens} tokens"
        if recipe.train.packing
        else f"{way.micro_batch_size} rows at once"
    )
    recomputed = {False: "nothing recomputed", "selective": "cheap parts recomputed", True: "all recomputed"}
    return f"{size}, {way.gradient_accumulation_steps} a step, {recomputed[way.gradient_checkpointing]}"
