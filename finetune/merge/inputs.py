"""What a user names to merge, a run folder or an adapter folder, resolved to base, adapter and quantization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.digest import digest_file
from finetune.errors import UserError
from finetune.merge.adapter_file import is_adapter_folder
from finetune.model.adapter_files import read_adapter_config, read_origin
from finetune.model.source import ADAPTER_CONFIG, ModelSource, recorded_revision, resolve_model
from finetune.paths import read_json
from finetune.recipe.resolve import load_recipe
from finetune.recipe.schema import ModelSection

RUN_RECIPE = "recipe.resolved.yaml"


@dataclass(frozen=True, slots=True)
class MergeInputs:
    """`quantization` is the model section of a quantized training, None when the base was plain."""

    source: ModelSource
    adapter_folder: Path
    quantization: ModelSection | None
    trust_remote_code: bool | str


def resolve_inputs(
    target: Path,
    *,
    base: str | None = None,
    quantize: str | None = None,
    double_quantization: bool = True,
    other_base: bool = False,
) -> MergeInputs:
    """Find base, adapter and quantization of a run folder or a PEFT adapter folder, told apart by their content.

    `base` and `quantize` override what the folder says (a plain adapter does not record its quantization). Raises
    UserError when there is no adapter, when no base is known, or when `base` has other content than the base that the
    folder names; `other_base` permits the latter.
    """
    if not target.is_dir():
        raise UserError(
            f"no such folder: {target}", fix="name a run folder, or a folder with " + ADAPTER_CONFIG
        )
    if (target / RUN_RECIPE).is_file():
        return _of_run(target, base, quantize, double_quantization, other_base)
    if not is_adapter_folder(target):
        inside = sorted(path.parent for path in target.glob(f"*/{ADAPTER_CONFIG}"))
        is_model = (target / "config.json").is_file()
        raise UserError(
            f"{target} is neither a run folder nor an adapter: it holds neither {RUN_RECIPE} nor {ADAPTER_CONFIG}",
            why="it holds a whole model" if is_model else "",
            fix=f"did you mean {inside[0]}?"
            if inside
            else "name a run folder, or a folder with " + ADAPTER_CONFIG,
        )
    config = read_adapter_config(target)
    named = str(config.get("base_model_name_or_path") or "")
    if base is None and not named:
        raise UserError(
            f"{target} does not say which base it belongs to",
            where=ADAPTER_CONFIG,
            fix="name the base with --base",
        )
    revision = None if base else recorded_revision(named, config.get("revision"))
    source = resolve_model(base or named, revision, where="--base")
    if not other_base:
        _refuse_other_base(source, _recorded_digest(target, named if base else ""), named, target)
    section = ModelSection(
        id=source.id,
        quantize=quantize or "none",
        double_quantization=double_quantization,
    )
    return MergeInputs(source, target, section if section.quantize != "none" else None, False)


def _of_run(
    run: Path, base: str | None, quantize: str | None, double_quantization: bool, other_base: bool
) -> MergeInputs:
    recipe = load_recipe(run / RUN_RECIPE)
    if recipe.adapter.kind == "none":
        raise UserError(
            f"the run {run} tuned all weights: there is no adapter to merge",
            fix=f"its model is complete already: {run / 'model'}",
        )
    adapter = run / "adapter"
    if not is_adapter_folder(adapter):
        raise UserError(
            f"the run {run} holds no adapter yet",
            why="its training was not completed",
            fix="run the same recipe again: it continues where it stopped",
        )
    manifest = _manifest(run)
    refuse_changed_weights(run, adapter)
    section = recipe.model
    source = resolve_model(
        base or section.id,
        None if base else recorded_revision(section.id, section.revision),
        trust_remote_code=section.trust_remote_code,
    )
    if not other_base:
        _refuse_other_base(source, manifest.get("inputs", {}).get("model"), section.id, run)
    if quantize is not None:
        section = section.model_copy(
            update={"quantize": quantize, "double_quantization": double_quantization}
        )
    return MergeInputs(
        source, adapter, section if section.quantize != "none" else None, recipe.model.trust_remote_code
    )


def refuse_changed_weights(run: Path, folder: Path) -> None:
    """The weights in `folder` of a run must be those it trained and evaluated, where its manifest knows their digests."""
    for stage in _manifest(run).get("stages", {}).values():
        for name, recorded in stage.get("outputs", {}).items():
            weights = run / name
            if weights.parent != folder or weights.suffix != ".safetensors" or not weights.is_file():
                continue
            if digest_file(weights) != recorded:
                raise UserError(
                    f"{weights} is not the {folder.name} that this run trained",
                    where=str(run / "manifest.json"),
                    why="its SHA-256 differs from the one recorded after training, so the run's evaluation is not about it",
                    fix=f"name the folder itself to use it all the same: {folder}",
                )


def _manifest(run: Path) -> dict[str, Any]:
    path = run / "manifest.json"
    content: dict[str, Any] = read_json(path) if path.is_file() else {}
    return content


def _recorded_digest(adapter: Path, named: str) -> str | None:
    """Content digest of the base an adapter was trained on: noted with it, or that of the base it names, else None."""
    if noted := read_origin(adapter).get("digest"):
        return str(noted)
    if not named:
        return None
    try:
        return resolve_model(named).digest
    except UserError:
        return None


def _refuse_other_base(source: ModelSource, recorded: str | None, named: str, where: Path) -> None:
    if recorded is not None and recorded != source.digest:
        raise UserError(
            f"{source.id} is not the base this adapter was trained on: its content is {source.digest[:12]}, that of "
            f"'{named}' is {recorded[:12]}",
            where=str(where),
            why="an adapter is a difference from one set of weights; on others it means nothing",
            fix="leave --base out, or add --other-base when the transfer is meant",
        )
