"""`finetune data schema`: the JSON Schema of a dataset spec, or its reference page."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from finetune.cli.output import JsonFlag


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the reference page instead.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the JSON Schema of a dataset spec (for editors), or the reference page with --markdown."""
    from finetune.data.reference import dataset_json_schema, dataset_reference_markdown

    if markdown and not as_json:
        print(dataset_reference_markdown(), end="")
        return
    print(json.dumps(dataset_json_schema(), indent=2, ensure_ascii=False))
