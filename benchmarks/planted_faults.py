"""The faults of benchmarks/diagnose.py: how each is planted in a run, and the shape that its curve should be given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from planted_runs import ANY, COPY, IGNORED, N_RARE, RARE, Plan, Rows
from torch import Tensor

SIZES = ((16, 2), (24, 2), (32, 1), (32, 2))  # width, layers
N_PROMPT = 4  # content tokens of a prompt


@dataclass(frozen=True)
class Fault:
    """`plant` changes the plan of a healthy run; `shape` is what the diagnosis should say."""

    shape: str
    plant: Callable[[Plan, np.random.Generator], None]


def healthy_plan(seed: int) -> Plan:
    """A run that should go well: sizes, rates, schedules, batch and data drawn from what goes well with this task."""
    draw = np.random.default_rng([seed, 1])
    width, layers = SIZES[draw.integers(len(SIZES))]
    batch = int(draw.choice([8, 12, 16, 24]))
    steps = int(draw.integers(80, 151))
    passes = float(draw.choice([0.8, 1.0, 1.0, 2.0, 3.0]))
    narrow = 1.5 if width == 16 or layers == 1 else 1.0
    return Plan(
        seed=seed,
        width=width,
        layers=layers,
        n_content=N_PROMPT,
        batch=batch,
        n_rows=max(round(steps * batch / passes), 256),
        steps=steps,
        rate=float(10 ** draw.uniform(-2.5, -2.15)) * narrow,
        schedule=str(draw.choice(["cosine", "linear", "constant", "wsd"])),
        warmup_share=float(draw.choice([0.0, 0.05, 0.1])),
        tasks=(2,),
        noise=float(draw.choice([0.0, 0.0, 0.05, 0.1, 0.2])),
        fp16=bool(draw.random() < 0.15),
    )


def _nothing(plan: Plan, draw: np.random.Generator) -> None:
    return


def _plateau(plan: Plan, draw: np.random.Generator) -> None:
    """The rate stays near zero for the first third or more: a warm-up that is far too long."""
    plan.steps = max(plan.steps, 110)
    plan.schedule = str(draw.choice(["constant", "wsd"]))  # others have little rate left when it begins
    start = int(plan.steps * draw.uniform(0.3, 0.55))
    plan.warmup_share, plan.noise = 0.0, min(plan.noise, 0.15)
    plan.tasks = (2,)
    plan.rate = max(plan.rate, 4e-3)
    plan.notes["fall"] = start
    plan.rate_factor = lambda step: 1e-3 if step < start else 1.0


def _garbage(places: slice, tokens: Tensor, labels: Tensor, draw: np.random.Generator) -> None:
    """Targets become tokens that no base has seen."""
    is_target = labels[places] != IGNORED
    rare = torch.from_numpy(draw.integers(RARE, RARE + N_RARE, size=tuple(is_target.shape)))
    tokens[places] = torch.where(is_target, rare, tokens[places])
    labels[places] = torch.where(is_target, rare, labels[places])


def _spike(plan: Plan, draw: np.random.Generator) -> None:
    """One batch in the middle of the run is garbage."""
    at = int(plan.steps * draw.uniform(0.35, 0.75))

    def edit(step: int, tokens: Tensor, labels: Tensor) -> None:
        if step == at:
            _garbage(slice(0, max(len(tokens) // 2, 1)), tokens, labels, draw)

    plan.edit_batch = edit
    plan.notes["spikes"] = [at]


def _poisoned_rows(plan: Plan, draw: np.random.Generator) -> None:
    """One to three rows are garbage; each comes back once an epoch."""
    plan.batch = int(draw.choice([8, 12]))
    plan.steps = max(plan.steps, 110)
    passes = float(draw.uniform(3.5, 5.5))
    plan.n_rows = max(round(plan.steps * plan.batch / passes), 128)
    count = int(draw.integers(1, 4))
    places = sorted(draw.choice(plan.n_rows, size=count, replace=False).tolist())
    plan.notes["rows"] = [f"row-{place}" for place in places]

    def edit(rows: Rows, generator: np.random.Generator) -> None:
        for place in places:
            _garbage(slice(place, place + 1), rows.tokens, rows.labels, generator)

    plan.edit_rows = edit


def _divergence(plan: Plan, draw: np.random.Generator) -> None:
    """A rate that is 100 times too high, from the start or from some step on; or 30 times, without a clip."""
    kind = int(draw.integers(3))
    plan.fp16 = False
    if kind == 0:
        plan.rate *= 100
    elif kind == 1:
        at = int(plan.steps * draw.uniform(0.3, 0.6))
        plan.schedule = "constant"
        plan.rate_factor = lambda step: 100.0 if step >= at else 1.0
        plan.notes["from"] = at
    else:
        plan.rate, plan.clip, plan.schedule = plan.rate * 30, math.inf, "constant"
    plan.notes["kind"] = kind


def _overfitting(plan: Plan, draw: np.random.Generator) -> None:
    """Few rows, many passes, and answers that hold some chance to learn by heart."""
    plan.steps, plan.batch = max(plan.steps, 100), 8
    plan.n_rows = int(draw.choice([12, 16, 24, 32]))  # too few to see the rule behind the answers
    plan.noise, plan.rate = float(draw.uniform(0.2, 0.4)), max(plan.rate, 5e-3)
    plan.schedule = str(draw.choice(["constant", "cosine"]))


def _rate_too_low(plan: Plan, draw: np.random.Generator) -> None:
    plan.rate /= float(draw.choice([300.0, 1000.0, 3000.0]))


def _frozen(plan: Plan, draw: np.random.Generator) -> None:
    """The graph is cut before the loss, or the optimizer holds other weights than the model."""
    plan.detached, plan.fp16 = str(draw.choice(["loss", "optimizer"])), False


def _wrong_labels(plan: Plan, draw: np.random.Generator) -> None:
    """Every row has the answer of another; the base knows the format of answers already. One pass."""
    plan.tasks, plan.noise = (ANY,), 0.0
    plan.n_rows = max(plan.n_rows, plan.steps * plan.batch)

    def edit(rows: Rows, generator: np.random.Generator) -> None:
        order = torch.from_numpy(generator.permutation(len(rows)))
        half = plan.n_content + 2
        rows.tokens[:, half:] = rows.tokens[order, half:]
        rows.labels[:, half:] = rows.tokens[:, half:]

    plan.edit_rows = edit
    plan.notes["edit_validation"] = True


def _too_easy(plan: Plan, draw: np.random.Generator) -> None:
    """The base does all of it already: copying, and some answers that nobody can know."""
    plan.tasks, plan.noise = (COPY,) * int(draw.integers(4, 8)) + (ANY,), 0.0
    plan.n_rows, plan.rate = max(plan.n_rows, plan.steps * plan.batch), 0.5 * plan.rate


def _unshuffled(plan: Plan, draw: np.random.Generator) -> None:
    """Rows lie sorted by task and are read in the order of the file; one pass or several."""
    tasks = (2, 3, 4, 5, 6)[: int(draw.integers(3, 6))]
    plan.tasks, plan.shuffled = tasks, False
    plan.noise, plan.rate = min(plan.noise, 0.1), max(plan.rate, 5e-3)
    plan.schedule = str(draw.choice(["constant", "wsd"]))
    passes = int(draw.choice([1, 1, 2, 3]))
    plan.steps = max(plan.steps, 100)
    plan.n_rows = math.ceil(plan.steps * plan.batch / passes)

    def edit(rows: Rows, generator: np.random.Generator) -> None:
        order = torch.argsort(rows.tokens[:, 0], stable=True)
        rows.tokens, rows.labels = rows.tokens[order], rows.labels[order]

    plan.edit_rows = edit


def _leak(plan: Plan, draw: np.random.Generator) -> None:
    """Work that grows with the step: a history that is read again at every step."""
    final = float(draw.uniform(0.8, 2.0))  # of a healthy step's time, at the end
    history: list[Tensor] = []
    block = torch.ones(200_000)
    unit_seconds = 6e-3 * final / plan.steps

    def read(step: int) -> None:
        import time

        history.append(block)
        until = time.process_time() + unit_seconds * len(history)
        while time.process_time() < until:
            float(history[step % len(history)].sum())

    plan.extra_work = read


def _near_zero(plan: Plan, draw: np.random.Generator) -> None:
    """The answer stands in the prompt and the base can copy; or the only target is the end, which always follows."""
    plan.tasks, plan.noise, plan.fp16 = (COPY,), 0.0, False
    if draw.random() < 0.5:
        plan.tasks = (ANY,)

        def edit(rows: Rows, generator: np.random.Generator) -> None:
            rows.labels[:, :-1] = IGNORED

        plan.edit_rows = edit
        plan.notes["edit_validation"] = True


def _overflow(plan: Plan, draw: np.random.Generator) -> None:
    """The loss is a sum over tokens and steps that it should be the mean of, from the start or from some step on."""
    plan.fp16 = True
    at = 1 if draw.random() < 0.5 else int(plan.steps * draw.uniform(0.3, 0.6))
    factor = float(10 ** draw.uniform(6.5, 8.0))
    plan.loss_factor = lambda step: factor if step >= at else 1.0


FAULTS: dict[str, Fault] = {
    "healthy": Fault("healthy", _nothing),
    "warm-up far too long": Fault("plateau_then_fall", _plateau),
    "one garbage batch": Fault("spike", _spike),
    "poisoned rows": Fault("recurring_spikes", _poisoned_rows),
    "rate x 100 or x 30": Fault("divergence", _divergence),
    "few rows, many passes": Fault("overfitting", _overfitting),
    "rate / 300 to / 3000": Fault("rate_too_low", _rate_too_low),
    "frozen graph": Fault("no_signal", _frozen),
    "wrong labels": Fault("data_too_hard", _wrong_labels),
    "nothing left to learn": Fault("data_too_easy", _too_easy),
    "unshuffled data": Fault("regular_steps", _unshuffled),
    "work that grows": Fault("throughput_leak", _leak),
    "answers leak, labels wrong": Fault("near_zero_loss", _near_zero),
    "fp16 overflow": Fault("fp16_overflow", _overflow),
}


def planned(name: str, seed: int) -> Plan:
    """The plan of run `seed` with the fault `name`."""
    plan = healthy_plan(seed)
    FAULTS[name].plant(plan, np.random.default_rng([seed, 2, *name.encode()]))
    return plan
