"""`finetune eval model`: what any model scores on a suite, with or without another one to compare it with."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note

SuiteOption = Annotated[list[str], typer.Option("--suite", help="Suite by name or path, or lm_eval:TASK.")]
ArmOption = Annotated[
    str | None,
    typer.Option(
        help="Prompt: zero_shot, few_shot or tuned; default: tuned for a run, the suite's best for any other model."
    ),
]


class Dtype(StrEnum):
    """Compute types of a model that is no run's."""

    fp32 = "fp32"
    bf16 = "bf16"


def model(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run, a model folder, a hub id or builtin:….")
    ],
    suites: SuiteOption,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this model, item by item.")
    ] = None,
    arm: ArmOption = None,
    against_arm: ArmOption = None,
    max_items: Annotated[
        int | None, typer.Option(min=1, help="Ask only the first of each suite's items.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 32,
    dtype: Annotated[Dtype, typer.Option(help="Compute type of a model that is no run's.")] = Dtype.fp32,
    as_json: JsonFlag = False,
) -> int:
    """Ask a suite of a model that need not be tuned here, and compare it with another. The exit code is the verdict.

    A merged model against the adapter it was made of: finetune eval model out/merged --against runs/<id> --arm tuned.
    """
    from finetune.cli.quiet import quiet_libraries
    from finetune.evaluation.suite import load_suite

    chosen = [load_suite(suite) for suite in suites]  # a typo is told before libraries are loaded
    quiet_libraries()
    from finetune.evaluation.claims import combine
    from finetune.evaluation.compare import compare_saved
    from finetune.evaluation.screen import comparison_lines, standing_lines
    from finetune.pipeline.standing import answer_suite

    answer = partial(answer_suite, max_items=max_items, batch_size=batch_size, dtype=dtype.value, say=note)
    others = [answer(against, one, arm=against_arm) for one in chosen] if against else []
    arms = [answer(name, one, arm=arm) for one in chosen]
    summaries = [found for one in arms if (found := one.summary()) is not None]
    lines = [
        line for one, summary in zip(chosen, summaries, strict=True) for line in standing_lines(one, summary)
    ]
    payload = {"model": name, "arms": [summary.to_dict() for summary in summaries]}
    if not others:
        emit(payload, "\n".join(lines), as_json=as_json)
        return 0
    results = [compare_saved(*one) for one in zip(chosen, others, arms, strict=True)]
    comparison = combine(results)
    lines = [line for result in results for line in comparison_lines(result)]
    lines.append(f"verdict: {comparison['verdict']}")
    emit({**payload, "against": against, "comparison": comparison}, "\n".join(lines), as_json=as_json)
    return int(comparison["exit_code"])
