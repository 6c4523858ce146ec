"""What the distillation losses have to fulfil, measured: given numbers, an fp64 reference, and the known mistakes of others.

`finetune doctor losses` runs it on the machine that is to train. Each check returns one number that has to stay below its
limit. Small random distributions from a fixed seed; no model, no file.

Shapes: n target tokens · V vocabulary · k kept tokens · D hidden size · B rows of S positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from finetune.distil.cache.coding import keep_top_k
from finetune.distil.cache.measure import covered_mass
from finetune.distil.cache.write import coding_of
from finetune.distil.losses import (
    KINDS,
    bucket_log_probabilities,
    check_loss,
    chunked_distillation_loss,
    divergence,
    forward_kl,
    target_places,
)
from finetune.distil.reference import reference_divergence
from finetune.distil.targets import TeacherTargets

_FP64 = 1e-10
_TEACHER, _STUDENT = (2.0, 1.0, 0.0, -1.0), (1.0, 1.0, 0.5, 0.0)
# kind, weight, temperature, k (0: all), value in nats with T², to seven places.
_GIVEN: tuple[tuple[str, float | None, float, int, float], ...] = (
    ("forward_kl", None, 1.0, 0, 0.2181395),
    ("reverse_kl", None, 1.0, 0, 0.2395825),
    ("jsd", 0.1, 1.0, 0, 0.0196097),
    ("jsd", 0.5, 1.0, 0, 0.0553249),
    ("jsd", 0.9, 1.0, 0, 0.0210563),
    ("skew_forward_kl", 0.1, 1.0, 0, 0.1764569),
    ("skew_reverse_kl", 0.1, 1.0, 0, 0.1855035),
    ("forward_kl", None, 2.0, 0, 0.2680833),
    ("forward_kl", None, 1.0, 2, 0.2149992),
    ("forward_kl", None, 1.0, 4, 0.2181395),
)
# p, q, kind, value to six places.
_PUBLISHED = (
    ((0.9, 0.1), (0.1, 0.9), "forward_kl", 1.7577797),
    ((0.9, 0.1), (0.1, 0.9), "reverse_kl", 1.7577797),
    ((0.9, 0.1), (0.6, 0.4), "reverse_kl", 0.311239),
)


class Measured(NamedTuple):
    """A check's number and its limit; `detail` says what was compared."""

    check: str
    value: float
    limit: float
    detail: str


Check = Callable[[], tuple[float, float, str]]


def _logits(n: int, v: int, seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(n, v, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def top_k_of(logits: Tensor, k: int, temperature: float) -> TeacherTargets:
    """The top k of logits [n, V] with their exact normaliser at a temperature."""
    kept, ids = logits.topk(k, dim=1)
    return TeacherTargets.top_k(ids, kept, torch.logsumexp(logits / temperature, dim=1))


def _teachers(logits: Tensor, temperature: float) -> list[TeacherTargets]:
    """The full distribution, its top 4, and its top V."""
    v = logits.shape[1]
    return [TeacherTargets.full(logits), *(top_k_of(logits, k, temperature) for k in (4, v))]


def _everything() -> Iterator[tuple[str, float]]:
    return itertools.product(KINDS, (1.0, 2.0, 0.5))


def given_numbers() -> tuple[float, float, str]:
    p, q = (torch.tensor([logits], dtype=torch.float64) for logits in (_TEACHER, _STUDENT))
    errors = []
    for kind, weight, temperature, k, value in _GIVEN:
        teacher = top_k_of(p, k, temperature) if k else TeacherTargets.full(p)
        errors.append(abs(float(divergence(kind, q, teacher, temperature=temperature, beta=weight)) - value))
    for p_given, q_given, kind, value in _PUBLISHED:
        log_p, log_q = (torch.tensor([one], dtype=torch.float64).log() for one in (p_given, q_given))
        errors.append(abs(float(divergence(kind, log_q, TeacherTargets.full(log_p))) - value))
    return max(errors), 5.1e-7, f"{len(errors)} values computed by hand and from papers"


def reference() -> tuple[float, float, str]:
    """fp64 sums in plain Python, for every kind, temperature and form of the teacher."""
    errors = []
    p, q = _logits(6, 11, 1), _logits(6, 11, 2)
    for kind, temperature in _everything():
        for teacher in _teachers(p, temperature):
            ids = None if teacher.ids is None else teacher.ids.tolist()
            wanted = reference_divergence(kind, p.tolist(), q.tolist(), temperature, ids)
            found = divergence(kind, q, teacher, temperature=temperature)
            errors.append(float((found - torch.tensor(wanted, dtype=torch.float64)).abs().max()))
    return max(errors), _FP64, f"{len(errors)} sets of targets against sums in plain Python"


def finite_differences() -> tuple[float, float, str]:
    """Gradient of the chunked loss by states, head and bias against central differences."""
    worst = 0.0
    y = torch.tensor([3, 0, 6, 6, 1])
    hidden, head, bias = _logits(5, 4, 3, 0.7), _logits(7, 4, 4, 0.7), _logits(1, 7, 5)[0]
    for kind, temperature in itertools.product(KINDS, (1.0, 2.0)):
        for teacher in _teachers(_logits(5, 7, 6), temperature):

            def loss(
                h: Tensor, w: Tensor, b: Tensor,
                kind: str = kind, temperature: float = temperature, teacher: TeacherTargets = teacher,
            ) -> Tensor:  # fmt: skip
                return chunked_distillation_loss(
                    h,
                    w,
                    teacher,
                    y,
                    kind=kind,
                    temperature=temperature,
                    answer_weight=0.3,
                    chunk_tokens=2,
                    head_bias=b,
                ).loss

            worst = max(worst, gradient_error(loss, (hidden, head, bias)))
    return worst, 1e-7, "central differences along random directions, relative to the slope's size"


def gradient_error(loss: Callable[..., Tensor], at: Sequence[Tensor], directions: int = 1) -> float:
    """Largest difference between the gradient along a random direction and the central difference, relative to it or to 1."""
    inputs = [tensor.clone().requires_grad_() for tensor in at]
    gradients = torch.autograd.grad(loss(*inputs), inputs)
    generator = torch.Generator().manual_seed(0)
    worst, step = 0.0, 1e-5
    for _ in range(directions):
        way = [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for tensor in at]
        slope = float(sum((g * w).sum() for g, w in zip(gradients, way, strict=True)))
        with torch.no_grad():
            ahead, behind = (
                float(loss(*(tensor + sign * step * w for tensor, w in zip(at, way, strict=True))))
                for sign in (1.0, -1.0)
            )
        worst = max(worst, abs(slope - (ahead - behind) / (2 * step)) / max(1.0, abs(slope)))
    return worst


def temperature_in_gradient() -> tuple[float, float, str]:
    """T² has to multiply the gradient and not only what is told: with it, the KL's gradient tends to (z_q - z_p) / V."""
    p, q = _logits(4, 9, 7, 0.5), _logits(4, 9, 8, 0.5)
    p, q = p - p.mean(dim=1, keepdim=True), (q - q.mean(dim=1, keepdim=True)).requires_grad_()
    worst = 0.0
    for kind in ("forward_kl", "reverse_kl"):
        value = divergence(kind, q, TeacherTargets.full(p), temperature=1000.0)
        (slope,) = torch.autograd.grad(value.sum(), q)
        limit = (q - p).detach() / p.shape[1]
        worst = max(worst, float((slope - limit).abs().max() / limit.abs().max()))
    return worst, 5e-3, "gradient at T = 1000 against its limit, relative"


def temperature_changes() -> tuple[float, float, str]:
    """The temperature has to change the divergence, and must not change the answers' likelihood."""
    p, q, y = _logits(5, 9, 9), _logits(5, 9, 10), torch.tensor([1, 2, 3, 4, 5])
    eye = torch.eye(9, dtype=torch.float64)
    teacher = TeacherTargets.full(p)

    def loss(temperature: float, share: float) -> float:
        return float(
            chunked_distillation_loss(
                q, eye, teacher, y, kind="forward_kl", temperature=temperature, answer_weight=share
            ).loss
        )

    if abs(loss(1.0, 0.0) - loss(2.0, 0.0)) < 1e-3:
        return math.inf, _FP64, "the divergence at T = 1 and T = 2 is the same: the temperature is ignored"
    return (
        abs(loss(1.0, 1.0) - loss(2.0, 1.0)),
        _FP64,
        "likelihood at T = 1 and T = 2, the divergence differing",
    )


def shifted_mask() -> tuple[float, float, str]:
    """Targets at positions 2..5 have their gradient at 1..4, and nowhere else."""
    labels = torch.full((1, 8), -100)
    labels[0, 2:6] = torch.tensor([4, 2, 0, 1])
    states = _logits(8, 3, 11)[None].requires_grad_()
    places, answers = target_places(labels)
    loss = chunked_distillation_loss(
        states[places], _logits(5, 3, 12), TeacherTargets.full(_logits(4, 5, 13)), answers, kind="forward_kl",
        answer_weight=0.5,
    ).loss  # fmt: skip
    (slope,) = torch.autograd.grad(loss, states)
    touched = slope[0].abs().sum(dim=1) > 0
    wanted = torch.tensor([False, True, True, True, True, False, False, False])
    wrong = int((touched != wanted).sum()) + int((answers != labels[0, 2:6]).sum())
    return wrong, 0, "positions with a gradient that should have none, or the other way round"


def others_do_not_count() -> tuple[float, float, str]:
    """Prompt, padding and width of the batch: states that predict no target change neither loss nor gradient."""
    labels = torch.tensor([[-100, -100, 3, 1, -100, -100], [-100, 2, -100, -100, -100, -100]])
    head, teacher = _logits(5, 3, 14), TeacherTargets.full(_logits(3, 5, 15))

    def loss(states: Tensor, marks: Tensor) -> Tensor:
        places, answers = target_places(marks)
        return chunked_distillation_loss(
            states[places], head, teacher, answers, kind="reverse_kl", answer_weight=0.2
        ).loss

    states = _logits(12, 3, 16).view(2, 6, 3)
    noise = states + torch.where(target_places(labels)[0][..., None], 0.0, 100.0)
    wider = torch.cat([states, 7.0 + torch.zeros(2, 3, 3, dtype=torch.float64)], dim=1)
    wider_labels = torch.cat([labels, torch.full((2, 3), -100)], dim=1)
    one = float(loss(states, labels))
    error = max(abs(float(loss(noise, labels)) - one), abs(float(loss(wider, wider_labels)) - one))
    return error, 0.0, "loss with other prompts and more padding, difference"


def filler() -> tuple[float, float, str]:
    """Columns that neither vocabulary has, filled with -inf, change neither value nor gradient; none is NaN."""
    p, q = _logits(5, 9, 17), _logits(5, 9, 18)
    none = torch.full((5, 3), -math.inf, dtype=torch.float64)
    worst = 0.0
    for kind in KINDS:
        for k in (0, 4, 9, 11):
            found = []
            for extra in (none, none[:, :0]):
                teacher_logits = torch.cat([p, extra], dim=1)
                student = torch.cat([q, extra], dim=1).requires_grad_()
                size = min(k, teacher_logits.shape[1])
                teacher = top_k_of(teacher_logits, size, 1.0) if k else TeacherTargets.full(teacher_logits)
                value = divergence(kind, student, teacher)
                (slope,) = torch.autograd.grad(value.sum(), student)
                found.append((value.detach(), slope[:, :9]))
            for with_filler, without in zip(*found, strict=True):
                worst = max(worst, _difference(with_filler, without))
    return worst, _FP64, "value and gradient with filler against without, for all kinds"


def _difference(one: Tensor, other: Tensor) -> float:
    error = float((one - other).abs().max())
    return math.inf if math.isnan(error) else error


def full_top_k() -> tuple[float, float, str]:
    p, q = _logits(6, 11, 19), _logits(6, 11, 20)
    worst = 0.0
    for kind, temperature in _everything():
        whole = divergence(kind, q, TeacherTargets.full(p), temperature=temperature)
        worst = max(
            worst,
            _difference(divergence(kind, q, top_k_of(p, 11, temperature), temperature=temperature), whole),
        )
    return worst, _FP64, "top k with k = V against the full distribution"


def tail_bucket() -> tuple[float, float, str]:
    """With the tail as one outcome no divergence is negative, or above the one over all tokens; both happen without."""
    worst = 0.0
    for seed in range(8):
        p, q = _logits(16, 11, 21 + seed, 3.0), _logits(16, 11, 51 + seed, 3.0)
        for kind, k in itertools.product(KINDS, (1, 2, 5, 10)):
            found, whole = (
                divergence(kind, q, top_k_of(p, k, 1.0)),
                divergence(kind, q, TeacherTargets.full(p)),
            )
            worst = max(worst, float((-found).max()), float((found - whole).max()))
    detail = "how far a top-k divergence is below 0 or above the full one, at most; rounding is that of 1 - mass of the top"
    return worst, 1e-8, detail


def one_token() -> tuple[float, float, str]:
    """k = 1 still teaches: normalised to 1 on both sides, the one token would have no loss and no gradient."""
    p, q = _logits(6, 9, 22), _logits(6, 9, 23).requires_grad_()
    weakest = math.inf
    for kind in KINDS:
        value = divergence(kind, q, top_k_of(p, 1, 1.0))
        (slope,) = torch.autograd.grad(value.sum(), q)
        weakest = min(weakest, float(value.detach().min()), float(slope.abs().amax(dim=1).min()))
    return (
        (0.0 if weakest > 1e-6 else 1.0),
        0,
        f"1 where a loss or gradient is nothing; the smallest is {weakest:.1e}",
    )


def equal_models() -> tuple[float, float, str]:
    """A student equal to its teacher has loss 0, in fp32, from logits and from top k, at every temperature."""
    logits = _logits(32, 50, 24, 4.0).float()
    worst = 0.0
    for kind, temperature in _everything():
        for k in (0, 1, 8, 50):
            teacher = top_k_of(logits, k, temperature) if k else TeacherTargets.full(logits)
            worst = max(worst, float(divergence(kind, logits, teacher, temperature=temperature).abs().max()))
    return worst, 2e-6, "largest loss of a student equal to its teacher, fp32"


def beta_is_continuous() -> tuple[float, float, str]:
    """jsd goes to 0 with β, and divided by β to the forward KL; no other loss is put in its place, and 0 and 1 are refused."""
    p, q = _logits(8, 9, 25, 1.0), _logits(8, 9, 26, 1.0)
    teacher = TeacherTargets.full(p)
    errors = []
    for beta, kind in ((1e-3, "forward_kl"), (1.0 - 1e-3, "reverse_kl")):
        least = min(beta, 1.0 - beta)
        value, tends_to = divergence("jsd", q, teacher, beta=beta), divergence(kind, q, teacher)
        errors.append(float(((value / least - tends_to) / tends_to).abs().max()))
    for beta in (0.0, 1.0):
        try:
            check_loss("jsd", 1.0, beta)
        except ValueError:
            continue
        return math.inf, 0.02, f"jsd takes a β of {beta}, where it is 0 for any two models"
    return max(errors), 0.02, "jsd / β near 0 and 1 against the KL that it tends to, relative"


def low_precision() -> tuple[float, float, str]:
    """Logits in bf16 of models that differ little: the KL is taken in fp32, where it is not lost or negative."""
    p = _logits(64, 200, 27, 4.0).bfloat16()
    q = (p.double() + _logits(64, 200, 28, 0.03)).bfloat16()
    found = divergence("forward_kl", q, TeacherTargets.full(p)).double()
    log_p, log_q = (torch.log_softmax(logits.double(), dim=1) for logits in (p, q))
    truth = forward_kl(log_p, log_q)
    return (
        float((found - truth).abs().max()),
        2e-6,
        f"against fp64 on the same logits; true KL {float(truth.mean()):.1e}",
    )


def sums_and_chunks() -> tuple[float, float, str]:
    """One batch, micro-batches over the same denominator and chunks of any size give one loss: a sum over target tokens."""
    hidden, head, y = _logits(12, 4, 29), _logits(9, 4, 30), torch.arange(12) % 9
    teacher = top_k_of(_logits(12, 9, 31), 3, 2.0)

    def loss(start: int, stop: int, chunk: int) -> tuple[float, Tensor]:
        states = hidden[start:stop].clone().requires_grad_()
        value = chunked_distillation_loss(
            states, head, teacher.part(start, stop), y[start:stop], kind="jsd", temperature=2.0, answer_weight=0.4,
            n_items=12, chunk_tokens=chunk,
        ).loss  # fmt: skip
        return float(value.detach()), torch.autograd.grad(value, states)[0]

    plain = torch.nn.functional.linear(hidden, head)
    nll = torch.nn.functional.cross_entropy(plain, y, reduction="none")
    wanted = float((0.6 * divergence("jsd", plain, teacher, temperature=2.0) + 0.4 * nll).mean())
    whole, slope = loss(0, 12, 12)
    worst = abs(whole - wanted)
    for chunk in (1, 5):
        value, other = loss(0, 12, chunk)
        worst = max(worst, abs(value - whole), _difference(other, slope))
    for cut in (1, 7):
        first, second = loss(0, cut, 12), loss(cut, 12, 12)
        worst = max(
            worst, abs(first[0] + second[0] - whole), _difference(torch.cat([first[1], second[1]]), slope)
        )
    return worst, _FP64, "whole batch against micro-batches, chunks and the mean over targets"


def kept_temperatures() -> tuple[float, float, str]:
    """What a cache keeps has the true mass of the top k at every planned temperature, which T = 1 does not tell."""
    logits = _logits(32, 4000, 32, 2.0).float()
    coding = coding_of(k=16, vocabulary=4000, temperatures=(1.0, 2.0))
    top = keep_top_k(logits, coding)
    worst = 0.0
    for temperature in coding.temperatures:
        true = torch.softmax(logits.double() / temperature, dim=1).gather(1, top.ids).sum(dim=1)
        worst = max(worst, float((covered_mass(top, coding, temperature) - true).abs().max()))
    return worst, 1e-3, "mass of the top 16 of 4,000 in fp16 against the truth, at T = 1 and 2"


def sides_agree() -> tuple[float, float, str]:
    """Both distributions sum to 1 over the k tokens and the bucket, also where the top holds all but a trace."""
    p = _logits(16, 40, 33, 3.0).float()
    p[::2, 0] += 60.0
    log_p, log_q = bucket_log_probabilities(p * 0.5, top_k_of(p, 4, 1.0), 1.0)
    error = max(float((one.exp().sum(dim=1) - 1.0).abs().max()) for one in (log_p, log_q))
    return error, 1e-5, "sums of teacher and student over k + 1 outcomes against 1, fp32"


CHECKS: dict[str, Check] = {
    "given numbers": given_numbers,
    "fp64 reference": reference,
    "gradient": finite_differences,
    "T² in the gradient": temperature_in_gradient,
    "temperature": temperature_changes,
    "mask": shifted_mask,
    "prompt and padding": others_do_not_count,
    "-inf filler": filler,
    "k = V": full_top_k,
    "tail bucket": tail_bucket,
    "k = 1": one_token,
    "equal models": equal_models,
    "β": beta_is_continuous,
    "bf16 logits": low_precision,
    "sums": sums_and_chunks,
    "planned temperatures": kept_temperatures,
    "normalisation": sides_agree,
}


def measured(checks: Mapping[str, Check]) -> Iterator[Measured]:
    """Checks in turn, by name."""
    for name, check in checks.items():
        value, limit, detail = check()
        yield Measured(name, float(value), limit, detail)


def run_conformance() -> Iterator[Measured]:
    """Every check in turn."""
    yield from measured(CHECKS)
