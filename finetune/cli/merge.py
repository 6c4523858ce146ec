"""`finetune merge adapter`: one plain model out of base and adapter, proven equal."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.output import JsonFlag, emit

if TYPE_CHECKING:
    from finetune.merge.measure import MergeProof

app = typer.Typer(
    name="merge", help="Merge adapters into their base.", no_args_is_help=True, rich_markup_mode=None
)


class Dtype(StrEnum):
    """Type of the written weights."""

    bf16 = "bf16"
    fp32 = "fp32"


class Onto(StrEnum):
    """Which base a quantized training is merged onto."""

    dequantised = "dequantised"
    original = "original"


class Quantize(StrEnum):
    """How the base was quantized in training."""

    none = "none"
    nf4 = "nf4"
    fp4 = "fp4"
    int8 = "int8"


Target = Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run folder, or a PEFT adapter folder.")]
OutOption = Annotated[Path, typer.Option(help="New folder for the merged model.")]
BaseOption = Annotated[
    str | None,
    typer.Option(help="Base model: builtin:NAME, a folder or a hub id; by default what RUN|DIR names."),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Type of the written weights.")]
OntoOption = Annotated[
    Onto, typer.Option(help="After quantized training: the base as its codes decode, or as it lies on disk.")
]
QuantizeOption = Annotated[
    Quantize | None, typer.Option(help="Quantization of the training; a run folder knows it.")
]
SingleFlag = Annotated[
    bool,
    typer.Option("--single-quantization", help="With --quantize: the 4-bit constants were not quantized."),
]
OtherBaseFlag = Annotated[
    bool, typer.Option("--other-base", help="Permit a base with other weights than it was trained on.")
]


@app.callback()
def group() -> None:
    """Merge adapters into their base."""


@app.command()
def adapter(
    target: Target,
    out: OutOption,
    base: BaseOption = None,
    dtype: DtypeOption = Dtype.bf16,
    onto: OntoOption = Onto.dequantised,
    quantize: QuantizeOption = None,
    single_quantization: SingleFlag = False,
    other_base: OtherBaseFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Merge an adapter into its base, and prove on fixed prompts that the result answers like base and adapter.

    The weights are streamed tensor by tensor, added in fp32 and cast once. Nothing is left behind when the proof fails.
    """
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.merge.adapter import merge_adapter, refuse_used_folder
    from finetune.merge.inputs import resolve_inputs

    refuse_used_folder(out)
    found = resolve_inputs(
        target,
        base=base,
        quantize=quantize.value if quantize else None,
        double_quantization=not single_quantization,
        other_base=other_base,
    )
    proof = merge_adapter(
        found.source,
        found.adapter_folder,
        out,
        dtype=dtype.value,
        quantization=found.quantization,
        onto=onto.value,
        trust_remote_code=found.trust_remote_code,
        other_base=other_base,
        progress=_progress,
    )
    emit({"out": str(out), **proof.to_dict()}, _screen(out, proof), as_json=as_json)


def _progress(label: str, total: int, unit: str) -> Callable[[int], None]:
    from finetune.telemetry.progress import Progress

    line = Progress(label, total, unit)

    def advance(n: int) -> None:
        line.advance(n)
        if line.done >= total:
            line.__exit__(None, None, None)

    return advance


def _screen(out: Path, proof: MergeProof) -> str:
    """The figures, one a line, then advice, then where the model is."""
    facts = proof.facts()
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {value}" for name, value in facts.items()]
    lines += [f"hint: {hint}" for hint in proof.hints]
    return "\n".join([*lines, f"merged and proven in {proof.seconds:.0f} s: {out}"])
