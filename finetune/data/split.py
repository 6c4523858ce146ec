"""Which side a row falls on, and which rows of a side are used. Nothing here depends on the order of the rows."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

from finetune.data.fold import fold_turns
from finetune.data.rows import SIDES, SIDES_BY_PRECEDENCE, Ledger, Row, Side
from finetune.data.spec import SelectSection, SplitSection
from finetune.digest import canonical_json, digest_bytes
from finetune.errors import UserError

_HASH_BITS = 64


def salted_hash(salt: str, key: str) -> int:
    """A 64-bit hash of `key` that is the same on every machine and in every process."""
    return int(digest_bytes(f"{salt}\x00{key}".encode())[:16], 16)


def normalised_prompt(row: Row) -> str:
    """All before the last answer, with case, compatibility forms and white space folded: 'the same prompt'."""
    return fold_turns(row.prompt)


def assign_sides(strata: Mapping[str, str], split: SplitSection) -> dict[str, Side]:
    """Group -> side, for `strata` = group -> stratum.

    Without `stratify_by` the side depends on the salted hash of the group alone: more rows never move a row. With it,
    the shares are exact within each stratum (largest remainder), groups taken in hash order; a stratum of two groups
    or more always reaches both train and an evaluation side, when the split has one.
    """
    if split.stratify_by is None:
        return {group: _side_by_hash(group, split) for group in strata}
    members: dict[str, list[str]] = defaultdict(list)
    for group, stratum in strata.items():
        members[stratum].append(group)
    sides: dict[str, Side] = {}
    for groups in members.values():
        groups.sort(key=lambda group: (salted_hash(split.salt, group), group))
        quota = _quota(len(groups), split)
        dealt = itertools.chain.from_iterable([side] * quota[side] for side in SIDES)
        sides.update(zip(groups, dealt, strict=True))
    return sides


def _side_by_hash(group: str, split: SplitSection) -> Side:
    position = salted_hash(split.salt, group) / 2**_HASH_BITS
    edge = 0.0
    for side in SIDES:
        edge += split.shares.get(side, 0.0)
        if position < edge:
            return side
    return "train"


def _quota(n_groups: int, split: SplitSection) -> dict[Side, int]:
    """How many of a stratum's groups each side gets: largest remainder, then train and evaluation at least one each."""
    exact = {side: split.shares.get(side, 0.0) * n_groups for side in SIDES}
    quota = {side: int(exact[side]) for side in SIDES}
    by_remainder = sorted(SIDES, key=lambda side: quota[side] - exact[side])
    for side in by_remainder[: n_groups - sum(quota.values())]:
        quota[side] += 1
    evaluation: list[Side] = sorted(
        (side for side in SIDES if side != "train" and split.shares.get(side)),
        key=lambda side: -split.shares[side],
    )
    if quota["train"] == 0:
        quota[max(evaluation, key=lambda side: quota[side])] -= 1
        quota["train"] = 1
    if n_groups > 1 and evaluation and quota["train"] == n_groups:
        quota["train"] -= 1
        quota[evaluation[0]] += 1
    return quota


def split_rows(rows: Iterable[Row], split: SplitSection, ledger: Ledger) -> dict[Side, list[Row]]:
    """Rows by side: no group, no normalised prompt and no value of `unique_by` is on two sides.

    Where two groups share a prompt or such a value across sides, the evaluation side keeps it and the other rows are
    dropped and counted. Byte-identical conversations are kept once.
    """
    by_group: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    strata = {group: _stratum(members, split.stratify_by) for group, members in by_group.items()}
    assigned = assign_sides(strata, split)
    by_side: dict[Side, list[Row]] = {side: [] for side in SIDES}
    for group in sorted(by_group):
        by_side[assigned[group]] += sorted(by_group[group], key=_content_order)
    seen: set[str] = set()
    owners: dict[str, Side] = {}
    for side in SIDES_BY_PRECEDENCE:
        by_side[side] = [row for row in by_side[side] if _is_new(row, side, split, seen, owners, ledger)]
    return by_side


def _stratum(rows: list[Row], tag: str | None) -> str:
    if tag is None:
        return ""
    # A group may span values; the smallest name is a stable choice that does not depend on row order.
    return min(row.tags.get(tag, "") for row in rows)


def _content_order(row: Row) -> tuple[str, str]:
    """An order that does not depend on where the row stood: of two duplicates, the same one is always kept."""
    return row.id, canonical_json(row.tags)


def _is_new(
    row: Row, side: Side, split: SplitSection, seen: set[str], owners: dict[str, Side], ledger: Ledger
) -> bool:
    content = row.content_digest()
    if content in seen:
        ledger.drop("duplicate", source=row.source, id=row.id)
        return False
    keys = {"prompt_on_other_side": f"prompt\x00{normalised_prompt(row)}"}
    if split.unique_by is not None and split.unique_by in row.tags:
        keys[f"{split.unique_by}_on_other_side"] = f"tag\x00{row.tags[split.unique_by]}"
    for reason, key in keys.items():
        if owners.get(key, side) != side:
            ledger.drop(reason, source=row.source, id=row.id, other_side=owners[key])
            return False
    seen.add(content)
    owners.update(dict.fromkeys(keys.values(), side))
    return True


def select_rows(
    by_side: Mapping[Side, list[Row]], select: SelectSection, seed: int, ledger: Ledger
) -> dict[Side, list[Row]]:
    """The rows of each side that are used, in seeded order.

    When `rows` is binding, rows are dealt one at a time: the value of `balance_by` with the fewest rows, relative to
    its number of groups to the power `balance_power`, is next; within it the groups take turns.
    """
    return {side: _select_side(by_side[side], side, select, seed, ledger) for side in SIDES}


def _select_side(rows: list[Row], side: Side, select: SelectSection, seed: int, ledger: Ledger) -> list[Row]:
    def order(row: Row) -> tuple[int, str]:
        return salted_hash(f"select/{seed}", row.id), row.id

    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=order):
        groups[row.tags.get(select.balance_by or "", "")][row.group].append(row)
    per_group = select.rows_per_group.get(side)
    queues = {value: _take_turns(members, per_group, seed) for value, members in groups.items()}
    limit = select.rows.get(side, len(rows))
    heap = [
        (1 / len(groups[value]) ** select.balance_power, value) for value, queue in queues.items() if queue
    ]
    heapq.heapify(heap)
    chosen: list[Row] = []
    while heap and len(chosen) < limit:
        dealt, value = heapq.heappop(heap)
        chosen.append(queues[value].pop())
        if queues[value]:
            heapq.heappush(heap, (dealt + 1 / len(groups[value]) ** select.balance_power, value))
    kept = {row.id for row in chosen}
    for row in rows:
        if row.id not in kept:
            ledger.drop("over_limit", source=row.source, id=row.id, side=side)
    return sorted(chosen, key=order)


def _take_turns(members: Mapping[str, list[Row]], per_group: int | None, seed: int) -> list[Row]:
    """One row of each group, then a second of each, …; reversed, so that the next row is popped off the end."""
    names = sorted(members, key=lambda name: (salted_hash(f"turns/{seed}", name), name))
    rounds = itertools.zip_longest(*(members[name][:per_group] for name in names))
    return [row for turn in rounds for row in turn if row is not None][::-1]


def require_train(by_side: Mapping[Side, list[Row]], where: str) -> None:
    """A build without train rows is of no use; say which key to change."""
    if not by_side["train"]:
        counts = ", ".join(f"{side} {len(by_side[side])}" for side in SIDES)
        raise UserError(
            f"the split leaves no train rows ({counts})",
            where=where,
            why="with few groups the hash of their names can put all of them on the evaluation sides",
            fix="give the data more groups, raise split.shares.train, or change split.salt",
        )
