"""Our models behind the harness's interface: it asks in text, and gets likelihoods and answers of our own making.

Prompts are tokenised as the harness's `hf` backend does it, so that figures can be held against published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from finetune.data.row_tokens import encode
from finetune.errors import UserError
from finetune.evaluation.generate import Completion
from finetune.evaluation.harness.questions import ChatContext
from finetune.evaluation.likelihood import Likelihood, Request
from finetune.evaluation.raw_prompts import Prompt, encode_raw
from finetune.evaluation.suite_sections import DecodingSection

DEFAULT_WINDOW_TOKENS = 2048  # the harness's own, for models that do not tell their limit
_DEFAULT_ANSWER_TOKENS = 256
# Options of generation that change nothing, or that say in other words what `temperature` says.
_HARMLESS = frozenset({"do_sample", "num_beams", "num_return_sequences", "pad_token_id", "use_cache"})
Write = Callable[[Sequence[Prompt], DecodingSection, Sequence[str]], Iterable[Completion]]


class HarnessModel(TemplateLM):
    """likelihoods: scores token requests. write: completes prompts, named for messages and for the random numbers of
    samples; `Completion.index` is a place in them. After each call `spent` holds (tokens, finish reason) a request."""

    def __init__(
        self,
        tokenizer: Any,
        likelihoods: Callable[[Sequence[Request]], Iterable[Likelihood]],
        write: Write,
        context_tokens: int | None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.likelihoods = likelihoods
        self.write = write
        self.window_tokens = context_tokens or DEFAULT_WINDOW_TOKENS
        self.spent: list[tuple[int, str]] = []

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids as the tokenizer begins a text; with `add_special_tokens` False those of the text alone."""
        return (
            encode(string, self.tokenizer)
            if add_special_tokens is False
            else encode_raw(string, self.tokenizer)[0]
        )

    def written_out(self, context: str) -> str:
        """A conversation through the model's chat template; any other context as it is."""
        if not isinstance(context, ChatContext):
            return context
        if self.tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer has no chat template",
                where="prompt_format: chat",
                fix="set prompt_format: raw",
            )
        return str(
            self.tokenizer.apply_chat_template(
                context.messages,
                tokenize=False,
                add_generation_prompt=not context.continues,
                continue_final_message=context.continues,
            )
        )

    def pair_tokens(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids that are given, and those of the continuation behind them; both hold at least one."""
        text = self.written_out(context)
        if text == "":
            ids = self.tok_encode(continuation, add_special_tokens=False)
            return ([self.prefix_token_id], ids) if ids[0] != self.prefix_token_id else (ids[:1], ids[1:])
        given, scored = self._encode_pair(text, continuation)
        return (given, scored) if scored else (given, self.tok_encode(continuation, add_special_tokens=False))

    def windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """A whole text as windows (given, scored) that fit the context; every token is scored once."""
        rolling = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.window_tokens,
            context_len=1,
        )
        return [make_disjoint_window(window) for window in rolling]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        pairs = [(one.args, *self.pair_tokens(*one.args)) for one in requests]
        return self._loglikelihood_tokens(pairs)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        asked = [
            Request(place, given, scored, f"request {place}")
            for place, (_, given, scored) in enumerate(requests)
        ]
        found = {one.index: one for one in self.likelihoods(asked)}
        ordered = [found[place] for place in range(len(asked))]
        self.spent = [(one.tokens, "stop") for one in ordered]
        return [(one.log_likelihood, one.greedy) for one in ordered]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        windows = [self.windows(one.args[0]) for one in requests]
        scored = iter(self._loglikelihood_tokens([("", *window) for each in windows for window in each]))
        spent = iter(self.spent)
        totals = [sum(next(scored)[0] for _ in each) for each in windows]
        self.spent = [(sum(next(spent)[0] for _ in each), "stop") for each in windows]
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Requests of one kind of decoding together; the answers in the order asked."""
        groups: dict[str, list[int]] = {}
        for place, one in enumerate(requests):
            groups.setdefault(json.dumps(one.args[1], sort_keys=True), []).append(place)
        answers: dict[int, Completion] = {}
        repeats: dict[tuple[Any, int], int] = {}
        for places in groups.values():
            prompts, names = [], []
            for place in places:
                one = requests[place]
                same = (one.doc_id, one.idx)
                repeats[same] = repeats.get(same, -1) + 1
                text = self.written_out(one.args[0])
                prompts.append(Prompt(text, *encode_raw(text, self.tokenizer)))
                names.append(f"{one.task_name}/{one.doc_id}/{repeats[same]}")
            decoding = decoding_of(requests[places[0]].args[1])
            for completion in self.write(prompts, decoding, names):
                answers[places[completion.index]] = completion
        ordered = [answers[place] for place in range(len(requests))]
        self.spent = [(one.output_tokens, one.finish_reason) for one in ordered]
        return [one.text for one in ordered]


def decoding_of(options: dict[str, Any]) -> DecodingSection:
    """A task's `generation_kwargs` as our decoding. Raises UserError for one that we cannot follow."""
    given = dict(normalize_gen_kwargs(options, _DEFAULT_ANSWER_TOKENS))
    stop, tokens = given.pop("until", None) or [], given.pop("max_gen_toks")
    sampled = bool(given.get("do_sample")) and float(given.get("temperature") or 0.0) > 0.0
    temperature, top_p = float(given.pop("temperature", None) or 0.0), given.pop("top_p", None)
    unknown = [
        key for key, value in given.items() if key not in _HARMLESS or (key.startswith("num_") and value != 1)
    ]
    if unknown:
        raise UserError(
            f"the task decodes with '{unknown[0]}: {given[unknown[0]]}', which is not supported",
            where="generation_kwargs",
            fix="take a task that decodes greedily, or samples with temperature and top_p",
        )
    return DecodingSection(
        max_new_tokens=tokens,
        stop=[text for text in ([stop] if isinstance(stop, str) else stop) if text],
        temperature=temperature if sampled else 0.0,
        top_p=float(top_p) if sampled and top_p is not None else 1.0,
    )
