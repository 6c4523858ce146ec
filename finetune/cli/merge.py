"""`finetune merge`: adapters into their base, into one another, and out of two models; models into one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli import merge_models, merge_search
from finetune.cli.output import JsonFlag, emit, note
from finetune.errors import UserError

if TYPE_CHECKING:
    from finetune.evaluation.gate import GateAnswer
    from finetune.merge.inputs import MergeInputs
    from finetune.merge.measure import MergeProof

app = typer.Typer(
    name="merge",
    help="Merge models and adapters; combine and extract adapters.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


app.command()(merge_models.models)
app.command()(merge_search.search)


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
VerifyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--verify", metavar="SUITE", help="Ask this suite of the run and of the merged model, and compare."
    ),
]


def _refuse_no_run(target: Path) -> None:
    if not (target / "manifest.json").is_file():
        raise UserError(
            f"{target} is no run, and --verify compares with a run's tuned model",
            where="--verify",
            fix="merge a run, or ask both afterwards: finetune eval model",
        )


def _refuse_idle_options(
    onto: Onto, quantize: Quantize | None, single_quantization: bool, found: MergeInputs
) -> None:
    """Options that would change nothing, because they are about a quantization that is not there."""
    if single_quantization and quantize not in (Quantize.nf4, Quantize.fp4):
        raise UserError(
            "--single-quantization says how --quantize nf4 or fp4 was done, and neither is given",
            where="--single-quantization",
            fix="add --quantize nf4, or leave it out: a run folder knows its own quantization",
        )
    if onto is Onto.original and found.quantization is None:
        raise UserError(
            "--onto original chooses between two bases of a quantized training; this one knew only the original",
            where="--onto",
            fix="leave it out, or say how the base was quantized: --quantize nf4",
        )


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
    verify: VerifyOption = None,
    as_json: JsonFlag = False,
) -> int:
    """Merge an adapter into its base, and prove on fixed prompts that the result answers like base and adapter.

    The weights are streamed tensor by tensor, added in fp32 and cast once. Nothing is left behind when the proof fails.
    --verify also asks suites of both, item by item; the exit code is then that of a gate: 0, 10 regressed, 11 inconclusive.
    """
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.cli.progress import begin
    from finetune.merge.adapter import merge_adapter
    from finetune.merge.inputs import resolve_inputs
    from finetune.merge.place import refuse_used_folder

    refuse_used_folder(out)
    if verify:
        _refuse_no_run(target)
    quantized = quantize.value if quantize else None
    found = resolve_inputs(
        target,
        base=base,
        quantize=quantized,
        double_quantization=not single_quantization,
        other_base=other_base,
    )
    _refuse_idle_options(onto, quantize, single_quantization, found)
    proof = merge_adapter(
        found.source,
        found.adapter_folder,
        out,
        dtype=dtype.value,
        quantization=found.quantization,
        onto=onto.value,
        trust_remote_code=found.trust_remote_code,
        other_base=other_base,
        progress=begin,
    )
    told = {"out": str(out), **proof.to_dict()}
    if not verify:
        emit(told, _screen(out, proof), as_json=as_json)
        return 0
    from finetune.evaluation.screen import gate_lines

    verified = _verify(out, target, verify)
    screen = "\n".join([_screen(out, proof), *gate_lines(verified)])
    emit({**told, "verified": verified.to_dict()}, screen, as_json=as_json)
    return int(verified.exit_code)


def _verify(merged: Path, run: Path, names: list[str]) -> GateAnswer:
    """The merged model must not be worse than the run's adapter on its base, by each suite's margin."""
    from finetune.evaluation.compare import compare_saved
    from finetune.evaluation.gate import gate
    from finetune.evaluation.suite import load_suite
    from finetune.pipeline.standing import answer_suite

    results = []
    for suite in map(load_suite, names):
        before = answer_suite(str(run), suite, say=note)
        after = answer_suite(str(merged), suite, arm=before.arm, say=note)
        results.append(compare_saved(suite, before, after, slices=False, costs=False))
    return gate(results, require="no-regression", correction="holm")


class Method(StrEnum):
    """How adapters are combined."""

    sum = "sum"
    svd = "svd"
    ties = "ties"
    dare = "dare"
    dare_ties = "dare_ties"


@app.command()
def combine(
    adapters: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="PEFT adapter folders or run folders.")
    ],
    out: Annotated[Path, typer.Option(help="New folder for the combined adapter.")],
    base: BaseOption = None,
    weights: Annotated[
        str | None, typer.Option(help="One weight an adapter, e.g. 0.6,0.4; by default 1 each.")
    ] = None,
    method: Annotated[
        Method, typer.Option(help="sum is exact, its rank the sum of ranks; the others end in --rank.")
    ] = Method.sum,
    rank: Annotated[int | None, typer.Option(help="Rank of the result, for all methods but sum.")] = None,
    density: Annotated[float, typer.Option(help="Share of each change that TIES and DARE keep.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of DARE.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Combine adapters of one base into one adapter, on what they really add, and print the error of the rank."""
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.merge.combine import combine_adapters
    from finetune.merge.inputs import resolve_inputs

    found = [resolve_inputs(adapter, base=base) for adapter in adapters]
    for other in found[1:]:
        if other.source.digest != found[0].source.digest:
            raise UserError(
                f"{adapters[0]} and {other.adapter_folder} have different bases: {found[0].source.id}, {other.source.id}",
                why="a sum of differences from different weights means nothing",
                fix="name the common base with --base",
            )
    done = combine_adapters(
        found[0].source,
        [entry.adapter_folder for entry in found],
        out,
        weights=_numbers(weights) if weights is not None else None,
        method=method.value,
        rank=rank,
        density=density,
        seed=seed,
    )
    error = "exact" if method == Method.sum else f"relative error {done.error:.2%}"
    human = f"{done.n_modules} layers combined by {done.method}, rank {done.rank}, {error}: {out}"
    emit({"out": str(out), **done.to_dict()}, human, as_json=as_json)


@app.command()
def extract(
    tuned: Annotated[str, typer.Argument(metavar="MODEL", help="The tuned model: a folder or a hub id.")],
    base: Annotated[str, typer.Option(help="The model it was tuned from.")],
    out: Annotated[Path, typer.Option(help="New folder for the adapter.")],
    rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 32,
    as_json: JsonFlag = False,
) -> None:
    """Make a LoRA of the difference of two models; prints the spectrum of the change and the error of every rank."""
    from finetune.cli.quiet import quiet_libraries

    quiet_libraries()
    from finetune.merge.extract import extract_adapter
    from finetune.model.source import resolve_model

    done = extract_adapter(
        resolve_model(base, where="--base"), resolve_model(tuned, where="MODEL"), out, rank=rank
    )
    lines = ["rank    error left", *(f"{r:<7} {error:.2%}" for r, error in done.error_by_rank.items())]
    lines.append(
        "share of the change in the first directions: " + ", ".join(f"{s:.1%}" for s in done.spectrum[:8])
    )
    if done.not_carried:
        lines.append(
            f"{len(done.not_carried)} changed tensors have no place in a LoRA ({done.not_carried_share:.1%} of the squared "
            f"change), e.g. {done.not_carried[0]}"
        )
    lines.append(f"{done.n_modules} layers, rank {done.rank}, relative error {done.error:.2%}: {out}")
    emit({"out": str(out), **done.to_dict()}, "\n".join(lines), as_json=as_json)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"'{text}' is not a list of numbers", where="--weights", fix="e.g. --weights 0.6,0.4"
        ) from None


def _screen(out: Path, proof: MergeProof) -> str:
    """Whether the merge is good, in words; advice; where the model is, and where the figures are."""
    from finetune.merge.adapter import PROOF_FILE
    from finetune.units import format_bytes

    return "\n".join(
        [
            *proof.in_words(),
            *(f"hint: {hint}" for hint in proof.hints),
            f"merged and proven in {proof.seconds:.0f} s: {out} ({format_bytes(proof.n_bytes)}; all figures: {PROOF_FILE})",
        ]
    )
