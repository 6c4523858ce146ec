"""Answers to fixed prompts while the training runs: what the curve cannot show. Nothing of the training is changed by them.

With each answer comes how far the model has moved from its base there: KL(model || base) in nats a token, over the whole
vocabulary at every token of the answer, where the adapter can be switched off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.data.pair_tokens import AnsweredPrompt
from finetune.data.tokenise import TokenisedRow, generation_stop_ids, prompt_ids
from finetune.model.adapters import base_only
from finetune.recipe.samples_section import SamplesSection
from finetune.telemetry.events import EventLog
from finetune.training.sharding import refuse_spread_weights

_TEXT_PROMPT_TOKENS = 32  # of a row of running text, which has no prompt of its own


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt as the model is given it. `name` is a row's id, or the number of a prompt of the recipe."""

    name: str
    ids: list[int]
    reference: list[int]


def sample_prompts(
    section: SamplesSection, rows: Sequence[TokenisedRow | AnsweredPrompt], tokenizer: Any
) -> list[SamplePrompt]:
    """The prompts of the recipe, or those of the first different rows that have one."""
    if isinstance(section.prompts, list):
        asked = [[{"role": "user", "content": text}] for text in section.prompts]
        return [
            SamplePrompt(f"prompt {number}", prompt_ids(messages, tokenizer)[0], [])
            for number, messages in enumerate(asked, start=1)
        ]
    chosen: dict[tuple[int, ...], SamplePrompt] = {}
    for row in rows:
        prompt = _prompt_of(row)
        if prompt is not None:
            chosen.setdefault(tuple(prompt.ids), prompt)
        if len(chosen) == section.prompts:
            break
    return list(chosen.values())


def _prompt_of(row: TokenisedRow | AnsweredPrompt) -> SamplePrompt | None:
    if isinstance(row, AnsweredPrompt):
        return SamplePrompt(row.row_id, row.prompt, row.answers[0].ids if row.wanted is not False else [])
    spans = row.spans()
    if not spans:
        return None
    first, last = spans[-1]
    if first > 1:
        return SamplePrompt(row.row_id, row.input_ids[:first], row.input_ids[first:last])
    cut = min(_TEXT_PROMPT_TOKENS, len(row.input_ids) // 2)
    return SamplePrompt(row.row_id, row.input_ids[:cut], row.input_ids[cut:last]) if cut else None


class SampleWriter(TrainerCallback):
    """Writes a `sample` event a prompt every so many steps. Add it after the telemetry callback.

    `resume_clock` is called after each round, so that the pause is not taken for a slow step.
    """

    def __init__(
        self,
        trainer: Any,
        section: SamplesSection,
        prompts: Sequence[SamplePrompt],
        log: EventLog,
        resume_clock: Callable[[], None],
    ) -> None:
        refuse_spread_weights(
            trainer,
            where="train.samples",
            fix="leave out train.samples; the evaluation after the training writes answers",
        )
        self._trainer, self._section, self._prompts = trainer, section, prompts
        self._log, self._resume_clock = log, resume_clock
        self._tokenizer = trainer.processing_class
        self._last_step = -1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._last_step = -1  # a training that goes back a few steps answers again
        if state.global_step == 0:
            self._write(0)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self._section.every_steps == 0:
            self._write(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step > 0:
            self._write(state.global_step)

    def _write(self, step: int) -> None:
        if self._log.path is None or step == self._last_step:
            return
        self._last_step = step
        for index, prompt in enumerate(self._prompts):
            output, kl = self._answer(prompt)
            self._log.write(
                "sample",
                step=step,
                index=index,
                name=prompt.name,
                prompt=self._tokenizer.decode(prompt.ids),
                reference=self._tokenizer.decode(prompt.reference, skip_special_tokens=True) or None,
                output=self._tokenizer.decode(output, skip_special_tokens=True),
                output_tokens=len(output),
                **({} if kl is None else {"kl_to_base": kl}),
            )
        self._resume_clock()

    def _answer(self, prompt: SamplePrompt) -> tuple[list[int], float | None]:
        """The greedy answer and its KL to the base; mode, random numbers and weights are as before afterwards."""
        trainer = self._trainer
        model = trainer.model
        modes = [(module, module.training) for module in model.modules()]
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        model.eval()
        try:
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=devices),
                trainer.averaged_weights(),
                trainer.accelerator.autocast(),
            ):
                ids = torch.tensor([prompt.ids], device=trainer.args.device)
                whole = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=self._greedy(),
                    use_cache=True,
                )
                return whole[0, ids.shape[1] :].tolist(), kl_to_base(model, whole, ids.shape[1])
        finally:
            for module, was_training in modes:
                module.training = was_training

    def _greedy(self) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=self._section.max_new_tokens,
            do_sample=False,
            eos_token_id=generation_stop_ids(self._tokenizer),
            pad_token_id=self._tokenizer.pad_token_id,
        )


def kl_to_base(model: Any, ids: Tensor, n_prompt: int) -> float | None:
    """Mean over the tokens of `ids` [1, T] behind the prompt of KL(model || base), in nats; None without an adapter.

    Computed in fp32 over the whole vocabulary. With virtual tokens the base is the model without them.
    """
    if not hasattr(model, "disable_adapter") or ids.shape[1] <= n_prompt:
        return None
    own = _answer_logprobs(model, ids, n_prompt)
    with _switched_off(model):
        base = _answer_logprobs(model, ids, n_prompt)
    return float((own.exp() * (own - base)).sum(-1).mean().clamp(min=0.0))


def _answer_logprobs(model: Any, ids: Tensor, n_prompt: int) -> Tensor:
    """Log-probabilities [answer tokens, vocabulary], fp32; virtual tokens stand before the others and are skipped."""
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    n_answer = ids.shape[1] - n_prompt
    found: Tensor = logits[-n_answer - 1 : -1].float().log_softmax(-1)
    return found


@contextlib.contextmanager
def _switched_off(model: Any) -> Any:
    """Without the adapter. PEFT sets which parameters have a gradient when it comes back; they get what they had."""
    had = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with base_only(model):
            yield
    finally:
        for parameter, needs in had:
            parameter.requires_grad_(needs)
