"""Two files of scores, joined item by item, with everything refused that would make a comparison mean less than it says."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from finetune.errors import UserError, did_you_mean
from finetune.stats.formats import RawItem, read_raw

NO_CLUSTER = "none"
_SHOWN = 3
_USUAL_CLUSTER = "cluster"


class ScoredItem(NamedTuple):
    """An item with its scores, one per repeated sample."""

    samples: list[float]
    cluster: Hashable
    fingerprint: str | None


@dataclass(frozen=True)
class ScoreFile:
    """One arm's scores of one metric, by item, in the order of the file. `unscored`: items without a usable score."""

    path: Path
    format: str
    items: dict[str, ScoredItem]
    unscored: tuple[str, ...]


@dataclass(frozen=True)
class PairedScores:
    """Two arms on the same items. a, b: mean score of each item; clusters: one label an item, or None.

    samples_a, samples_b: all samples of each item. left_out: items that --inner left out of A, of B.
    """

    metric: str
    items: list[str]
    a: list[float]
    b: list[float]
    samples_a: list[list[float]]
    samples_b: list[list[float]]
    clusters: list[Hashable] | None
    cluster_key: str | None
    left_out: tuple[int, int]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reading makes a few hundred thousand small objects and no cycles; the collector would walk them all, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_garbage_collection()
def read_pair(
    path_a: Path, path_b: Path, *, metric: str | None = None, cluster: str | None = None, inner: bool = False
) -> PairedScores:
    """Read and join two files of scores.

    metric: name of the score; found by itself when the files share only one, or have one called 'score'.
    cluster: key of each item's cluster, also looked for in `tags`, `metadata` and `doc`; without it a `cluster` that the
    records carry is used, and 'none' declares the items independent. Labels that only one file has hold for both.
    inner: compare the items that both files have scored; otherwise any difference between them is refused.
    Raises UserError for damage, duplicates, NaN or missing scores, other items, and an empty set.
    """
    wanted = cluster or _USUAL_CLUSTER
    (format_a, raw_a), (format_b, raw_b) = read_raw(path_a, wanted), read_raw(path_b, wanted)
    for path, raw in ((path_a, raw_a), (path_b, raw_b)):
        if not raw:
            raise UserError(
                f"{path} holds no items", why="no items, no verdict", fix="check the run that wrote it"
            )
    _refuse_other_filter(raw_a, raw_b, (path_a, path_b))
    name = _choose_metric(raw_a, raw_b, metric, (path_a, path_b))
    key = cluster if cluster != NO_CLUSTER else None
    if cluster is None and any(item.cluster is not None for item in itertools.chain(raw_a, raw_b)):
        key = _USUAL_CLUSTER  # then every item needs one: items taken as independent by mistake look too certain
    if key is not None:
        for raw in (raw_a, raw_b):
            _refuse_some_labels(raw, key)
        raw_a, raw_b = _with_labels_of(raw_a, raw_b), _with_labels_of(raw_b, raw_a)
    first = _collect(path_a, format_a, raw_a, name, key, inner=inner)
    second = _collect(path_b, format_b, raw_b, name, key, inner=inner)
    return _join(first, second, name, key, inner=inner)


def _with_labels_of(raw: list[RawItem], other: Sequence[RawItem]) -> list[RawItem]:
    """The items, with the cluster labels that the other file gives them where this one gives none at all."""
    if any(item.cluster is not None for item in raw):
        return raw
    labels = {item.item: item.cluster for item in other}
    return [item._replace(cluster=labels.get(item.item, item.item)) for item in raw]


def _refuse_some_labels(raw: Sequence[RawItem], key: str) -> None:
    """Items without a label among items with one are a slip, not a design."""
    lacking = [item for item in raw if item.cluster is None]
    if 0 < len(lacking) < len(raw):
        raise UserError(
            f"no cluster '{key}' for {len(lacking)} of {len(raw)} items",
            where=lacking[0].where,
            why="items that share a cluster are not independent, and whether these do is not known",
            fix="label every item, or declare them all independent with --cluster none",
        )


def _refuse_other_filter(
    raw_a: Sequence[RawItem], raw_b: Sequence[RawItem], paths: tuple[Path, Path]
) -> None:
    """The same metric behind another filter of lm-eval is another metric."""
    one, other = raw_a[0].filter, raw_b[0].filter
    if one is not None and other is not None and one != other:
        raise UserError(
            f"A is scored behind the filter '{one}', B behind '{other}'",
            where=f"A: {paths[0]}, B: {paths[1]}",
            why="what a filter finds in an answer decides its score, so the difference would be that of the filters",
            fix="give the samples of the same filter for both arms",
        )


def _choose_metric(
    raw_a: Sequence[RawItem], raw_b: Sequence[RawItem], metric: str | None, paths: tuple[Path, Path]
) -> str:
    named = [_metric_names(raw) for raw in (raw_a, raw_b)]
    shared = [name for name in named[0] if name in set(named[1])]
    if metric is not None:
        for path, names in zip(paths, named, strict=True):
            if metric not in names:
                fix = did_you_mean(metric, names) if names else "score its items first"
                raise UserError(f"no metric '{metric}' in {path}", fix=fix)
        return metric
    if "score" in shared:
        return "score"
    if len(shared) == 1:
        return shared[0]
    if not shared:
        raise UserError(
            "the files share no score",
            why=f"A has {', '.join(named[0]) or 'none'}; B has {', '.join(named[1]) or 'none'}",
            fix="score both arms with the same metric",
        )
    raise UserError(
        f"the files share {len(shared)} scores: {', '.join(shared)}",
        fix=f"choose one, e.g. --metric {shared[0]}",
    )


def _metric_names(raw: Iterable[RawItem]) -> list[str]:
    names: dict[str, None] = {}
    for item in raw:
        names.update(dict.fromkeys(item.scores))
    return list(names)


def _collect(
    path: Path, format_name: str, raw: Sequence[RawItem], metric: str, cluster: str | None, *, inner: bool
) -> ScoreFile:
    items: dict[str, ScoredItem] = {}
    seen: dict[tuple[str, Any], str] = {}
    unscored: list[RawItem] = []
    for one in raw:
        name = (one.item, one.repeat)
        if name in seen:
            raise UserError(
                f"item '{one.item}' appears twice",
                where=f"{one.where} and {seen[name]}",
                fix="keep one line an item, or number repeated samples under 'repeat'",
            )
        seen[name] = one.where
        value = one.scores.get(metric)
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            unscored.append(one)
            continue
        if not isinstance(value, (float, int)) or abs(value) > sys.float_info.max:
            raise UserError(
                f"'{metric}' is {value!r:.80}, not a number", where=one.where, fix="score it with a number"
            )
        label = None if cluster is None else one.cluster
        if cluster is not None and label is None:
            raise UserError(
                f"no cluster '{cluster}'", where=one.where, fix="label every item, or use --cluster none"
            )
        before = items.get(one.item)
        if before is None:
            items[one.item] = ScoredItem([float(value)], label, one.fingerprint)
        elif before.cluster != label:
            raise UserError(f"samples of item '{one.item}' are in different clusters", where=one.where)
        else:
            before.samples.append(float(value))
    if unscored and not inner:
        first = unscored[0]
        kind = "missing" if first.scores.get(metric) is None else "not a finite number"
        raise UserError(
            f"{len(unscored)} of {len(raw)} items have no usable '{metric}'",
            where=first.where,
            why=f"item '{first.item}': the score is {kind}; an unscored item is neither right nor wrong",
            fix="score these items again, or leave them out of both arms with --inner",
        )
    for one in unscored:
        items.pop(
            one.item, None
        )  # an item with one failed sample would be averaged over fewer than the others
    return ScoreFile(path, format_name, items, tuple(dict.fromkeys(one.item for one in unscored)))


def _join(
    first: ScoreFile, second: ScoreFile, metric: str, cluster: str | None, *, inner: bool
) -> PairedScores:
    only_a = [item for item in first.items if item not in second.items]
    only_b = [item for item in second.items if item not in first.items]
    if (only_a or only_b) and not inner:
        raise UserError(
            f"the files do not hold the same items: {len(only_a)} only in A{_examples(only_a)}, "
            f"{len(only_b)} only in B{_examples(only_b)}",
            where=f"A: {first.path}, B: {second.path}",
            why="a difference on other items is not a difference between the arms",
            fix="evaluate both arms on the same items, or compare the shared ones with --inner",
        )
    shared = [item for item in first.items if item in second.items]
    if not shared:
        raise UserError(
            "no item is scored in both files",
            where=f"A: {first.path}, B: {second.path}",
            fix="check the item names",
        )
    pairs = [(first.items[item], second.items[item]) for item in shared]
    _refuse_other_content(shared, pairs, first.path, second.path)
    clusters: list[Hashable] | None = None
    if cluster is not None:
        clusters = [one.cluster for one, _ in pairs]
        moved = [item for item, (one, two) in zip(shared, pairs, strict=True) if one.cluster != two.cluster]
        if moved:
            raise UserError(
                f"{len(moved)} items are in another cluster in B{_examples(moved)}",
                fix="use the same items for both arms",
            )
    return PairedScores(
        metric=metric,
        items=shared,
        a=[math.fsum(one.samples) / len(one.samples) for one, _ in pairs],
        b=[math.fsum(two.samples) / len(two.samples) for _, two in pairs],
        samples_a=[one.samples for one, _ in pairs],
        samples_b=[two.samples for _, two in pairs],
        clusters=clusters,
        cluster_key=cluster,
        left_out=(len(only_a) + len(first.unscored), len(only_b) + len(second.unscored)),
    )


def _refuse_other_content(
    items: Sequence[str], pairs: Sequence[tuple[ScoredItem, ScoredItem]], path_a: Path, path_b: Path
) -> None:
    other = [
        item
        for item, (one, two) in zip(items, pairs, strict=True)
        if one.fingerprint and two.fingerprint and one.fingerprint != two.fingerprint
    ]
    if other:
        raise UserError(
            f"{len(other)} items have the same name but another content{_examples(other)}",
            where=f"A: {path_a}, B: {path_b}",
            why="the files are of different tasks or versions of the data",
            fix="evaluate both arms on the same version of the task",
        )


def _examples(items: Sequence[str]) -> str:
    return f" ({', '.join(items[:_SHOWN])}{', …' if len(items) > _SHOWN else ''})" if items else ""
