"""Real runs of a tiny language model with a planted fault, for benchmarks/diagnose.py.

A run tunes a base model of width 16-32 on a synthetic task for 80-150 optimizer steps and writes the events that
`finetune run` writes, through the same event log and the same measurement of updates. The loop is the smallest equivalent
of the trainer's: AdamW, warm-up and schedule of `training/schedules.py`, one clip, the mean loss over target tokens. The
trainer itself is not used because it refuses some of the faults (a graph without gradients) and stops at others.

A row is a task token, some content tokens, a separator, as many answer tokens, and an end. The base was trained to copy
the content after the task token `COPY`, and to answer with any content tokens after `ANY`; tuning teaches other mappings.

What is emulated, and how:
- fp16: computed in fp32; the scaled gradients are rounded to fp16 and looked at for infinities, as a loss scaler does.
- a leak of throughput is real work that grows with the step. Speed is taken over the process's CPU time, and in units of a
  fixed piece of work that is timed beside every step: other jobs on the machine, which slow both, do not disturb it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.recipe.train_section import TrainSection
from finetune.telemetry.events import EventLog
from finetune.telemetry.updates import UpdateWatch
from finetune.training.schedules import build_schedule

N_CONTENT = 20  # content tokens
FIRST_TASK = N_CONTENT
N_TASKS = 8
SEPARATOR, END = FIRST_TASK + N_TASKS, FIRST_TASK + N_TASKS + 1
RARE = END + 1  # tokens that no base has seen, for garbage
N_RARE = 12
VOCABULARY = RARE + N_RARE
COPY, ANY = 0, 1
IGNORED = -100
_FP16_MAX = 65504.0
_YARDSTICK_STEPS = 7  # whose median tells how fast the machine is just now
_FIRST_SCALE = 65536.0


@dataclass
class Rows:
    """`tokens` [N, T]; `labels` [N, T], -100 where there is no target; ids are 'row-<place>'."""

    tokens: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Plan:
    """One run before its fault is planted. `width`, `layers` of the model; `n_content` tokens of a prompt."""

    seed: int
    width: int
    layers: int
    n_content: int
    batch: int
    n_rows: int
    steps: int
    rate: float
    schedule: str
    warmup_share: float
    tasks: tuple[int, ...] = (2,)
    noise: float = 0.0  # share of answer tokens that are any token
    validate_every: int = 10
    clip: float = 1.0
    shuffled: bool = True
    fp16: bool = False
    base: str = "trained"
    notes: dict[str, Any] = field(default_factory=dict)
    edit_rows: Callable[[Rows, np.random.Generator], None] | None = None
    edit_model: Callable[[Any], None] | None = None
    rate_factor: Callable[[int], float] | None = None
    loss_factor: Callable[[int], float] | None = None
    extra_work: Callable[[int], None] | None = None
    detached: str = ""  # "loss": no gradient arrives; "optimizer": it steps other weights
    edit_batch: Callable[[int, Tensor, Tensor], None] | None = None

    def generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode()])


def make_rows(
    n: int, n_content: int, tasks: Sequence[int], noise: float, draw: np.random.Generator, key: int
) -> Rows:
    """`n` rows whose answers follow each task's mapping of the content tokens; `key` seeds the mappings."""
    content = draw.integers(0, N_CONTENT, size=(n, n_content))
    task = draw.choice(np.asarray(tasks), size=n)
    answers = np.empty_like(content)
    for one in sorted(set(task.tolist())):
        mine = task == one
        if one == COPY:
            answers[mine] = content[mine]
        elif one == ANY:
            answers[mine] = draw.integers(0, N_CONTENT, size=(int(mine.sum()), n_content))
        else:
            mapping = np.random.default_rng([key, one]).permutation(N_CONTENT)
            answers[mine] = mapping[content[mine]]
    wrong = draw.random(answers.shape) < noise
    answers[wrong] = draw.integers(0, N_CONTENT, size=int(wrong.sum()))
    ones = np.ones((n, 1), dtype=np.int64)
    tokens = np.concatenate(
        [FIRST_TASK + task[:, None], content, SEPARATOR * ones, answers, END * ones], axis=1
    )
    labels = tokens.copy()
    labels[:, : n_content + 2] = IGNORED
    return Rows(torch.from_numpy(tokens), torch.from_numpy(labels))


def new_model(width: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)  # from the usual 0.02 a model this narrow takes long to start
    return model


def target_losses(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(mean loss over all target tokens, mean loss [N] over those of each row), in nats."""
    logits = model(input_ids=tokens).logits[:, :-1]
    wanted = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), wanted.reshape(-1), ignore_index=IGNORED, reduction="none"
    ).view(wanted.shape)
    n_targets = (wanted != IGNORED).sum(dim=1)
    return losses.sum() / n_targets.sum(), losses.detach().sum(dim=1) / n_targets


def mean_loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean loss over target tokens, in nats."""
    return target_losses(model, tokens, labels)[0]


_BASES: dict[tuple[int, int, int], dict[str, Tensor]] = {}


def keep_base(width: int, layers: int, n_content: int, state: dict[str, Tensor]) -> None:
    """Take these weights for what `base_state` would train."""
    _BASES[width, layers, n_content] = state


def base_state(width: int, layers: int, n_content: int) -> dict[str, Tensor]:
    """Weights of a base that copies after COPY and answers anything after ANY; trained once a process."""
    key = (width, layers, n_content)
    if key not in _BASES:
        keep_base(*key, _train_base(*key))
    return _BASES[key]


def _train_base(width: int, layers: int, n_content: int) -> dict[str, Tensor]:
    model = new_model(width, layers, seed=width + layers)
    draw = np.random.default_rng([width, layers, n_content])
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.0)
    n_steps = 700
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = 8e-3 * min(1.0, (step + 1) / 30) * min(1.0, 2.0 * (1 - step / n_steps))
        rows = make_rows(32, n_content, (COPY, ANY), 0.0, draw, key=0)
        loss = mean_loss(model, rows.tokens, rows.labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def run(plan: Plan, events: Path) -> None:
    """Train as planned and write events.jsonl."""
    rows, validation = _data(plan)
    model, steps = _model(plan), plan.steps
    settings = TrainSection.model_validate(
        {"schedule": plan.schedule, "warmup_share": plan.warmup_share, "learning_rate": plan.rate}
    )
    trained = new_model(plan.width, plan.layers, 1) if plan.detached == "optimizer" else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=plan.rate, weight_decay=0.0)
    scheduler = build_schedule(optimizer, settings, steps)
    log, watch, order = EventLog(events), UpdateWatch(), _order(plan)
    scaler = _Scaler() if plan.fp16 else None
    total_tokens = total_targets = 0
    yardstick = _Yardstick()
    clock = time.process_time()
    for step in range(1, steps + 1):
        places = order[(step - 1) * plan.batch : step * plan.batch]
        tokens, labels = rows.tokens[places].clone(), rows.labels[places].clone()
        if plan.edit_batch is not None:
            plan.edit_batch(step, tokens, labels)
        if plan.rate_factor is not None:
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate * plan.rate_factor(step)
        loss, of_rows = target_losses(model, tokens, labels)
        grad_norm = _backward(plan, step, model, loss, scaler)
        watch.start(model)
        if math.isfinite(grad_norm):
            optimizer.step()
        moved = watch.finish(model)
        optimizer.zero_grad()
        rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        if plan.extra_work is not None:
            plan.extra_work(step)
        total_tokens += tokens.numel()
        total_targets += int((labels[:, 1:] != IGNORED).sum())
        seconds = max(time.process_time() - clock, 1e-9) * yardstick.machine_speed()
        clock = time.process_time()
        log.write(
            "step",
            step=step,
            epoch=round(step * plan.batch / plan.n_rows, 6),
            tokens=total_tokens,
            target_tokens=total_targets,
            loss=float(loss.detach()),
            grad_norm=grad_norm,
            weight_norm=moved.weight_norm,
            update_ratio=moved.ratio,
            learning_rate=rate,
            tokens_per_second=round(tokens.numel() / seconds, 2),
            **({} if scaler is None else {"loss_scale": scaler.scale}),
            rows=[f"row-{place}" for place in places],
            worst_row=f"row-{places[int(of_rows.argmax())]}",
            worst_row_loss=float(of_rows.max()),
        )
        if step % plan.validate_every == 0 or step == steps:
            with torch.no_grad():
                value = float(mean_loss(model, validation.tokens, validation.labels))
            log.write("validation", step=step, loss=value)
            clock = time.process_time()


class _Yardstick:
    """A fixed piece of work of a step's kind: how fast the machine is, against when the run began."""

    def __init__(self) -> None:
        self._model = new_model(16, 1, 0)
        self._tokens = torch.arange(96).view(8, 12) % VOCABULARY
        for _ in range(3):
            self._seconds()  # the first ones pay for what is set up once
        self._last = deque([self._seconds() for _ in range(_YARDSTICK_STEPS)], maxlen=_YARDSTICK_STEPS)
        self._first = statistics.median(self._last)

    def _seconds(self) -> float:
        start = time.process_time()
        loss = mean_loss(self._model, self._tokens, self._tokens)
        loss.backward()
        return time.process_time() - start

    def machine_speed(self) -> float:
        """1.0 as at the beginning, 0.5 when the same work takes twice as long."""
        self._last.append(self._seconds())
        return self._first / statistics.median(self._last)


def _model(plan: Plan) -> Any:
    model = new_model(plan.width, plan.layers, plan.seed)
    if plan.base == "trained":
        model.load_state_dict(base_state(plan.width, plan.layers, plan.n_content))
    if plan.edit_model is not None:
        plan.edit_model(model)
    return model


def _data(plan: Plan) -> tuple[Rows, Rows]:
    draw = plan.generator("rows")
    rows = make_rows(plan.n_rows, plan.n_content, plan.tasks, plan.noise, draw, plan.seed)
    validation = make_rows(64, plan.n_content, plan.tasks, plan.noise, draw, plan.seed)
    if plan.edit_rows is not None:
        plan.edit_rows(rows, draw)
        plan.edit_rows(validation, draw) if plan.notes.get("edit_validation") else None
    return rows, validation


def _order(plan: Plan) -> list[int]:
    """Places of the rows of all steps: epochs one behind the other, each in an order of its own where shuffled."""
    draw, order = plan.generator("order"), []
    while len(order) < plan.steps * plan.batch:
        order += (draw.permutation(plan.n_rows) if plan.shuffled else np.arange(plan.n_rows)).tolist()
    return order


class _Scaler:
    """The dynamics of a loss scale: halved by every overflow, doubled after 50 steps without one."""

    def __init__(self) -> None:
        self.scale, self._since = _FIRST_SCALE, 0

    def update(self, overflowed: bool) -> None:
        self._since = 0 if overflowed else self._since + 1
        if overflowed:
            self.scale /= 2
        elif self._since == 50:
            self.scale, self._since = self.scale * 2, 0


def _backward(plan: Plan, step: int, model: Any, loss: Tensor, scaler: _Scaler | None) -> float:
    """Gradients, clipped once; returns their norm before clipping, infinity where fp16 overflowed."""
    if plan.detached == "loss":
        return 0.0
    factor = plan.loss_factor(step) if plan.loss_factor is not None else 1.0
    (loss * factor).backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    if scaler is not None:
        largest = max(float(p.grad.abs().max()) for p in parameters)
        overflowed = not largest * scaler.scale <= _FP16_MAX
        used = scaler.scale
        scaler.update(overflowed)
        if overflowed:
            return math.inf
        for p in parameters:
            p.grad = (p.grad * used).half().float() / used
    return float(torch.nn.utils.clip_grad_norm_(parameters, plan.clip))
