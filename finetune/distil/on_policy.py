"""Learning from one's own answers: some of the micro-batches hold what the student itself says to their prompts.

The teacher then judges the very sequences that the student produces when it is used, mistakes included (Agarwal et al.
2024, GKD, arXiv:2306.13649; with the reverse KL, Gu et al. 2024, MiniLLM, arXiv:2306.08543). Nothing is differentiated
through the sampling.

Which micro-batch it is, and every sample, come from a generator of the seed, the step and the micro-batch's number, so a
run that is killed and continued samples what an uninterrupted one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.data.tokenise import TokenisedRow
from finetune.digest import digest_json
from finetune.distil.trainer import DistilTrainer, rows_with_targets
from finetune.errors import UserError
from finetune.recipe.distil_section import OnPolicySection
from finetune.training.head import IGNORED
from finetune.training.sharding import refuse_spread_weights
from finetune.training.shares import IDLE


class OnPolicyTrainer(DistilTrainer):
    """`DistilTrainer` in which a share of the micro-batches is answered by the student before the step.

    rows: the train rows, by the places that batches name. Only the last answer of a row is replaced; what stands before it
    is the prompt.
    """

    def __init__(
        self, *, rows: Sequence[TokenisedRow], on_policy: OnPolicySection, seed: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if any(row.weights is not None for row in rows):
            raise UserError(
                "rows of this dataset weigh their answers, and an answer that the student samples has no weight",
                where="distil.way",
                fix="leave out the weights, or set distil.way: logits",
            )
        refuse_spread_weights(self, where="distil.way", fix="start it with DDP, or set distil.way: logits")
        self.rows, self.on_policy, self.sampling_seed = rows, on_policy, seed

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step, some of them answered by the student, and the targets in all of them."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        step = self.state.global_step
        answered = [self._perhaps_answered(batch, step, number) for number, batch in enumerate(batches)]
        own = [batch for batch in answered if IDLE not in batch]  # the others are only computed along
        return answered, self._get_num_items_in_batch(own, device)

    def _perhaps_answered(self, batch: dict[str, Any], step: int, number: int) -> dict[str, Any]:
        words = [self.sampling_seed, step, number, self.accelerator.process_index]
        seed = int(digest_json(words)[:12], 16)
        generator = torch.Generator().manual_seed(seed)
        rows = [] if IDLE in batch else rows_with_targets(batch)
        if not rows or float(torch.rand((), generator=generator)) >= self.on_policy.share:
            return batch
        prompts = [prompt_of(self.rows[row]) for row in rows]
        base = self.accelerator.unwrap_model(self.model)
        answers = sample_answers(base, prompts, self.on_policy, self._eos_ids(), seed=seed)
        return self._collated(rows, prompts, answers)

    def _eos_ids(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's, and those that the model itself ends with."""
        tokenizer: Any = self.processing_class
        own = self.model.generation_config.eos_token_id
        found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
        return sorted(token for token in found if token is not None)

    def _collated(
        self, rows: Sequence[int], prompts: Sequence[list[int]], answers: Sequence[list[int]]
    ) -> dict[str, Any]:
        """The batch that the trainer's collator makes of these rows with other answers."""
        ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
        if not self.settings.packing:
            examples: list[dict[str, Any]] = [
                {"input_ids": one, "labels": label, "rows": [row]}
                for one, label, row in zip(ids, labels, rows, strict=True)
            ]
        else:
            examples = [
                {
                    "input_ids": [token for one in ids for token in one],
                    "labels": [label for one in labels for label in one],
                    "rows": list(rows),
                    "seq_lengths": [len(one) for one in ids],
                }
            ]
        found: dict[str, Any] = self.data_collator(examples)
        return found


def prompt_of(row: TokenisedRow) -> list[int]:
    """The tokens before a row's last answer."""
    first, _ = row.spans()[-1]
    return list(row.input_ids[:first])


@torch.no_grad()
def sample_answers(
    model: Any, prompts: Sequence[list[int]], section: OnPolicySection, eos_ids: Sequence[int], *, seed: int
) -> list[list[int]]:
    """One sampled answer to every prompt, its end-of-turn token included where it came in time.

    The global generators are left as they were. The model's mode and cache setting come back as they were.
    """
    longest = max(map(len, prompts))
    device = next(model.parameters()).device
    ids = torch.full((len(prompts), longest), eos_ids[0], dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, prompt in enumerate(prompts):
        ids[place, longest - len(prompt) :] = torch.tensor(prompt)
        mask[place, longest - len(prompt) :] = 1
    was_training = model.training
    model.eval()
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        found: Tensor = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            do_sample=True,
            temperature=section.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=section.max_new_tokens,
            eos_token_id=list(eos_ids),
            pad_token_id=eos_ids[0],
            use_cache=True,
        )
    model.train(was_training)
    return [_until_end(answer, set(eos_ids)) for answer in found[:, longest:].tolist()]


def _until_end(answer: list[int], eos_ids: set[int]) -> list[int]:
    """Up to and with the first token that ends it; what follows is padding."""
    end = next((place for place, token in enumerate(answer) if token in eos_ids), len(answer) - 1)
    return answer[: end + 1]
