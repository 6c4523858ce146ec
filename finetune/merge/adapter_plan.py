"""Decide, from headers alone, what every tensor of the merged model is made of, and refuse an adapter that does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from finetune.errors import UserError
from finetune.merge.adapter_file import AdapterFile
from finetune.merge.layout import Layout
from finetune.merge.shards import PlannedTensor, TensorEntry, TensorFiles


@dataclass(frozen=True, slots=True)
class Edit:
    """What an adapter does to one parameter. Fields name tensors of the adapter's file, or modules of the model.

    `own` supplies the starting value instead of the base's file: a base saved along with the adapter (resized), or, when
    `trained`, a module of modules_to_save or a trained bias. To it are added the low-rank update of the module `update`
    and the lora_bias of the module `bias`; the trained token rows of the module `rows` then replace theirs.
    """

    own: str | None = None
    trained: bool = False
    update: str | None = None
    rows: str | None = None
    bias: str | None = None
    scale: str | None = None

    @property
    def changes(self) -> bool:
        """Whether the parameter differs from the base the adapter was trained on."""
        return self.trained or any((self.update, self.rows, self.bias, self.scale))


NO_EDIT = Edit()


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the merged model: its header and where its values come from.

    `parameter` is its name in the model, None for a tensor of the files that the model does not know (copied as it is).
    """

    planned: PlannedTensor
    parameter: str | None
    edit: Edit = NO_EDIT
    transposed: bool = False


@dataclass(slots=True)
class MergePlan:
    """All tensors of the merged model in file order, and `edits` by parameter. `untied`: the head gets a tensor of its
    own. `n_vocabulary`: new number of embedding rows when the adapter brings a resized embedding."""

    edits: dict[str, Edit]
    tensors: list[TensorPlan] = field(default_factory=list)
    untied: bool = False
    n_vocabulary: int | None = None

    @property
    def n_bytes(self) -> int:
        return sum(tensor.planned.n_bytes for tensor in self.tensors)

    @property
    def targets(self) -> list[TensorPlan]:
        return [tensor for tensor in self.tensors if tensor.edit.changes]


def plan_merge(layout: Layout, base: TensorFiles, adapter: AdapterFile, dtype: torch.dtype) -> MergePlan:
    """Plan every output tensor in `dtype`. That the adapter fits is for `load_adapter` and `refuse_misfit` to say."""
    adapter.widths = {module: _width(layout, module) for module in adapter.low_rank}
    edits = _edits(layout, adapter)
    plan = MergePlan(edits, n_vocabulary=_vocabulary(layout, base, adapter, edits))
    owners = layout.owners()
    for name, entry in base.entries.items():
        if name in layout.duplicates:
            continue
        parameter = owners.get(name)
        edit = edits.get(parameter, NO_EDIT) if parameter else NO_EDIT
        plan.tensors.append(_tensor_plan(name, entry, parameter, edit, layout, adapter, dtype))
    for target, source in layout.tied.items():
        edit = edits.get(target, NO_EDIT)
        if not _same_edit(adapter, edit, edits.get(source, NO_EDIT)):
            entry = base.entries[layout.stored[source]]
            plan.tensors.append(_tensor_plan(target, entry, target, edit, layout, adapter, dtype))
            plan.untied = True
    return plan


def _width(layout: Layout, module: str) -> int:
    """Inputs of a linear module; 0 where the base has no such matrix, which is refused later."""
    shape = layout.shapes.get(f"{module}.weight", ())
    if len(shape) != 2:
        return 0
    return shape[0] if layout.kinds.get(module) == "conv1d" else shape[1]


def _edits(layout: Layout, adapter: AdapterFile) -> dict[str, Edit]:
    """Parameter -> what happens to it. Tied parameters follow PEFT: a base value and token rows hold for both names."""
    edits: dict[str, Edit] = {}

    def add(parameter: str, **what: Any) -> None:
        edits[parameter] = replace(edits.get(parameter, NO_EDIT), **what)

    for parameter, tensor in adapter.base_values.items():
        # Biases are saved only when they were trained; an embedding also when it was merely resized.
        add(parameter, own=tensor, trained=parameter.endswith(".bias"))
    for parameter, tensor in adapter.replaced.items():
        add(parameter, own=tensor, trained=True)
    for module, parts in adapter.low_rank.items():
        add(f"{module}.weight", update=module)
        if "lora_B.bias" in parts:
            add(f"{module}.bias", bias=module)
    for module in adapter.token_rows:
        add(f"{module}.weight", rows=module)
    for module, tensor in adapter.scales.items():
        add(f"{module}.weight", scale=module)
        scales_output = adapter.files.entries[tensor].shape[0] != 1
        if scales_output and f"{module}.bias" in layout.shapes:
            add(f"{module}.bias", scale=module)
    for target, source in layout.tied.items():
        one, two = edits.get(target, NO_EDIT), edits.get(source, NO_EDIT)
        if one.own and not one.trained and two.own is None:
            add(source, own=one.own)
        elif two.own and not two.trained and one.own is None:
            add(target, own=two.own)
        if two.rows and not (one.rows or one.trained or one.update):
            add(target, rows=two.rows)
    return edits


def _tensor_plan(
    name: str,
    entry: TensorEntry,
    parameter: str | None,
    edit: Edit,
    layout: Layout,
    adapter: AdapterFile,
    dtype: torch.dtype,
) -> TensorPlan:
    shape = adapter.files.entries[edit.own].shape if edit.own else entry.shape
    written = dtype if entry.dtype.is_floating_point else entry.dtype
    if parameter is None or parameter in layout.keep_fp32:
        written = entry.dtype
    transposed = layout.kinds.get((parameter or "").rpartition(".")[0]) in ("conv1d", "embedding")
    return TensorPlan(PlannedTensor(name, written, shape), parameter, edit, transposed)


def refuse_misfit(layout: Layout, adapter: AdapterFile, plan: MergePlan) -> None:
    """What PEFT can load and plain weights cannot hold: biases without a place, odd modules, other shapes."""
    edits = plan.edits
    absent = sorted(parameter for parameter in edits if parameter not in layout.shapes)
    biasless = [name for name in absent if edits[name].bias]
    if biasless and len(biasless) == len(absent):
        raise UserError(
            f"{len(biasless)} adapted layers have a trained bias (lora_bias) but no bias in the base, e.g. {biasless[0]}",
            where=str(adapter.folder),
            why="a plain model of this architecture has no place for it",
            fix="serve the adapter unmerged, or train without lora_bias",
        )
    modules = sorted({*adapter.low_rank, *adapter.token_rows, *adapter.scales})
    odd = [module for module in modules if f"{module}.weight" in layout.shapes and module not in layout.kinds]
    renamed = sorted(
        name for name in edits if name in layout.shapes and layout.canonical(name) in layout.missing
    )
    if odd or renamed:
        raise UserError(
            f"{len(odd + renamed)} adapted modules cannot be merged tensor by tensor, e.g. {(odd + renamed)[0]}",
            where=str(adapter.folder),
            why="they are no linear, Conv1D or embedding layer, or transformers rearranges them while loading",
            fix="serve the adapter unmerged, with PEFT",
        )
    shapes = _wrong_shapes(layout, adapter, edits)
    if absent or shapes:
        raise UserError(
            f"the adapter belongs to another base: of the {len(edits)} parameters it changes, {len(absent)} do not exist "
            f"here and {len(shapes)} have another shape, e.g. {(absent + shapes)[0]}",
            where=str(adapter.folder),
            why=f"its configuration names the base '{adapter.config.get('base_model_name_or_path')}'",
            fix="name the base it was trained on with --base",
        )


def _wrong_shapes(layout: Layout, adapter: AdapterFile, edits: dict[str, Edit]) -> list[str]:
    wrong = []
    for parameter, edit in edits.items():
        if parameter not in layout.shapes:
            continue
        shape = own = layout.shapes[parameter]
        if edit.own:
            own = adapter.files.entries[edit.own].shape
            if own != shape and not (_is_embedding(layout, parameter) and own[1:] == shape[1:]):
                wrong.append(f"{parameter} ({list(own)}, here {list(shape)})")
        for found in _shapes_of(adapter, edit, layout.kinds.get(parameter.rpartition(".")[0])):
            if found != own:
                wrong.append(f"{parameter} ({list(found)}, here {list(own)})")
        if edit.scale and len(own) == 2:
            scale = adapter.files.entries[adapter.scales[edit.scale]].shape
            straight = own[::-1] if layout.kinds.get(edit.scale) == "conv1d" else own
            if scale not in ((straight[0], 1), (1, straight[1])):
                wrong.append(f"{edit.scale}.ia3_l ({list(scale)}, here {list(own)})")
        if edit.rows:
            rows = adapter.files.entries[adapter.token_rows[edit.rows]].shape
            indices = adapter.token_indices(edit.rows)
            if rows != (len(indices), *own[1:]) or max(indices, default=0) >= own[0]:
                wrong.append(
                    f"{edit.rows}.token_adapter ({list(rows)} for {len(indices)} tokens, here {list(own)})"
                )
    return wrong


def _shapes_of(adapter: AdapterFile, edit: Edit, kind: str | None) -> list[tuple[int, ...]]:
    """Shapes of the stored parameter that the parts of an edit were made for."""
    entries = adapter.files.entries
    shapes: list[tuple[int, ...]] = []
    if edit.bias:
        shapes.append(entries[adapter.low_rank[edit.bias]["lora_B.bias"]].shape)
    if edit.update:
        a, b = adapter.update_shapes(edit.update)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            return [*shapes, (*b, *a)]
        shapes.append((a[1], b[0]) if kind in ("conv1d", "embedding") else (b[0], a[1]))
    return shapes


def _is_embedding(layout: Layout, parameter: str) -> bool:
    return parameter.rpartition(".")[0] in (layout.input_embedding, layout.output_embedding)


def _vocabulary(
    layout: Layout, base: TensorFiles, adapter: AdapterFile, edits: dict[str, Edit]
) -> int | None:
    """Rows of the embeddings after the merge when they change; input and output must agree."""
    rows: dict[str, int] = {}
    for parameter in layout.shapes:
        if not _is_embedding(layout, parameter):
            continue
        edit = edits.get(parameter, NO_EDIT)
        stored = layout.stored.get(layout.canonical(parameter))
        if edit.own:
            rows[parameter] = adapter.files.entries[edit.own].n_rows
        elif stored is not None:  # transformers renames the heads of some models while loading
            rows[parameter] = base.entries[stored].n_rows
    if len(set(rows.values())) > 1:
        raise UserError(
            f"input and output embedding would have different numbers of rows: {rows}",
            where=str(adapter.folder),
            why="the vocabulary was resized before training, and the adapter was saved with only one of the two",
            fix="save it again with model.save_pretrained(folder, save_embedding_layers=True)",
        )
    n_rows = next(iter(rows.values()), None)
    base_rows = layout.shapes.get(f"{layout.input_embedding}.weight", (None,))[0]
    return n_rows if n_rows != base_rows else None


def _same_edit(adapter: AdapterFile, one: Edit, two: Edit) -> bool:
    """Whether two tied parameters stay equal: nothing happens to them, or the same by value."""
    present = [(one.own, two.own), (one.update, two.update), (one.rows, two.rows), (one.bias, two.bias)]
    if any((left is None) != (right is None) for left, right in present):
        return False
    if one.own and two.own and not _equal(adapter, one.own, two.own):
        return False
    if one.rows and two.rows and one.rows != two.rows:
        left, right = adapter.token_rows[one.rows], adapter.token_rows[two.rows]
        if adapter.token_indices(one.rows) != adapter.token_indices(two.rows) or not _equal(
            adapter, left, right
        ):
            return False
    return not (one.update and two.update) or _same_update(adapter, one.update, two.update)


def _same_update(adapter: AdapterFile, head: str, embedding: str) -> bool:
    """A tied pair of adapters: the embedding's A and B are the head's B and A transposed (ensure_weight_tying)."""
    one, two = adapter.update(head, transposed=False), adapter.update(embedding, transposed=True)
    if one.magnitude is not None or one.scaling != two.scaling or one.shape != two.shape:
        return False
    return torch.equal(one.a, two.b.T) and torch.equal(one.b, two.a.T)


def _equal(adapter: AdapterFile, left: str, right: str) -> bool:
    if left == right:
        return True
    one, two = adapter.files.entries[left], adapter.files.entries[right]
    return one.shape == two.shape and torch.equal(adapter.value(left), adapter.value(right))


def merged_config(
    config: dict[str, Any], plan: MergePlan, layout: Layout, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of the merged model: its dtype, its vocabulary, whether the head is tied, and no quantization.

    A head with a tensor of its own is named untied even where the base's configuration claimed otherwise: transformers
    believes the files, other runtimes believe the configuration.
    """
    own_head = f"{layout.output_embedding}.weight" in {tensor.parameter for tensor in plan.tensors}
    result = {
        key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")
    }
    name = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[dtype]
    result["dtype"] = name
    sections = [result]
    if isinstance(result.get("text_config"), dict):
        result["text_config"] = dict(result["text_config"])
        sections.append(result["text_config"])
    for section in sections:
        if "dtype" in section:
            section["dtype"] = name
        if plan.n_vocabulary is not None and "vocab_size" in section:
            section["vocab_size"] = plan.n_vocabulary
        if own_head and (section is result or "tie_word_embeddings" in section):
            section["tie_word_embeddings"] = False
    return result
