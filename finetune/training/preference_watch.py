"""What a reader of a preference run should know before its verdict: no margin, or chosen answers that become unlikely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.telemetry.callback import StepTally
from finetune.telemetry.events import EventLog, read_events

STEPS_BEFORE_MARGIN = 10
_NO_MARGIN_NATS = 1e-3
_FALL_NATS = 1.0  # a chosen answer is e times less likely than under the reference
_LAST_SHARE = 10  # the fall is judged over the last tenth of the steps


class PreferenceWatch(TrainerCallback):
    """Flags, once each, in events.jsonl and to the user. Add it before the telemetry callback, which empties the tally.

    Log-ratios to the reference are rewards over `beta`. A run that is continued goes on from the events of what was done.
    """

    def __init__(
        self, events: Path, tally: StepTally, beta: float, say: Callable[[str], None], *, writes: bool = True
    ) -> None:
        self._log, self._tally, self._beta, self._say = EventLog(events if writes else None), tally, beta, say
        self._events = events
        self.flags: dict[str, str] = {}
        self._margins: list[float] = []
        self._chosen: list[float] = []
        self._rejected: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for event in read_events(self._events):
            if event["event"] == "step" and event["step"] <= state.global_step:
                self._add(event)
            elif event["event"] == "flag":
                self.flags[event["name"]] = event["message"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._add(self._tally.example_means())
        if len(self._margins) == STEPS_BEFORE_MARGIN:
            self._check_margin(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._check_margin(state.global_step)
        self._check_fall(state.global_step)

    def _add(self, means: dict[str, Any]) -> None:
        """A KTO step may hold no wanted, or no unwanted, answer: then that number is not there. Its answers are no pairs,
        and their margin is that of the means."""
        if "reward_margin" not in means and {"reward_chosen", "reward_rejected"} <= means.keys():
            means = {**means, "reward_margin": means["reward_chosen"] - means["reward_rejected"]}
        for values, name in (
            (self._margins, "reward_margin"),
            (self._chosen, "reward_chosen"),
            (self._rejected, "reward_rejected"),
        ):
            if name in means:
                values.append(float(means[name]) / self._beta)

    def _check_margin(self, step: int) -> None:
        """The first step has no margin by definition; a later one that still has none means that nothing is learnt."""
        later = self._margins[1:]
        if later and max(map(abs, later)) < _NO_MARGIN_NATS:
            self._flag(
                "no_margin",
                step,
                f"after {len(self._margins)} steps the chosen answers are no likelier than the rejected ones, measured against "
                "the reference: the pairs are alike, the learning rate is too low, or what is trained cannot move the output",
            )

    def _check_fall(self, step: int) -> None:
        """Likelihood displacement (Razin et al. 2024, arXiv:2410.08847)."""
        last = max(len(self._chosen) // _LAST_SHARE, 1)
        chosen, rejected = (
            fmean(values[-last:]) for values in (self._chosen or [0.0], self._rejected or [0.0])
        )
        if chosen < -_FALL_NATS:
            self._flag(
                "chosen_falls",
                step,
                f"the chosen answers became {-chosen:.1f} nats less likely than under the reference (the rejected ones "
                f"{-rejected:.1f}): the margin grows by pushing both down, and what takes their place is not in the data. A "
                "lower learning rate, a higher beta, or sft among the losses keeps them",
            )

    def _flag(self, name: str, step: int, message: str) -> None:
        if name not in self.flags:
            self.flags[name] = message
            self._log.write("flag", step=step, name=name, message=message)
            self._say(f"look at this: {message}")
