"""Whether the training fits: the forecast first, then one step on the longest batch that the rows make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from finetune.doctor.finding import Finding, fault, ok, warning
from finetune.errors import ExitCode
from finetune.plan.fits import Fit
from finetune.plan.forecast import Forecast
from finetune.units import format_bytes

_SMALLER = "set train.gradient_checkpointing: true, or a smaller train.micro_batch_size or train.pack_tokens"
_LARGEST_MISS = 0.12  # what forecasts of measured runs were off at the most


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of the device that trains: all of it, and what is free now or in use by this process."""

    total_bytes: int
    available_bytes: int
    basis: str


def read_room() -> Room:
    """Of this process's GPU when there is one, else of the machine."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Room(total, free + torch.cuda.memory_reserved(), "GPU memory")
    memory = psutil.virtual_memory()
    return Room(memory.total, memory.available + psutil.Process().memory_info().rss, "memory")


def check_forecast(
    forecast: Forecast,
    room: Room,
    fit: Fit | None = None,
    *,
    name: str = "memory forecast",
    where: str = "train.micro_batch_size",
    certain_bytes: int | None = None,
) -> Finding:
    """Whether the forecast is below what the device has. `fit`: what to change when it is not. `certain_bytes`: what is
    needed in any case, where the forecast itself is an upper bound: only more of that than there is is a fault."""
    needed = forecast.total_bytes
    largest = sorted(forecast.terms_bytes.items(), key=lambda term: -term[1])[:3]
    terms = ", ".join(f"{term.replace('_', ' ')} {format_bytes(size)}" for term, size in largest)
    said = f"{format_bytes(needed)} needed ({terms}), {format_bytes(room.available_bytes)} of {format_bytes(room.total_bytes)} {room.basis} free"
    if needed <= room.available_bytes:
        return ok(name, said)
    suggestions = fit.suggestions if fit is not None else ()
    remedy = "; or ".join(
        ", ".join(f"{key}: {value}" for key, value in one.changes.items())
        + f" ({format_bytes(one.total_bytes)}, {one.note})"
        for one in suggestions[:3]
    )
    if certain_bytes is not None and needed > room.total_bytes >= certain_bytes:
        return warning(
            name,
            f"{said}: the longest prompts may not fit",
            f"set {remedy}" if remedy else "ask less at once",
            where=where,
        )
    if needed <= room.total_bytes:
        other = f"end other programs, or set {remedy}" if remedy else "end other programs"
        return warning(name, said, other, where=where)
    same = next((one for one in suggestions if one.fits and one.same_result), None)
    return fault(
        name,
        f"{said}: it does not fit",
        f"set {remedy}" if remedy else "take a machine with more memory",
        where=where,
        changes=dict(same.changes) if same is not None else {},
        exit_code=ExitCode.WILL_NOT_FIT,
    )


def check_probe(
    peak_bytes: int, forecast_bytes: int | None, room: Room, n_tokens: int, seconds: float, n_steps: int
) -> Finding:
    """What one step on the longest batch took, against the forecast if any, and what it says of the whole run."""
    name = "longest batch"
    rate = n_tokens / seconds if seconds > 0 else 0.0
    forecast = "" if forecast_bytes is None else f" (forecast {format_bytes(forecast_bytes)})"
    said = (
        f"one step of {n_tokens:,} tokens took {format_bytes(peak_bytes)}{forecast} and "
        f"{seconds:.1f} s ({rate:.0f} tokens/s); the run has {n_steps:,} steps"
    )
    if peak_bytes > room.available_bytes:
        return fault(
            name,
            f"{said}; {format_bytes(room.available_bytes)} is free",
            _SMALLER,
            where="train.micro_batch_size",
            exit_code=ExitCode.WILL_NOT_FIT,
        )
    if forecast_bytes is not None and peak_bytes > (1 + _LARGEST_MISS) * forecast_bytes:
        return warning(
            name, f"{said}: more than forecast", "plan with what was measured", where="train.micro_batch_size"
        )
    return ok(name, said)


def out_of_memory(n_tokens: int, room: Room) -> Finding:
    """The step on the longest batch ended for want of memory."""
    return fault(
        "longest batch",
        f"one step of {n_tokens:,} tokens found no memory any more; {format_bytes(room.available_bytes)} of "
        f"{format_bytes(room.total_bytes)} {room.basis} was free before it",
        _SMALLER,
        where="train.micro_batch_size",
        exit_code=ExitCode.WILL_NOT_FIT,
    )


def longest_batch(lengths: Sequence[int], *, micro_batch: int, pack_tokens: int | None) -> list[int]:
    """Places of the rows that fill the longest micro-batch: the longest first, and in packs whatever still fits.

    `lengths` in tokens; `pack_tokens` None where rows are not packed.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    if pack_tokens is None:
        return order[:micro_batch]
    chosen: dict[int, None] = {}
    for _ in range(micro_batch):
        room = pack_tokens
        for place in order:
            if room <= 0:
                break
            if place not in chosen and lengths[place] <= room:
                chosen[place] = None
                room -= lengths[place]
    return list(chosen)
