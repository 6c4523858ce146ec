"""What a merge will do, known before a weight is read: every output tensor, its sources, its settings, and the costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from finetune.digest import digest_json
from finetune.errors import Fault, UserError
from finetune.merge.methods.chunk import Settings
from finetune.merge.methods.draw import stream
from finetune.merge.models.inputs import MergeModel, is_embedding, is_vocabulary, source_name
from finetune.merge.models.layers import LayerNames, main_stack, read_layers
from finetune.merge.models.vocabulary import Vocabulary
from finetune.merge.shards import PlannedTensor, TensorEntry
from finetune.recipe.merge_loader import LoadedMerge
from finetune.recipe.merge_methods import DEFAULTS, METHOD_RULES, MethodRule
from finetune.recipe.merge_section import MergeRecipe, OutputSlice, Parameters, SliceSource, Value
from finetune.recipe.merge_settings import filters_in, lookup

TYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
    "float32": torch.float32, "fp32": torch.float32,
}  # fmt: skip


_NO_SUM = 1e-9
"""Weights whose sum is smaller, beside their magnitudes, sum to zero: 0.1 + 0.2 - 0.3 is 6e-17 in binary numbers."""


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of one model, by the model's number."""

    model: int
    tensor: str


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the result. `base` is what deltas start from; it is not among `inputs`. `copied`: taken as it is."""

    planned: PlannedTensor
    base: Source | None
    inputs: tuple[Source, ...]
    settings: Settings
    aligned: bool = False
    copied: bool = False

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.inputs if self.base is None else (self.base, *self.inputs)


@dataclass(slots=True)
class MergePlan:
    """A whole merge. `base` gives names, types and configuration; `tokenizer_model` the tokenizer.

    `layer_order` maps each layer of the result to the layer whose configuration it has; None without slices.
    """

    method: str
    dialect: str
    models: list[MergeModel]
    base: MergeModel
    tensors: list[OutputTensor]
    vocabulary: Vocabulary | None
    layer_order: list[int] | None
    recipe: MergeRecipe
    tokenizer_model: MergeModel
    remarks: list[str] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights that are written."""
        return sum(tensor.planned.n_bytes for tensor in self.tensors)

    @property
    def source_bytes(self) -> int:
        """Bytes of all sources, each read once."""
        return sum(
            self.models[source.model].entries[source.tensor].n_bytes
            for tensor in self.tensors
            for source in tensor.sources
        )

    @property
    def read_bytes(self) -> int:
        """Bytes read in all passes over the sources."""
        return sum(
            self.passes(tensor)
            * sum(self.models[source.model].entries[source.tensor].n_bytes for source in tensor.sources)
            for tensor in self.tensors
        )

    @property
    def measures_whole_models(self) -> bool:
        """TIES of the paper trims by magnitudes of the whole model, which takes a pass of its own."""
        return (
            self.method == "ties"
            and self.dialect == "paper"
            and any(min(tensor.settings.density) < 1 for tensor in self.tensors if not tensor.copied)
        )

    def passes(self, tensor: OutputTensor) -> int:
        """How often the sources of a tensor are read."""
        if tensor.copied:
            return 1
        return int(self.measures_whole_models) + n_passes(self.method, tensor.settings, tensor.planned.shape)

    def digest(self) -> str:
        """Identifies the result: recipe, and the identity of every input. Part of what an interrupted merge is found by."""
        vocabulary = None if self.vocabulary is None else self.vocabulary.digest()
        tensors = [(t.planned.name, str(t.planned.dtype), t.planned.shape) for t in self.tensors]
        recipe = self.recipe.model_dump(mode="json", exclude={"description"})
        return digest_json([recipe, [model.identity() for model in self.models], tensors, vocabulary])


def n_passes(method: str, settings: Settings, shape: tuple[int, ...] = ()) -> int:
    """Passes over the chunks of one tensor, the last of which writes."""
    elects = method in ("ties", "dare_ties", "della", "breadcrumbs_ties") and settings.dialect == "paper"
    sparse = any(density < 1 for density in settings.density)
    if method.startswith(("dare", "della")):
        rescaled = sparse and settings.dialect == "mergekit" and settings.rescale is not False
    else:
        rescaled = sparse and bool(settings.rescale)
    by_row = len(shape) >= 2 and (
        settings.filter_wise or not (settings.nuslerp_flatten or settings.nuslerp_row_wise)
    )
    measured = {
        "ties": 2 * (sparse and settings.thresholds is None),
        "breadcrumbs": 2 * sparse,
        "breadcrumbs_ties": 2 * sparse,
        "slerp": 1,
        "nuslerp": int(not by_row),
        "model_stock": int(not by_row),
        "karcher": 1,
        "sce": 1 + 3 * (settings.select_topk < 1),
    }.get(method, 0)
    if settings.dialect == "paper" and method == "ties":
        measured = 0  # counted once for the whole model
    return measured + int(rescaled) + int(elects) + 1


def plan_merge(
    loaded: LoadedMerge,
    models: list[MergeModel],
    base: MergeModel,
    vocabulary: Vocabulary | None,
) -> MergePlan:
    """Work out every output tensor. `models` are those that the recipe names, `base` gives names, types and order."""
    recipe = loaded.recipe
    layers = read_layers(base.entries)
    planner = _Planner(recipe, models, base, layers, vocabulary)
    if recipe.slices is None:
        order = None
        whole = _as_slice(recipe)
        tensors = [planner.tensor(name, name, whole, layers.position(name), None) for name in base.entries]
    else:
        tensors, order = planner.sliced(recipe.slices)
    remarks = [*loaded.remarks, *planner.idle_filters(tensors)]
    if planner.faults:
        raise UserError(planner.faults)
    return MergePlan(
        recipe.merge_method,
        recipe.spoken,
        models,
        base,
        tensors,
        vocabulary,
        order,
        recipe,
        base,
        remarks,
    )


def _as_slice(recipe: MergeRecipe) -> OutputSlice:
    """A merge of whole models as one slice of all layers."""
    sources = [
        SliceSource(model=entry.model, layer_range=[0, 0], parameters=entry.parameters)
        for entry in recipe.models or []
    ]
    named = {source.model for source in sources}
    # mergekit counts a base that is not listed among the models of these methods, too.
    as_input = METHOD_RULES[recipe.merge_method].base == "input" and recipe.spoken == "mergekit"
    if recipe.base_model and recipe.base_model not in named and as_input:
        sources.append(SliceSource(model=recipe.base_model, layer_range=[0, 0]))
    return OutputSlice(sources=sources)


class _Planner:
    def __init__(
        self,
        recipe: MergeRecipe,
        models: list[MergeModel],
        base: MergeModel,
        layers: LayerNames,
        vocabulary: Vocabulary | None,
    ) -> None:
        self.recipe, self.models, self.base, self.layers, self.vocabulary = (
            recipe,
            models,
            base,
            layers,
            vocabulary,
        )
        self.numbers = {model.id: number for number, model in enumerate(models)}
        self.rule: MethodRule = METHOD_RULES[recipe.merge_method]
        self.faults: list[Fault] = []

    def sliced(self, slices: Sequence[OutputSlice]) -> tuple[list[OutputTensor], list[int]]:
        """Tensors before the layers, of each layer, and after them; and which layer each layer's configuration is from."""
        prefix = main_stack(self.base, self.layers)
        outside = [name for name in self.base.entries if self.layers.layer_of(name) is None]
        tensors = [self.tensor(name, name, slices[0], 0.0, None) for name in outside if is_embedding(name)]
        order: list[int] = []
        for number, piece in enumerate(slices):
            starts = [source.layer_range[0] for source in piece.sources]
            n = piece.sources[0].layer_range[1] - starts[0]
            if not self._layers_exist(piece, number):
                continue
            inside, *others = (
                self._by_layer(self.models[self.numbers[source.model]], prefix) for source in piece.sources
            )
            for step in range(n):
                position = step / (n - 1) if n > 1 else 1.0
                layer = inside.get(starts[0] + step, [])
                for source, theirs in zip(piece.sources[1:], others, strict=True):
                    self._refuse_extra(source, prefix, source.layer_range[0] + step, theirs, layer)
                for rest in layer:
                    name = f"{prefix}.{len(order)}.{rest}"
                    names = [f"{prefix}.{start + step}.{rest}" for start in starts]
                    tensors.append(self.tensor(name, names[0], piece, position, names))
                order.append(starts[0] + step)
        tensors += [
            self.tensor(name, name, slices[-1], 0.0, None) for name in outside if not is_embedding(name)
        ]
        return tensors, order

    def _by_layer(self, model: MergeModel, prefix: str) -> dict[int, list[str]]:
        """Layer -> ends of the names of its tensors; layers of one model need not be alike."""
        names: dict[int, list[str]] = {}
        for name in model.entries:
            if (found := self.layers.layer_of(name)) is not None and found[0] == prefix:
                names.setdefault(found[1], []).append(found[2])
        return names

    def _refuse_extra(
        self, source: SliceSource, prefix: str, layer: int, theirs: dict[int, list[str]], known: list[str]
    ) -> None:
        """A tensor that the first source of a slice lacks would be left out without a word."""
        extra = [rest for rest in theirs.get(layer, []) if rest not in known]
        if extra:
            what = f"{source.model} has also {prefix}.{layer}.{extra[0]}, which the first source of its slice lacks"
            self._refuse(what, "merge layers of models that have the same base", source.model)

    def idle_filters(self, tensors: Sequence[OutputTensor]) -> list[str]:
        """Filters that fit no tensor, mistyped as a rule: faults in our recipes, remarks where mergekit ignores them."""
        names = {t.planned.name for t in tensors} | {s.tensor for t in tensors for s in t.sources}
        idle = [text for text in filters_in(self.recipe) if not any(text in name for name in names)]
        told = [f"the filter '{text}' fits no tensor, so its value has no effect" for text in idle]
        if self.recipe.merge != 1:
            return told
        for what in told:
            self._refuse(what, f"write a part of a name, such as mlp or {min(names, key=len)}")
        return []

    def _layers_exist(self, piece: OutputSlice, number: int) -> bool:
        found = True
        for source in piece.sources:
            n = self.models[self.numbers[source.model]].n_layers
            if source.layer_range[1] > n:
                what = (
                    f"slice {number + 1} takes layers {source.layer_range} of {source.model}, which has {n}"
                )
                self.faults.append(
                    Fault(what, "slices", fix=f"layers are numbered from 0; the last range ends at {n}")
                )
                found = False
        return found

    def tensor(
        self, name: str, like: str, piece: OutputSlice, position: float, names: list[str] | None
    ) -> OutputTensor:
        """One output tensor. `like` is a tensor of the base with its shape and type; `names` its name in each source."""
        base_id = piece.base_model or self.recipe.base_model
        given = [
            (
                source,
                Source(self.numbers[source.model], names[i] if names else self._name(source.model, name)),
            )
            for i, source in enumerate(piece.sources)
        ]
        base: Source | None = None
        if base_id is not None and self.rule.base in ("deltas", "optional", "end"):
            own = [place for source, place in given if source.model == base_id]
            base = own[0] if own else Source(self.numbers[base_id], self._name(base_id, like))
            given = [(source, place) for source, place in given if source.model != base_id]
        entry = self._entry(name, [place for _, place in given] + ([base] if base else []))
        shape = entry.shape
        dtype = self.base.entries[like].dtype if like in self.base.entries else entry.dtype
        aligned = self.vocabulary is not None and is_vocabulary(name)
        if aligned and self.vocabulary is not None:
            shape = (self.vocabulary.n_rows, *shape[1:])
        copied = not dtype.is_floating_point
        wanted = TYPES.get(self.recipe.out_dtype or self.recipe.dtype or "", dtype)
        settings = self._settings(
            name, piece, [source for source, _ in given], [p.tensor for _, p in given], position
        )
        inputs = tuple(place for _, place in given)
        if copied:
            base, inputs = None, (base or inputs[0],)
        return OutputTensor(
            PlannedTensor(name, dtype if copied else wanted, shape), base, inputs, settings, aligned, copied
        )

    def _entry(self, name: str, places: list[Source]) -> TensorEntry:
        """The first source's entry; sources that are absent or of other shapes are faults."""
        found = [(place, self.models[place.model].entries.get(place.tensor)) for place in places]
        first = next((entry for _, entry in found if entry is not None), None)
        for place, entry in found:
            model = self.models[place.model].id
            if entry is None:
                self._refuse(
                    f"{model} has no tensor {place.tensor}",
                    "check the models and layers of the recipe",
                    model,
                )
            elif (
                first is not None and entry.shape[is_vocabulary(name) :] != first.shape[is_vocabulary(name) :]
            ):
                what = f"{place.tensor} of {model} has the shape {list(entry.shape)}, another source {list(first.shape)}"
                self._refuse(what, "merge layers of models of one size", model)
            elif first is not None and entry.shape != first.shape and self.vocabulary is None:
                what = f"{place.tensor} of {model} has {entry.n_rows} rows, another source {first.n_rows}"
                self._refuse(
                    what, "align the rows by token: tokenizer: {source: union}, or source: base", model
                )
        return first if first is not None else next(iter(self.base.entries.values()))

    def _name(self, model: str, name: str) -> str:
        return source_name(self.models[self.numbers[model]], name)

    def _settings(
        self, name: str, piece: OutputSlice, sources: list[SliceSource], names: list[str], position: float
    ) -> Settings:
        shared_scopes = [piece.parameters, self.recipe.parameters]

        def shared(key: str) -> Value | None:
            return lookup(key, shared_scopes, name, position) if key in self.rule.shared else None

        def each(key: str) -> tuple[float, ...]:
            if key not in self.rule.per_model:
                return (DEFAULTS[key],) * len(sources)
            found = []
            for source, tensor in zip(sources, names, strict=True):
                scopes: Iterable[Parameters] = [source.parameters, *shared_scopes]
                value = lookup(key, scopes, tensor, position)
                found.append(float(DEFAULTS[key] if value is None else value))
            return tuple(found)

        settings = Settings(
            dialect=self.recipe.spoken,
            weight=each("weight"),
            density=each("density"),
            gamma=each("gamma"),
            epsilon=each("epsilon"),
            scale=each("scale"),
            streams=tuple(stream(self.recipe.seed, name, i) for i in range(len(sources))),
        )
        given: dict[str, Any] = {
            "lambda_": _float(shared("lambda")),
            "t": _float(shared("t")),
            "select_topk": _float(shared("select_topk")),
            "tol": _float(shared("tol")),
            "max_iter": None if (value := shared("max_iter")) is None else int(value),
            **{
                key: None if (flag := shared(key)) is None else bool(flag)
                for key in ("normalize", "rescale", "filter_wise", "nuslerp_row_wise", "nuslerp_flatten")
            },
        }
        settings = replace(settings, **{key: value for key, value in given.items() if value is not None})
        self._check(name, settings)
        return settings

    def _check(self, name: str, settings: Settings) -> None:
        method = self.recipe.merge_method
        zero = (
            method in ("linear", "karcher")
            and settings.normalize is not False
            and abs(sum(settings.weight)) <= _NO_SUM * sum(map(abs, settings.weight))
        )
        if zero and not any(
            " sum to zero" in fault.what for fault in self.faults
        ):  # of all tensors, as a rule
            what = f"the weights of {name} sum to zero (the first such tensor)"
            self._refuse(what, "give weights with another sum, or normalize: false")
        if method.startswith("della"):
            for density, epsilon in zip(settings.density, settings.epsilon, strict=True):
                if 0 < density < 1 and not (epsilon < density < 1 - epsilon):
                    head = f"density {density:g} ± epsilon {epsilon:g}"
                    if not any(fault.what.startswith(head) for fault in self.faults):
                        what = f"{head} leaves the range of probabilities (the first such tensor: {name})"
                        self._refuse(what, "choose a smaller epsilon")

    def _refuse(self, what: str, fix: str, where: str = "parameters") -> None:
        if len(self.faults) < 5:
            self.faults.append(Fault(what, where, fix=fix))


def _float(value: Value | None) -> float | None:
    return None if value is None else float(value)
