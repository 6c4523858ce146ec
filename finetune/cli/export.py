"""`finetune export`: one GGUF file for llama.cpp and Ollama, or a folder that is ready for a hub."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.pipeline.publish import HubFolder

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

        path = _modelfile_path(out)
        context = AutoConfig.from_pretrained(model).max_position_embeddings
        whole = write_modelfile(path, out, AutoTokenizer.from_pretrained(model), context_tokens=context)
        told |= {"modelfile": str(path), "turns_written_out": whole}
        lines.append(f"{path}: ollama create NAME -f {path}")
    emit(told, "\n".join(lines), as_json=as_json)


def _modelfile_path(out: Path) -> Path:
    """`Modelfile`, or one of the weights' own name beside it: another file's is left as it is."""
    path = out.with_name("Modelfile")
    return path if not path.exists() else out.with_suffix(".Modelfile")


@app.command()
def hub(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|DIR", help="A run, a merged model, or an adapter folder.")
    ],
    out: Annotated[Path, typer.Option(help="New folder that is ready to be uploaded.")],
    run: Annotated[
        Path | None, typer.Option(help="The run that a merged model or adapter comes from: its evaluation.")
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="Licence of the result; by default the base's, where all are known.")
    ] = None,
    base_id: Annotated[
        str | None, typer.Option("--base-id", metavar="OWNER/NAME", help="Hub id of a base that lay here.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Title of the card.")] = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload it, to a private repository.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: everybody may read it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Make a folder that a hub can take as it is: weights, tokenizer, recipe, and a card that says where all came from.

    The card names base, data and licences by digest, and shows the evaluation of the run with its intervals.
    """
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.merge.place import refuse_used_folder
    from finetune.model.hub_push import check_push, hub_api, push_folder
    from finetune.pipeline.publish import prepare_publication, write_hub_folder

    if public and push is None:
        raise UserError(
            "--public says who may read what is pushed", where="--public", fix="add --push OWNER/NAME"
        )
    refuse_used_folder(out)
    if push is not None:
        check_push(push, public=public, api=hub_api())
    source, publication, unknown = prepare_publication(
        model, run=run, licence=licence, base_id=base_id, title=name, hub_id=push
    )
    if push is not None:
        _refuse_unknown_licence(unknown if licence is None else [])
    made = write_hub_folder(source, publication, out, unknown)
    told, lines = made.to_dict(), _hub_lines(made)
    for remark in made.remarks:
        note(f"note: {remark}")
    if push is not None:
        pushed = push_folder(
            out, push, public=public, message=f"{publication.title} by finetune", api=hub_api()
        )
        told["pushed"] = pushed.to_dict()
        lines.append(
            f"pushed to {pushed.url} ({'private' if pushed.private else 'public'}), commit {pushed.commit}"
        )
    emit(told, "\n".join(lines), as_json=as_json)


def _refuse_unknown_licence(unknown: list[str]) -> None:
    if unknown:
        raise UserError(
            f"no licence is known of {', '.join(unknown)}",
            where="--push",
            why="what is uploaded must say under which licence others may use it, and you must be allowed to",
            fix="look it up and name the result's licence, e.g. --licence apache-2.0",
        )


def _hub_lines(made: HubFolder) -> list[str]:
    from finetune.units import format_bytes

    return [
        f"{made.out}: {len(made.files)} files, {format_bytes(made.n_bytes)}; licence {made.licence or 'unknown'}",
        f"read the card before anybody else does: {made.out}/README.md",
    ]
