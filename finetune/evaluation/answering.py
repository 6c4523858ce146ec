"""Answers of one model to the prompts of one suite, on whichever backend the model lives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.data.tokenise import generation_stop_ids
from finetune.errors import UserError
from finetune.evaluation.answer_keys import Ask
from finetune.evaluation.context_window import refuse_too_long
from finetune.evaluation.generate import Completion, common_prefix, generate
from finetune.evaluation.items import Item
from finetune.evaluation.likelihood import log_likelihoods
from finetune.evaluation.measure import Likelihoods, measure_choices, measure_texts
from finetune.evaluation.prompts import Arm, Prompt
from finetune.evaluation.rewards import answer_scores, check_reward_suite
from finetune.evaluation.sampling import Picker, Sampler, greedy, stream_name
from finetune.evaluation.server import ServerModel, server_answers
from finetune.evaluation.server_likelihood import server_likelihoods
from finetune.evaluation.stopping import stop_rule
from finetune.evaluation.suite import DecodingSection, Suite
from finetune.model.reward import is_reward_model

if TYPE_CHECKING:
    from finetune.evaluation.harness.model import HarnessModel


@dataclass(frozen=True)
class Answering:
    """A model with a suite's questions. `model`: a transformers model, one wrapped by PEFT, or a `ServerModel`.

    batch_size: rows decoded, or requests sent, at a time. base_model: the untuned model, where KL is measured against it
    and `model` carries no adapter that could be switched off.
    """

    model: Any
    tokenizer: Any
    suite: Suite
    items: Sequence[Item]
    prompts: Sequence[Prompt]
    arm: Arm
    batch_size: int
    base_model: Any = None

    @property
    def on_server(self) -> bool:
        return isinstance(self.model, ServerModel)

    def check(self) -> None:
        """Refuse, before the work, items that do not fit the context and measurements that this model cannot give."""
        if self._kl_needs_base and (self.on_server or not self._has_base):
            raise UserError(
                "KL to the base needs the base beside the tuned model"
                + (
                    ", which a server does not show"
                    if self.on_server
                    else ": this one carries no adapter that could be switched off"
                ),
                where=f"suite {self.suite.name}",
                fix="leave kl_per_token out of the suite's scorers"
                + (
                    ", or evaluate this suite without a server"
                    if self.on_server
                    else " for fully tuned models"
                ),
            )
        if not self.on_server and is_reward_model(self.model):
            check_reward_suite(self.suite)
        refuse_too_long(self.suite, self.items, self.prompts, self.context_tokens, self.arm, self.tokenizer)

    def answers(self, todo: Sequence[Ask]) -> Iterator[Completion]:
        """The completions of `todo`; `Completion.index` is a place in it."""
        prompts = [self.prompts[ask.place] for ask in todo]
        items = [self.items[ask.place] for ask in todo]
        if self.suite.task == "lm_eval":
            from finetune.evaluation.harness.answers import answer_questions

            yield from answer_questions(self._harness_model(), items)
        elif self.suite.task == "choice":
            yield from measure_choices(self._likelihoods(), self.tokenizer, prompts, items, self.suite)
        elif self.suite.task == "text":
            kl = self.suite.measures_kl
            yield from measure_texts(
                self._likelihoods(), prompts, items, every_prompt=self.prompts, measures_kl=kl
            )
        else:
            # The prefix is shared by all items, not only those left: a continued run repeats the same arithmetic.
            yield from self._written(
                prompts,
                self.suite.decoding,
                streams=self._streams(todo),
                names=[item.id for item in items],
                shared_prefix=common_prefix([prompt.ids for prompt in self.prompts]),
            )

    @property
    def _kl_needs_base(self) -> bool:
        return self.suite.measures_kl and self.arm == "tuned"

    @property
    def _has_base(self) -> bool:
        return self.base_model is not None or hasattr(self.model, "peft_config")

    def _likelihoods(self) -> Likelihoods:
        if self.on_server:
            return partial(server_likelihoods, self.model, concurrency=self.batch_size)
        if is_reward_model(self.model):
            return partial(answer_scores, self.model, tokenizer=self.tokenizer)
        return partial(
            log_likelihoods, self.model, kl_to_base=self._kl_needs_base, base_model=self.base_model
        )

    def _streams(self, todo: Sequence[Ask]) -> list[str]:
        seed = self.suite.decoding.seed
        return [stream_name(seed, self.items[ask.place].id, ask.repeat) for ask in todo]

    def _written(
        self,
        prompts: Sequence[Prompt],
        decoding: DecodingSection,
        *,
        streams: Sequence[str],
        names: Sequence[str],
        shared_prefix: int | None = None,
    ) -> Iterator[Completion]:
        """Answers in writing. streams: of random numbers, for sampling; names: what is asked, for messages."""
        if self.on_server:
            yield from server_answers(
                self.model, prompts, decoding, streams=streams, names=names, concurrency=self.batch_size
            )
            return
        rule = stop_rule(
            self.tokenizer,
            max_new_tokens=decoding.max_new_tokens,
            stop_strings=decoding.stop,
            stop_ids=stop_ids(self.tokenizer, self.model, chat=self.suite.prompt_format == "chat"),
        )
        pick: Picker = greedy
        if decoding.is_sampled:
            pick = Sampler(streams, temperature=decoding.temperature, top_p=decoding.top_p)
        ids = [prompt.ids for prompt in prompts]
        yield from generate(
            self.model, ids, rule, batch_size=self.batch_size, shared_prefix=shared_prefix, pick=pick
        )

    def _harness_model(self) -> HarnessModel:
        from finetune.evaluation.harness.model import HarnessModel

        def write(
            prompts: Sequence[Prompt], decoding: DecodingSection, names: Sequence[str]
        ) -> Iterator[Completion]:
            streams = [stream_name(decoding.seed, name, 0) for name in names]
            return self._written(prompts, decoding, streams=streams, names=names)

        return HarnessModel(self.tokenizer, self._likelihoods(), write, self.context_tokens)

    @property
    def context_tokens(self) -> int | None:
        """The longest input that the model was made for; None where it is not known, as on a server."""
        if self.on_server:
            return None
        config = inner_model(self.model).config.get_text_config()
        tokens: int | None = getattr(config, "max_position_embeddings", None)
        return tokens


def stop_ids(tokenizer: Any, model: Any, *, chat: bool = True) -> set[int]:
    """Every id that ends an answer: the tokenizer's and the model's own, and the end of turn of a chat template."""
    own = getattr(getattr(inner_model(model), "generation_config", None), "eos_token_id", None)
    ids = set(generation_stop_ids(tokenizer)) if chat else {tokenizer.eos_token_id} - {None}
    return ids | ({own} if isinstance(own, int) else set(own or ()))


def inner_model(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") else model
