"""`finetune export gguf`: a merged model as one file for llama.cpp, Ollama and what else reads GGUF."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.output import JsonFlag, emit

app = typer.Typer(
    name="export",
    help="Write a merged model in the form that other programs serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Kind(StrEnum):
    """Type of the matrices."""

    f16 = "f16"
    q8_0 = "q8_0"


@app.callback()
def group() -> None:
    """Write a merged model in the form that other programs serve."""


@app.command()
def gguf(
    model: Annotated[
        Path, typer.Argument(metavar="DIR", help="A model folder, such as `finetune merge` writes.")
    ],
    out: Annotated[Path, typer.Option(help="File to write, e.g. out/model-f16.gguf.")],
    kind: Annotated[Kind, typer.Option("--type", help="Type of the matrices.")] = Kind.f16,
    modelfile: Annotated[
        bool, typer.Option("--modelfile", help="Also write a Modelfile for Ollama beside it.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write one GGUF file, tokenizer and chat template included, read it back and compare it with the model.

    Nothing is left when the file does not answer like the model.
    """
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.merge.export.gguf_file import export_gguf

    proof = export_gguf(model, out, type=kind.value)
    told, lines = proof.to_dict(), proof.lines()
    if modelfile:
        from transformers import AutoConfig, AutoTokenizer

        from finetune.merge.export.ollama import write_modelfile

        path = out.with_name("Modelfile")
        context = AutoConfig.from_pretrained(model).max_position_embeddings
        whole = write_modelfile(path, out, AutoTokenizer.from_pretrained(model), context_tokens=context)
        told |= {"modelfile": str(path), "turns_written_out": whole}
        lines.append(f"{path}: ollama create NAME -f {path}")
    emit(told, "\n".join(lines), as_json=as_json)
