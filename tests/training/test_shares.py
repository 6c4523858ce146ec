"""The steps of one process shared out over several: every row once, in the step it has with one process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.data.pair_tokens import Answer, AnsweredPrompt
from finetune.errors import UserError
from finetune.recipe.train_section import TrainSection
from finetune.telemetry.callback import StepTally
from finetune.training.branches import Pack
from finetune.training.shares import (
    IDLE,
    SharedLoader,
    SharedSteps,
    copy_tally,
    micro_batches_of_process,
    part_of,
    uncount,
)


def packs_of(sizes: list[list[int]]) -> list[dict[str, Any]]:
    """Packs whose rows have these lengths; a row's tokens are its number, and the rows are numbered through."""
    packs, row = [], 0
    for lengths in sizes:
        rows = list(range(row, row + len(lengths)))
        ids = [number for number, length in zip(rows, lengths, strict=True) for _ in range(length)]
        packs.append({"input_ids": ids, "labels": list(ids), "rows": rows, "seq_lengths": lengths})
        row += len(lengths)
    return packs


def settings_of(micro: int, accumulation: int, packing: bool) -> TrainSection:
    return TrainSection(micro_batch_size=micro, gradient_accumulation_steps=accumulation, packing=packing)


def steps_of(packs: list[Any], settings: TrainSection, n_ranks: int, epoch: int) -> list[list[int]]:
    """The rows of every step of an epoch, over all ranks; asserts that all ranks have as many micro-batches of it."""
    per_step = micro_batches_of_process(settings, n_ranks)
    found: list[list[int]] = []
    lengths = set()
    for rank in range(n_ranks):
        sampler = SharedSteps(len(packs), settings, 7, rank, n_ranks)
        loader = SharedLoader(
            packs, sampler, lambda examples: {"rows": [r for e in examples for r in e["rows"]]}
        )
        loader.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader)
        lengths.add(len(batches))
        for number in range(0, len(batches), per_step):
            step = number // per_step
            found += [[]] * (step >= len(found))
            own = [b["rows"] for b in batches[number : number + per_step] if IDLE not in b]
            assert all(len(batch) for batch in own)
            found[step] = found[step] + [row for batch in own for row in batch]
    assert len(lengths) == 1
    return [sorted(step) for step in found]


@given(
    sizes=st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=4), min_size=1, max_size=9),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    n_ranks=st.integers(2, 5),
    epoch=st.integers(0, 2),
)
def test_every_row_comes_once_in_the_step_it_has_with_one_process(
    sizes: list[list[int]], micro: int, accumulation: int, n_ranks: int, epoch: int
) -> None:
    packs, settings = packs_of(sizes), settings_of(micro, accumulation, packing=True)
    expected = steps_of(packs, settings, 1, epoch)
    assert sorted(row for step in expected for row in step) == list(range(sum(map(len, sizes))))
    assert steps_of(packs, settings, n_ranks, epoch) == expected


@given(
    n=st.integers(1, 12), micro=st.integers(1, 3), accumulation=st.integers(2, 4), n_ranks=st.integers(2, 4)
)
def test_rows_that_are_not_packed_are_shared_out_whole(
    n: int, micro: int, accumulation: int, n_ranks: int
) -> None:
    rows = [{"input_ids": [number] * 3, "rows": [number]} for number in range(n)]
    settings = settings_of(micro, accumulation, packing=False)
    if micro * accumulation < n_ranks:
        with pytest.raises(UserError, match="some have nothing to do"):
            micro_batches_of_process(settings, n_ranks)
        return
    assert steps_of(rows, settings, n_ranks, 0) == steps_of(rows, settings, 1, 0)


def test_a_pack_is_cut_between_its_rows_into_even_parts() -> None:
    (pack,) = packs_of([[9, 2, 4, 4]])
    parts = [part_of(pack, part, 2) for part in range(2)]
    assert [part["rows"] for part in parts] == [[0], [1, 2, 3]]
    assert [part["seq_lengths"] for part in parts] == [[9], [2, 4, 4]]
    assert parts[1]["input_ids"] == parts[1]["labels"] == [1] * 2 + [2] * 4 + [3] * 4
    assert part_of(packs_of([[5]])[0], 1, 2) is None


def test_pairs_take_their_reference_along() -> None:
    pairs = [AnsweredPrompt(str(n), [1] * n, (Answer([2], [2]), Answer([3], [3]))) for n in (3, 9, 4)]
    pack = Pack(pairs, [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    one, other = (part_of(pack, part, 2) for part in range(2))
    assert ([pair.row_id for pair in one.examples], one.reference) == (["9"], [-3.0, -4.0])
    assert ([pair.row_id for pair in other.examples], other.reference) == (
        ["3", "4"],
        [-1.0, -2.0, -5.0, -6.0],
    )


def test_what_is_computed_along_is_taken_back_but_its_names_stay() -> None:
    """Processes add up the same numbers in the same order."""
    tally = StepTally(nll_sum=2.0, n_targets=3)
    before = copy_tally(tally)
    tally.nll_sum += 5.0
    tally.n_tokens += 7
    tally.add_examples(1, {"margin": (0.5, 1)})
    uncount(tally, before)
    assert (tally.nll_sum, tally.n_targets, tally.n_tokens, tally.n_examples) == (2.0, 3, 0, 0)
    assert (tally.example_sums, tally.example_counts) == ({"margin": 0.0}, {"margin": 0.0})
