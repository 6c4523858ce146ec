"""Where the answers are in a rendered conversation, by the model's own chat template, and proof that it is so.

Legend: `full` is the whole conversation as rendered; a span (start, end) counts characters of `full`; an answer's span
begins where the generation prompt ends and stops after its end-of-turn token, so it is exactly what the model must say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import UserError

Messages = Sequence[Mapping[str, Any]]
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTION = {"role": "user", "content": "q"}
_PROBE = "ProbeAnswer"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_REWRITES = (
    "training on it would teach from contexts that never occur when the model is used; some templates strip the "
    "reasoning of earlier turns, others write the last turn differently"
)


@dataclass(frozen=True, slots=True)
class Closing:
    """How the template ends an assistant turn: `text` in full, `end_of_turn` the token in it, `lead` what comes before."""

    text: str
    lead: str
    end_of_turn: str


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """The text of a conversation up to its last answer, and the spans of its trained answers with their weights."""

    text: str
    spans: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]


def render(
    messages: Messages, tokenizer: Any, *, tools: Sequence[Any] = (), generation_prompt: bool = False
) -> str:
    """The conversation as text, by the tokenizer's own chat template.

    Raises UserError when there is no template, or when the template refuses the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the tokenizer has no chat template, so conversations cannot be rendered",
            where="model.id",
            fix="take the instruct variant of the model, or set tokenizer.chat_template and save the tokenizer",
        )
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [dict(turn) for turn in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise UserError(
            f"the chat template refuses the conversation: {error}",
            why=f"its roles are {', '.join(str(turn['role']) for turn in messages)}",
            fix="mend the row, or take a model whose template allows such turns",
        ) from error
    return str(text)


def closing_of(tokenizer: Any) -> Closing:
    """How the chat template ends an assistant turn, found by rendering one.

    Raises UserError as `ending_of` does, or when the template has no generation prompt although answers have a header
    (the model could not be asked to answer). Where the question itself ends with what asks, as "[/INST]" does, no generation
    prompt is needed.
    """
    head, closing = ending_of(tokenizer)
    require_generation_prompt(tokenizer, head)
    return closing


def ending_of(tokenizer: Any) -> tuple[str, Closing]:
    """What the chat template writes before an answer, and how it ends it.

    Raises UserError when it ends with no special token (a model trained so would never learn to stop), or does not write
    the answer as it is.
    """
    text = render([_QUESTION, {"role": "assistant", "content": _PROBE}], tokenizer)
    head, found, tail = text.rpartition(_PROBE)
    if not found:
        raise rewritten_answer("chat template")
    end_of_turn = first_special(tail, tokenizer)
    if end_of_turn is None:
        raise no_end_of_turn()
    return head, Closing(tail, tail[: tail.index(end_of_turn)], end_of_turn)


def require_generation_prompt(tokenizer: Any, head: str) -> None:
    """Raise UserError where nothing asks the model to answer; `head` is what stands before an answer to a question."""
    asked = render([_QUESTION], tokenizer)
    has_header = not head.startswith(asked) or bool(head[len(asked) :].strip())
    if has_header and asked == render([_QUESTION], tokenizer, generation_prompt=True):
        raise UserError(
            "the chat template has no generation prompt",
            where="chat template",
            why="with or without add_generation_prompt it renders the same, so the model cannot be asked to answer",
            fix="add {% if add_generation_prompt %} with the assistant's header to the template",
        )


def locate_answers(
    messages: Messages,
    tokenizer: Any,
    closing: Closing,
    *,
    tools: Sequence[Any] = (),
    last_only: bool = False,
) -> RenderedRow:
    """Render a conversation and find its trained answers; every span is proven against the full render.

    Turns after the last answer carry nothing to learn and are left out. Answers with `train: false` or `weight: 0`,
    and one that opens the conversation with nothing to answer, get no span. Raises UserError, by name, when the
    template gives an answer no provable place.
    """
    answers = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    if not answers:
        raise UserError("the row has no assistant turn", fix="give every row an answer to learn from")
    messages = messages[: answers[-1] + 1]
    full = render(messages, tokenizer, tools=tools)
    if tools and full == render(messages, tokenizer):
        raise UserError(
            "the chat template leaves out the tools",
            where="chat template",
            why="the row defines tools, and the model would never be told of them",
            fix="take a template that writes tools, or put their definitions into the system turn",
        )
    blocks = _generation_blocks(messages, tokenizer, tools, full, len(answers))
    spans: list[tuple[int, int]] = []
    weights: list[float] = []
    for number, index in enumerate(answers):
        if (last_only and index != answers[-1]) or index == 0 or not is_trained_answer(messages[index]):
            continue
        prompt = render(messages[:index], tokenizer, tools=tools, generation_prompt=True)
        if not full.startswith(prompt):
            raise rewritten_history(
                index,
                "the prompt of this answer is not how the whole conversation begins",
                is_last=index == answers[-1],
            )
        if blocks is None:
            end = _rendered_end(messages[: index + 1], tokenizer, tools, closing, full, prompt)
            start = len(prompt)
        else:
            start, end = _block_edges(full, blocks[number], len(prompt), closing)
        require_as_written(messages[index], full[start:end], index)
        spans.append((start, end))
        weights.append(weight_of(messages[index]))
    return RenderedRow(full, tuple(spans), tuple(weights))


def is_trained_answer(turn: Mapping[str, Any]) -> bool:
    """Whether a turn is an answer that is to be learnt: not marked `train: false` or `weight: 0`."""
    return turn["role"] == "assistant" and turn.get("train") is not False and turn.get("weight") != 0


def weight_of(turn: Mapping[str, Any]) -> float:
    """How much the loss on a trained answer counts: its `weight`, 1 where it says none."""
    weight = turn.get("weight")
    return 1.0 if weight is None else float(weight)


def _rendered_end(
    through: Messages, tokenizer: Any, tools: Sequence[Any], closing: Closing, full: str, prompt: str
) -> int:
    """End of the last answer of `through` in `full`, from rendering the conversation up to it."""
    index = len(through) - 1
    said = render(through, tokenizer, tools=tools)[len(prompt) :]
    if said.endswith(closing.text):
        said = said.removesuffix(closing.text) + closing.lead + closing.end_of_turn
    else:  # e.g. a tool call, which some templates end with a token of its own
        said = said.rstrip()
        if not any(said.endswith(token) for token in _special_tokens(tokenizer)):
            raise UserError(
                "the chat template ends this assistant turn with no end-of-turn token",
                where=f"turn {index}",
                fix="add the end-of-turn token to the template after the assistant's content",
            )
    if not full.startswith(prompt + said):
        raise rewritten_history(
            index, "the answer is rendered differently in the whole conversation", is_last=False
        )
    return len(prompt) + len(said)


def require_as_written(turn: Mapping[str, Any], said: str, index: int) -> None:
    """A template that leaves out a part of the answer, e.g. its reasoning, would train something else in silence."""
    content = turn.get("content")
    if isinstance(content, str) and content not in said and content.strip() not in said:
        raise rewritten_answer(f"turn {index}")
    for key in _REASONING_KEYS:
        reasoning = turn.get(key)
        if isinstance(reasoning, str) and reasoning.strip() not in said:
            raise UserError(
                f"the chat template leaves out the reasoning under '{key}'",
                where=f"turn {index}",
                why="the model would learn to answer without it, and nothing would say so",
                fix="rename the key to one that the template reads (often reasoning_content), write the reasoning into the "
                "content, or take it out of the rows",
            )
    for call in turn.get("tool_calls") or ():
        name = (call.get("function") or call).get("name")
        if isinstance(name, str) and name not in said:
            raise UserError(
                f"the chat template leaves out the tool call '{name}'",
                where=f"turn {index}",
                why="the model would learn to say nothing where it should call the tool",
                fix="take a template that writes tool_calls, or write the call into the turn's content",
            )


def _generation_blocks(
    messages: Messages, tokenizer: Any, tools: Sequence[Any], full: str, n_answers: int
) -> list[tuple[int, int]] | None:
    """Character spans of the template's {% generation %} blocks, one an answer; None when it has no such block."""
    template = tokenizer.get_chat_template(None, list(tools) or None)
    if not _GENERATION_BLOCK.search(template):
        return None
    encoded = tokenizer.apply_chat_template(
        [dict(turn) for turn in messages],
        tools=list(tools) or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    mask, offsets = encoded["assistant_masks"], encoded["offset_mapping"]
    spans: list[tuple[int, int]] = []
    for position, inside in enumerate(mask):
        if inside and position and mask[position - 1]:
            spans[-1] = (spans[-1][0], offsets[position][1])
        elif inside:
            spans.append(tuple(offsets[position]))
    covered = sum(end - start for start, end in spans)
    if len(spans) != n_answers or covered >= len(full):
        raise UserError(
            f"the template's generation blocks mark {len(spans)} answers of {n_answers}",
            where="chat template",
            why="a mask of nothing would train nothing; a mask of everything would train the prompt",
            fix="put {% generation %} … {% endgeneration %} around each assistant turn, and around nothing else",
        )
    return spans


def _block_edges(full: str, block: tuple[int, int], prompt_end: int, closing: Closing) -> tuple[int, int]:
    """A generation block, its start moved to the end of the prompt when only white space lies between."""
    start, end = block
    if start < prompt_end or not full[prompt_end:start].strip():
        start = prompt_end
    return start, _end_of_turn(full, end, closing)


def _end_of_turn(full: str, end: int, closing: Closing) -> int:
    """Move the end of a generation block to just after the end-of-turn token, whether the block holds it or not."""
    inside = full[:end].rstrip()
    if inside.endswith(closing.end_of_turn):
        return len(inside)
    ending = closing.lead + closing.end_of_turn
    if full.startswith(ending, end):
        return end + len(ending)
    raise UserError(
        f"no end-of-turn token '{closing.end_of_turn}' at the end of a generation block",
        where="chat template",
        why="a model trained with it would never learn to stop",
        fix="end the assistant's turn with the same token everywhere in the template",
    )


def rewritten_answer(where: str) -> UserError:
    """The template writes another text than the answer's."""
    return UserError(
        "the chat template rewrites the answer: it is not rendered as it is written",
        where=where,
        why="a part of it, often the reasoning, would be left out of training without a word",
        fix="put reasoning into the key the template reads (reasoning_content), or take a template that keeps it; where it "
        "cuts earlier answers alone, set data.train_on: each or last",
    )


def no_end_of_turn() -> UserError:
    """The template ends an answer with nothing that could stop the generation."""
    return UserError(
        "the chat template ends the assistant's turn with no end-of-turn token",
        where="chat template",
        why="a model trained with it would never learn to stop",
        fix="add the end-of-turn token to the template after the assistant's content",
    )


def rewritten_history(index: int, what: str, *, is_last: bool) -> UserError:
    """The template writes what stands before the answer of turn `index` in another way once it is given. Answers that others
    follow can be learnt as they are given; the last one is so already."""
    elsewhere = "mend the template: what stands before an answer, the generation prompt included, must not depend on the answer"
    return UserError(
        f"the chat template rewrites history: {what}",
        where=f"turn {index}",
        why=_REWRITES,
        fix=elsewhere if is_last else "set data.train_on to each (one row an answer) or to last",
    )


def control_tokens(tokenizer: Any, closing: Closing) -> frozenset[str]:
    """BOS, EOS, the end-of-turn token and all others that the tokenizer marks as special, such as headers of turns. Tokens
    that are merely added, such as those around thoughts and tool calls, may well stand in texts."""
    marked = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset({closing.end_of_turn, *tokenizer.all_special_tokens, *marked})


def holds_control_tokens(turns: Messages, control: frozenset[str]) -> bool:
    """Whether the text of a turn holds one of `control`: the model reads it as the end or the start of a turn, not as
    text."""
    texts = [content for turn in turns if isinstance(content := turn.get("content"), str)]
    return any(token in text for text in texts for token in control)


def _special_tokens(tokenizer: Any) -> list[str]:
    """Every token that tokenizing never splits or merges, longest first."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    return sorted(added | set(tokenizer.all_special_tokens), key=lambda token: (-len(token), token))


def first_special(text: str, tokenizer: Any) -> str | None:
    """The special token that stands first in `text`."""
    found = [(text.find(token), -len(token), token) for token in _special_tokens(tokenizer) if token in text]
    return min(found)[2] if found else None
