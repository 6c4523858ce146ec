"""A level loss although the weights move: whether the rows ask too much or nothing, in the words of each method."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from finetune.doctor.diagnosis.curve import Curve
from finetune.doctor.diagnosis.finding import Diagnosis

_HARD_FROM = 1.0  # nats a target: on average one of e tokens is guessed
_TOLD_APART = 0.9  # share of pairs whose chosen answer is ahead
_HARD_FROM_OF_ANSWERS = 0.25  # loss of judged answers, which is a half where none is told apart


def find_data(curve: Curve, level: float, evidence: Mapping[str, float | int | str]) -> Diagnosis:
    """`level` is the median loss of a curve without a fall."""
    method = curve.setting.get("method")
    if curve.is_of_preferences:
        return _of_preferences(curve, level, evidence)
    if method == "distil":
        return _of_teacher(curve, level, evidence)
    moves = f"the weights move and gradients arrive, yet the loss stays at {level:.3g} nats"
    if level >= _HARD_FROM:
        return Diagnosis(
            "data_too_hard",
            "warning",
            f"{moves}: the answers do not follow from the prompts",
            "check that every answer stands with its own prompt (columns, joins, shuffles), that prompts are not cut, and that "
            "targets are the answers; then overfit eight rows: if that works, the task is too hard for this model or needs "
            "more rows",
            evidence,
        )
    return Diagnosis(
        "data_too_easy",
        "warning",
        f"{moves} from the start: the model knows these rows already",
        "compare the untuned model on the suite first; tune on rows it fails, or on harder ones. What is left may be noise "
        "that no training removes",
        evidence,
    )


def _of_preferences(curve: Curve, level: float, evidence: Mapping[str, float | int | str]) -> Diagnosis:
    """By the share of pairs that are told apart; of answers judged one by one, which have none, by the loss."""
    known = curve.accuracy[np.isfinite(curve.accuracy)]
    moves = f"the weights move and gradients arrive, yet the loss stays at {level:.3g}"
    if len(known):
        share = float(np.mean(known))
        evidence = {**evidence, "share_told_apart": round(share, 3)}
        is_easy, told = share >= _TOLD_APART, f", and of {share:.0%} of the pairs the chosen answer is ahead"
    else:
        is_easy, told = level < _HARD_FROM_OF_ANSWERS, ""
    if is_easy:
        return Diagnosis(
            "data_too_easy",
            "warning",
            f"{moves} from the start{told}: the model prefers the better answers already",
            "take pairs that it gets wrong, of its own answers if it can be: what it prefers already teaches nothing",
            evidence,
        )
    return Diagnosis(
        "data_too_hard",
        "warning",
        f"{moves}{told}: what makes an answer better cannot be learned from these rows",
        "read some pairs: chosen and rejected may be swapped in part, nearly alike, or judged at random; then overfit eight of "
        "them: if that works, the judgement is noise or needs more rows",
        evidence,
    )


def _of_teacher(curve: Curve, level: float, evidence: Mapping[str, float | int | str]) -> Diagnosis:
    moves = f"the weights move and gradients arrive, yet the loss stays at {level:.3g} nats"
    if level >= _HARD_FROM:
        return Diagnosis(
            "data_too_hard",
            "warning",
            f"{moves}: the student does not come nearer to its teacher",
            "check that teacher and student read the same prompts with the same template and tokens (finetune doctor), and that "
            "the student keeps enough layers; then overfit eight rows: if that works, it needs more rows or more of the teacher",
            evidence,
        )
    return Diagnosis(
        "data_too_easy",
        "warning",
        f"{moves} from the start: on these rows the student is as near to its teacher as it gets",
        "compare both on the suite: if the student is worse there, teach it on prompts where the two differ",
        evidence,
    )
