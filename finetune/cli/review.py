"""`finetune review RUN`: read answers by hand, blinded, on a page of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note


def review(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    suite: Annotated[
        str | None, typer.Option(help="Suite by name or path; default: the run's first.")
    ] = None,
    baseline: Annotated[
        str, typer.Option(help="`base`, another run's folder, or a file of records.")
    ] = "base",
    items: Annotated[int, typer.Option(min=1, help="How many items to read.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Decides the draw, the order and the sides.")] = 17,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 0,
    summary: Annotated[bool, typer.Option("--summary", help="Only say what was read so far.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Serve a page with answers of both arms, unnamed and shuffled; verdicts are saved at once and survive a restart."""
    from finetune.evaluation.early_stop import seen_records
    from finetune.evaluation.reviewed import review_file
    from finetune.evaluation.saved_arms import RunAnswers, find_baseline
    from finetune.report.page import write_report
    from finetune.report.review.sample import draw_review, readable_suite, scorer_says
    from finetune.report.review.server import ReviewServer
    from finetune.report.review.verdicts import VerdictFile, review_lines, summarise_review

    answers = RunAnswers.open(run)
    suites = answers.load_suites([suite] if suite is not None else None)
    chosen = readable_suite(suites, named=suite is not None)
    arms = find_baseline(baseline, answers, chosen).records(), answers.tuned(chosen.name).records()
    drawn = draw_review(chosen.name, scorer_says(chosen), *seen_records(chosen, *arms), n=items, seed=seed)
    verdicts = VerdictFile(review_file(run))
    if not summary:
        server = ReviewServer(drawn, verdicts, port=port)
        note(f"open {server.url}\n{len(drawn)} items; keys 1 to 4 decide; end with Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("")
        finally:
            server.server_close()
        write_report(run)  # it shows what was read
    found = summarise_review(verdicts.of(drawn))
    emit({**found, "planned": len(drawn)}, "\n".join(review_lines(found, len(drawn))), as_json=as_json)
