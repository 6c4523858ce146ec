"""Is the merged model the model that was evaluated? Base plus adapter and the merged files answer the same fixed prompts.

Logits [prompts, positions, vocabulary] are compared at every kept position of equally long prompts (no padding), the
prompts being continued greedily by the reference. A merged model continues them identically exactly when, fed with the
reference's continuation, its argmax agrees at every continued position; so one forward pass tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finetune.errors import UserError

FP32_TOLERANCE = 1e-4
"""Largest logit difference of an fp32 merge. Sums in another order give about 1e-6 on small models."""
NOISE_FACTOR = 3.0
"""A bf16 merge may differ, in mean KL, by this many times what bf16 itself does to the adapter model."""
N_PROMPT_TOKENS = 32
N_NEW_TOKENS = 8
_LOGIT_BYTES = 1 << 25
"""Budget for one set of fp32 logits; larger vocabularies keep fewer positions."""

PROMPTS = (
    "Turn on the lamp in the kitchen, set the bedroom to twenty-one degrees, and tell me whether the garage door is "
    "still open before we leave for the weekend.",
    'def moving_average(values: list[float], window: int) -> list[float]:\n    """Mean of each window of consecutive '
    'values; shorter at the start."""\n    result = []\n    for index in range(len(values)):\n',
    '{"intent": "HassLightSet", "area": "living room", "brightness": 40, "items": [1, 2, 3], "note": "après-midi, '
    '20 °C", "done": false, "next":',
    "The committee met on 14 March 2019 and agreed, by seven votes to two, that the bridge should be repaired rather "
    "than replaced, because the estimate of 3,450,000 euros",
    "Quan torno a casa al vespre, m'agrada que el menjador estigui calent i que els llums de l'entrada s'encenguin sols; "
    "després escolto una mica de música",
    "Question: A train leaves at 9:40 and arrives at 13:05 after two stops of ten minutes each. How long was it moving? "
    "Answer: let us count the minutes",
)


@dataclass(frozen=True, slots=True)
class Probe:
    """What is asked. `prompts` [n, length] token ids; `keep` positions of the full sequence whose logits are compared."""

    prompts: torch.Tensor
    n_new: int = N_NEW_TOKENS

    @property
    def length(self) -> int:
        return self.prompts.shape[1] + self.n_new - 1

    def keep(self, n_vocabulary: int) -> torch.Tensor:
        """Positions [k]: all, or as many of the last ones as the memory for logits allows."""
        affordable = _LOGIT_BYTES // (4 * n_vocabulary * self.prompts.shape[0])
        return torch.arange(max(0, self.length - max(affordable, self.n_new)), self.length)


@dataclass(frozen=True, slots=True)
class Distance:
    """Two sets of logits compared: mean KL(reference ‖ other) in nats, and the largest absolute logit difference."""

    mean_kl: float
    max_difference: float


def make_probe(tokenizer: Any | None, n_vocabulary: int, prompts: Sequence[str] = PROMPTS) -> Probe:
    """Fixed prompts, every second one as a chat turn when there is a template, cut to one length in tokens.

    Ids without an embedding row are left out. Without a tokenizer the prompts are token ids from a seeded generator.
    """
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        return Probe(torch.randint(0, n_vocabulary, (len(prompts), N_PROMPT_TOKENS), generator=generator))
    rows = []
    for number, prompt in enumerate(prompts):
        if tokenizer.chat_template and number % 2 == 0:
            ids = _chat_ids(tokenizer, prompt)
        else:
            ids = tokenizer(prompt, add_special_tokens=True)["input_ids"]
        ids = [index for index in ids if index < n_vocabulary]
        # Cut at the front: a tuned model differs most where the answer begins.
        repeated = ids * math.ceil(N_PROMPT_TOKENS / max(len(ids), 1))
        rows.append(ids[-N_PROMPT_TOKENS:] if len(ids) >= N_PROMPT_TOKENS else repeated[:N_PROMPT_TOKENS])
    return Probe(torch.tensor(rows))


def _chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def continue_greedily(model: Any, probe: Probe) -> torch.Tensor:
    """Prompts plus `n_new` tokens [n, length + n_new], each the argmax of `model`; end tokens are tokens like others."""
    sequence = probe.prompts
    step, cache = sequence, None
    for _ in range(probe.n_new):
        output = model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
        step, cache = output.logits[:, -1:].argmax(dim=-1), output.cache
        sequence = torch.cat([sequence, step], dim=1)
    return sequence


@torch.no_grad()
def logits_at(model: Any, sequence: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Logits [n, k, vocabulary] in fp32 at the positions `keep`, without a cache."""
    logits: torch.Tensor = model(input_ids=sequence[:, :-1], use_cache=False, logits_to_keep=keep).logits
    return logits.float()


def distance(reference: torch.Tensor, other: torch.Tensor) -> Distance:
    """KL in fp64: in single precision a KL of 1e-7 is lost in the sum. Surplus vocabulary rows of either are left out."""
    n_shared = min(reference.shape[-1], other.shape[-1])
    total, n_positions, largest = 0.0, 0, 0.0
    for left, right in zip(reference, other, strict=True):
        for one, two in zip(left.split(8), right.split(8), strict=True):
            one, two = one[:, :n_shared], two[:, :n_shared]
            largest = max(largest, float((one - two).abs().max()))
            log_p, log_q = one.double().log_softmax(-1), two.double().log_softmax(-1)
            total += float((log_p.exp() * (log_p - log_q)).sum())
            n_positions += one.shape[0]
    return Distance(max(total / n_positions, 0.0), largest)


def greedy_agreement(
    reference: torch.Tensor, other: torch.Tensor, n_new: int, tolerance: float
) -> tuple[int, int]:
    """(identical, all) of the continued positions. A tie of the reference within `tolerance` counts as identical."""
    one, two = reference[:, -n_new:], other[:, -n_new:]
    choice, chosen = two.argmax(-1, keepdim=True), one.argmax(-1, keepdim=True)
    same = (one.gather(-1, chosen) - one.gather(-1, choice)) <= tolerance
    return int(same.sum()), same.numel()


def check_gate(
    *, dtype: str, merged: Distance, noise_kl: float | None, identical: int, n_greedy: int, hint: str = ""
) -> None:
    """Raise UserError when the merged model is not the adapter model within the tolerance of its type."""
    if not math.isfinite(merged.max_difference) or not math.isfinite(merged.mean_kl):
        what = "the merged model's logits hold NaN or infinity"
    elif dtype == "fp32" and merged.max_difference > FP32_TOLERANCE:
        what = f"the largest logit difference is {merged.max_difference:.2e}, above {FP32_TOLERANCE:.0e}"
    elif dtype == "fp32" and identical < n_greedy:
        what = f"only {identical} of {n_greedy} greedy tokens are identical"
    elif noise_kl is not None and merged.mean_kl > NOISE_FACTOR * noise_kl + 1e-12:
        what = f"the mean KL is {merged.mean_kl:.2e}, above {NOISE_FACTOR:g} times the {noise_kl:.2e} that bf16 itself causes"
    else:
        return
    raise UserError(
        f"the merged model does not answer like base and adapter: {what}",
        why="nothing was kept, because what was evaluated and what would be served are not the same model",
        fix=hint or "merge with --dtype fp32, and check that base and adapter belong together",
    )
