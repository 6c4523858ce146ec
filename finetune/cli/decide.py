"""`finetune decide`: is tuning the right remedy, and what comes first?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.evaluate_model import Dtype
from finetune.cli.output import JsonFlag, emit, note


class KnowledgeKind(StrEnum):
    """Whether what the answers need to know changes over time."""

    stable = "stable"
    changes = "changes"


def decide(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="Untuned model: a folder, a hub id or builtin:….")
    ],
    suite: Annotated[str | None, typer.Option(help="Suite by name or path: your task.")] = None,
    documents: Annotated[
        Path | None, typer.Option(help="Text to put into the prompt, as retrieval would.")
    ] = None,
    goal: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of right answers that would do.")
    ] = None,
    knowledge: Annotated[
        KnowledgeKind | None, typer.Option(help="Does what the answers need to know change?")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(min=0, help="Answered examples that you could train on.")
    ] = None,
    max_items: Annotated[int | None, typer.Option(min=1, help="Ask only the first of the items.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 32,
    dtype: Annotated[Dtype, typer.Option(help="Compute type.")] = Dtype.fp32,
    as_json: JsonFlag = False,
) -> None:
    """Say which remedy comes first: a better prompt, documents, form, examples or tuning. Never without an evaluation.

    The untuned model is asked zero-shot, few-shot and with your documents; the answers are kept for the run that may follow.
    """
    from finetune.doctor.remedy import Facts
    from finetune.doctor.remedy import decide as reason

    facts = Facts(goal, knowledge.value if knowledge is not None else None, examples)
    if suite is None:
        reason([], facts)
        return
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.evaluation.suite import load_suite
    from finetune.pipeline.decide import decide_whether_to_tune

    decision = decide_whether_to_tune(
        name,
        load_suite(suite),
        facts,
        documents=documents,
        max_items=max_items,
        batch_size=batch_size,
        dtype=dtype.value,
        say=note,
    )
    emit(decision.to_dict(), "\n".join(decision.lines()), as_json=as_json)
