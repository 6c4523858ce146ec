"""The documents of an lm-eval task as items: each with the requests that the task makes of a model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.evaluation.harness.definition import TaskDefinition
from finetune.evaluation.item_source import ItemsSection
from finetune.evaluation.items import Item
from finetune.evaluation.scorers.code import ALLOW_CODE

# The harness's own seeds, so that the same examples are shown as in published figures.
_SEED, _FEWSHOT_SEED = 0, 1234


class ChatContext(str):
    """A context that is not written out yet: the conversation, for the chat template of the model under test.

    Tasks pass a context on as it is, so that this stands for it until the tokenizer is known. Its text is the JSON of
    the conversation, which makes it part of the item's digest. `continues`: the last turn is one that the answer goes
    on with, not a whole one.
    """

    messages: list[dict[str, str]]
    continues: bool

    @classmethod
    def of(cls, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> ChatContext:
        self = cls(json.dumps([messages, not add_generation_prompt], ensure_ascii=False))
        self.messages, self.continues = messages, not add_generation_prompt
        return self


@dataclass(frozen=True)
class Question:
    """One document of a task: what the task asks of a model (`instances`), and what scores the answers (`task`)."""

    task: Any
    doc: Any
    instances: tuple[Any, ...]

    @property
    def kind(self) -> str:
        """loglikelihood, loglikelihood_rolling or generate_until."""
        return str(self.instances[0].request_type)

    @property
    def is_written(self) -> bool:
        """Whether the answer is one text."""
        return self.kind == "generate_until" and len(self.instances) == 1 and self.instances[0].repeats == 1

    def definition(self) -> list[Any]:
        """What decides the answer, as JSON."""
        return [[one.request_type, list(one.args), one.repeats] for one in self.instances]


def task_items(
    definition: TaskDefinition, section: ItemsSection, *, chat: bool, max_items: int | None
) -> list[Item]:
    """The items of a task or of every task in a group, in order; an item's id is the number of its document.

    chat: prompts are conversations for the model's chat template. Raises UserError when the data of the task cannot be
    read, or the task is of a kind that is not supported.
    """
    items: list[Item] = []
    several = len(definition.leaves) > 1
    loaded = _load(definition)
    for name in definition.leaves:
        left = None if max_items is None else max_items - len(items)
        if left is not None and left <= 0:
            break
        task = loaded[name]
        _build(task, section, chat=chat, limit=left)
        items += [_item(name, question, several) for question in _questions(task)]
    return items


def _load(definition: TaskDefinition) -> dict[str, Any]:
    with _quiet(), _seeded():
        try:
            tasks = dict(definition.manager.load([definition.name])["tasks"])
        except Exception as error:  # whatever a task's own code, or a reader of data, raises
            raise _unreadable(definition.name, error) from error
    for name in definition.leaves:
        task = tasks[name]
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"the task {name} asks about images or sound", where=f"lm_eval:{definition.name}")
        if getattr(task, "UNSAFE_CODE", False) and os.environ.get(ALLOW_CODE) != "1":
            raise UserError(
                f"the task {name} runs code that the model wrote, which is off",
                where=f"lm_eval:{definition.name}",
                fix=f"set {ALLOW_CODE}=1 and HF_ALLOW_CODE_EVAL=1, in a container if you do not trust the model",
            )
    return tasks


def _build(task: Any, section: ItemsSection, *, chat: bool, limit: int | None) -> None:
    """Make the task's requests for its first `limit` documents, with examples drawn as the harness draws them."""
    if section.num_fewshot is not None:
        task.set_config(key="num_fewshot", value=section.num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    with _quiet(), _seeded():
        try:
            task.build_all_requests(
                limit=limit,
                rank=0,
                world_size=1,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
                chat_template=ChatContext.of if chat else None,
            )
        except Exception as error:
            raise _unreadable(task.task_name, error) from error


def _questions(task: Any) -> Iterator[Question]:
    grouped: dict[int, list[Any]] = {}
    for instance in task.instances:
        grouped.setdefault(instance.doc_id, []).append(instance)
    for instances in grouped.values():
        ordered = tuple(sorted(instances, key=lambda one: one.idx))
        yield Question(task, ordered[0].doc, ordered)


def _item(task_name: str, question: Question, several: bool) -> Item:
    first = question.instances[0]
    name = f"{task_name}/{first.doc_id}" if several else str(first.doc_id)
    asked = "" if question.kind == "loglikelihood_rolling" else str(first.args[0])
    return Item(
        id=name,
        messages=({"role": "user", "content": asked},),
        reference=_reference(question),
        cluster=name,
        source=task_name,
        tags={"task": task_name},
        harness_question=question,
    )


def _reference(question: Question) -> str:
    """The right answer as text, for those who read records; the task itself knows how it is scored."""
    task = question.task
    target = task.doc_to_target(question.doc)
    if isinstance(target, int | np.integer) and task.get_config("doc_to_choice") is not None:
        choices = task.doc_to_choice(question.doc)
        return str(choices[target]) if 0 <= target < len(choices) else str(target)
    return str(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Tasks show bars of their own, which end up between our lines."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Some tasks shuffle by the global generators: seeded as in the harness, and put back afterwards."""
    before = random.getstate(), np.random.get_state()
    random.seed(_SEED)
    np.random.seed(_FEWSHOT_SEED)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(
        f"the lm-eval task {name} cannot be read: {type(error).__name__}: {error}",
        where=f"lm_eval:{name}",
        why="its data is fetched from the Hugging Face hub unless it is in the cache of `datasets`, and some tasks need "
        "more packages",
        fix="check the network and that HF_HUB_OFFLINE is not set, and install what the message names",
    )
