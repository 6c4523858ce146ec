"""What a run must account for: memory against its forecast, every row read, every stage, every input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from finetune.report.numbers import NBSP, finite, grouped, minus, whole, words
from finetune.report.read import Record, RunFiles, as_dict, as_text
from finetune.report.svg import bar
from finetune.units import format_bytes, format_duration


@dataclass(frozen=True, slots=True)
class MemoryRow:
    name: str
    size: str
    bar: Markup


@dataclass(frozen=True, slots=True)
class Memory:
    """The forecast term by term as a waterfall, its total, and what the run used; of the evaluation the sentence alone."""

    rows: tuple[MemoryRow, ...]
    total: MemoryRow | None
    used: MemoryRow | None
    sentence: str | None
    basis: str | None
    evaluation: str | None = None


_PEAK = "used at the peak"
_BASES = {"rss": "peak resident set of the process", "cuda": "peak memory of the accelerator"}


def read_memory(run: RunFiles) -> Memory | None:
    """Forecast against use, or None when there is neither."""
    forecast = run.forecast
    terms = [
        (str(name), number)
        for name, size in as_dict(forecast.get("terms_bytes")).items()
        if (number := finite(size))
    ]
    total = finite(forecast.get("total_bytes"))
    used, used_name = _used_bytes(run)
    longest = max([number for number in (total, used, sum(size for _, size in terms)) if number] or [0.0])
    if not longest:
        return None
    rows, start = [], 0.0
    for name, size in sorted(terms, key=lambda term: -term[1]):
        rows.append(MemoryRow(words(name), format_bytes(size), bar(start / longest, size / longest, "term")))
        start += size
    return Memory(
        rows=tuple(rows),
        total=MemoryRow("forecast", format_bytes(total), bar(0, total / longest, "total")) if total else None,
        used=MemoryRow(used_name, format_bytes(used), bar(0, used / longest, "used")) if used else None,
        sentence=forecast_sentence(total, used, is_peak=used_name == _PEAK),
        basis=_BASES.get(str(forecast.get("basis")), as_text(forecast.get("basis"))),
        evaluation=_evaluation_sentence(forecast.get("evaluation")),
    )


def _evaluation_sentence(evaluation: object) -> str | None:
    """The forecast of the evaluation beside what it used; None for a run that answered nothing itself."""
    if not (used := finite(as_dict(evaluation).get("used_peak_bytes"))):
        return None
    return forecast_sentence(finite(as_dict(evaluation).get("total_bytes")), used)


def _used_bytes(run: RunFiles) -> tuple[float | None, str]:
    """The peak that the run wrote down, else the highest that telemetry saw at the end of a step."""
    used = finite(run.forecast.get("used_peak_bytes"))
    if used:
        return used, _PEAK
    seen = [number for event in run.events if (number := finite(event.get("memory_bytes")))]
    return (max(seen), "highest at the end of a step") if seen else (None, _PEAK)


def forecast_sentence(total: float | None, used: float | None, *, is_peak: bool = True) -> str | None:
    """'forecast 3.42 GB, used 3.31 GB: the forecast is 3.3 % above', with whichever of the two is known.

    What was seen between steps (`is_peak` False) is below the peak, so the forecast is not measured by it.
    """
    if not total and not used:
        return None
    if used and not is_peak:
        forecast = f"forecast {format_bytes(total)}" if total else "no forecast"
        return f"{forecast}, peak not recorded ({format_bytes(used)} seen at the end of a step)"
    if not total:
        return f"no forecast, used {format_bytes(used or 0)}"
    if not used:
        return f"forecast {format_bytes(total)}, use not recorded"
    off = total / used - 1
    place = (
        f"{abs(off) * 100:.1f}{NBSP}% {'above' if off > 0 else 'below'}" if abs(off) >= 0.0005 else "exact"
    )
    return f"forecast {format_bytes(total)}, used {format_bytes(used)}: the forecast is {place}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """Every row read, accounted for; and the rows that two sides of the split share."""

    rows: tuple[tuple[str, str | None], ...]
    balance: str
    is_balanced: bool | None
    leaks: str
    leak_counts: str
    is_clean: bool | None
    splits: tuple[tuple[str, str | None, str | None], ...]
    tokenised: tuple[tuple[str, tuple[tuple[str, str | None], ...]], ...]
    facts: tuple[tuple[str, str], ...]


def read_ledger(run: RunFiles) -> Ledger | None:
    """The row ledger and the leak check of the dataset build, or None without its manifest."""
    manifest = run.data_manifest
    if not manifest:
        return None
    ledger = as_dict(manifest.get("ledger"))
    dropped = as_dict(ledger.get("dropped"))
    rows = [("read", grouped(ledger.get("read"))), ("kept", grouped(ledger.get("kept")))]
    rows += [(f"dropped: {words(str(reason))}", grouped(n)) for reason, n in dropped.items()]
    rows.append(("quarantined", grouped(ledger.get("quarantined"))))
    balance, is_balanced = _balance(ledger, dropped)
    leaks = _leaks(as_dict(manifest.get("leaks")))
    splits = tuple(
        (str(name), grouped(as_dict(held).get("rows")), as_text(as_dict(held).get("digest")))
        for name, held in as_dict(manifest.get("splits")).items()
    )
    digest = as_text(manifest.get("digest"))
    facts = [
        (key, text) for key in ("name", "licence", "seed") for text in flat(manifest.get(key), key).values()
    ]
    facts += [
        (name.replace(".", " "), shortened(text))
        for name, text in flat(manifest.get("source"), "source").items()
    ]
    facts += [("build", shortened(digest))] if digest else []
    return Ledger(
        tuple(rows),
        balance,
        is_balanced,
        *leaks,
        splits=splits,
        tokenised=_tokenised(run),
        facts=tuple(facts),
    )


def _tokenised(run: RunFiles) -> tuple[tuple[str, tuple[tuple[str, str | None], ...]], ...]:
    """(split, counts) of tokenising: rows read, kept, dropped by reason, with a cut prompt, and target tokens."""
    found = []
    for name, held in as_dict(run.tokenised.get("splits")).items():
        counts = as_dict(as_dict(held).get("counts"))
        pairs = [(words(str(key)), grouped(n)) for key, n in counts.items()]
        pairs.append(("target tokens", grouped(as_dict(held).get("target_tokens"))))
        found.append((str(name), tuple(pairs)))
    return tuple(found)


def _balance(ledger: Record, dropped: Record) -> tuple[str, bool | None]:
    counts = [whole(ledger.get("read")), whole(ledger.get("kept")), whole(ledger.get("quarantined"))]
    drops = [whole(n) for n in dropped.values()]
    known = [count for count in counts if count is not None]
    known_drops = [count for count in drops if count is not None]
    if len(known) < 3 or len(known_drops) < len(drops):
        return "rows cannot be accounted for: a count is missing", None
    n_read, n_kept, n_quarantined = known
    left = n_read - n_kept - sum(known_drops) - n_quarantined
    sums = f"{n_read:,} read = {n_kept:,} kept + {sum(known_drops):,} dropped + {n_quarantined:,} quarantined"
    if left:
        return f"{sums} does not add up: {minus(f'{left:+,}')} rows", False
    return sums, True


def _leaks(leaks: Record) -> tuple[str, str, bool | None]:
    """A sentence for the top of the page, the counts by kind, and whether there are none."""
    counts = {words(str(kind)): whole(n) for kind, n in leaks.items()}
    known = [count for count in counts.values() if count is not None]
    if not known or len(known) < len(counts):
        return "leaks between the splits are not recorded", "a count is missing", None
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    total = sum(known)
    return f"{f'{total:,}' if total else 'no'} leaks between the splits", kinds, not total


def shortened(text: str) -> str:
    """The first 12 characters of a SHA-256 in hex; any other text as it is."""
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] if is_digest else text


def flat(value: object, key: str = "") -> dict[str, str]:
    """Nested values as dotted names and texts, in order; absent values are left out."""
    if isinstance(value, dict):
        pairs = [flat(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()]
        return {name: text for pair in pairs for name, text in pair.items()}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return flat({str(index): inner for index, inner in enumerate(value)}, key)
    if value is None or value == [] or (isinstance(value, float) and finite(value) is None):
        return {}
    if isinstance(value, list):
        return {key: ", ".join(str(inner) for inner in value)}
    number = finite(value)
    if number is not None and key.endswith("_bytes"):
        return {key.removesuffix("_bytes"): format_bytes(number)}
    return {key: str(value)}


@dataclass(frozen=True, slots=True)
class Provenance:
    """Stages, environment, and the digest of every input."""

    stages: tuple[tuple[str, str, str | None, str | None], ...]
    environment: tuple[tuple[str, str], ...]
    digests: tuple[tuple[str, str], ...]


def read_provenance(run: RunFiles) -> Provenance:
    stages = tuple(
        _stage(str(name), as_dict(held)) for name, held in as_dict(run.manifest.get("stages")).items()
    )
    digests = flat({"recipe": run.manifest.get("recipe_digest"), **as_dict(run.manifest.get("inputs"))})
    for arm in run.arms:
        for key in ("suite_digest", "adapter_sha256"):
            text = as_text(arm.summary.get(key))
            if text:
                digests[f"{arm.suite} {key.split('_')[0]}"] = text
    return Provenance(stages, tuple(flat(run.environment).items()), tuple(digests.items()))


def _stage(name: str, held: Record) -> tuple[str, str, str | None, str | None]:
    seconds = finite(held.get("seconds"))
    state = "complete" if held.get("completed") else "not complete"
    return (
        words(name),
        state,
        None if seconds is None else format_duration(seconds),
        as_text(held.get("digest")),
    )


def summary_of(ledger: Ledger | None, memory: Memory | None) -> Sequence[tuple[str, str | None]]:
    """The two lines that stand beside the verdict: rows and leaks, forecast and use."""
    rows = None if ledger is None else f"{ledger.balance}; {ledger.leaks}"
    return (("rows", rows), ("memory", memory.sentence if memory else None))
