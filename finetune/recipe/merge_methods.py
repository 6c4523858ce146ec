"""What each merge method reads and needs: the table that recipes are checked against. The methods are in `merge/methods`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dialect = Literal["paper", "mergekit", "peft"]
MethodName = Literal[
    "linear", "passthrough", "slerp", "nuslerp", "karcher", "model_stock", "sce", "task_arithmetic", "ties",
    "dare_linear", "dare_ties", "della", "della_linear", "breadcrumbs", "breadcrumbs_ties",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class MethodRule:
    """`per_model` and `shared` name the parameters it reads; `n_models` bounds the models without the base.

    `base`: 'deltas' a base is needed, 'optional' deltas are taken where there is one, 'input' it is a model like the others,
    'end' it is the end t = 0, 'unused' it gives only configuration and tokenizer.
    """

    per_model: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    base: Literal["deltas", "optional", "input", "end", "unused"] = "deltas"
    n_models: tuple[int, int] = (1, 10**6)
    has_peft: bool = False

    @property
    def reads(self) -> frozenset[str]:
        return frozenset((*self.per_model, *self.shared))


_FUSED = ("normalize", "rescale", "lambda")
_SPARSE = MethodRule(("weight", "density"), _FUSED)
_SPARSE_PEFT = MethodRule(("weight", "density"), _FUSED, has_peft=True)
_DELLA = MethodRule(("weight", "density", "epsilon"), _FUSED)
_CRUMBS = MethodRule(("weight", "density", "gamma"), _FUSED)

METHOD_RULES: dict[str, MethodRule] = {
    "linear": MethodRule(("weight",), ("normalize",), "input"),
    "passthrough": MethodRule(("scale",), (), "unused", (1, 1)),
    "slerp": MethodRule((), ("t",), "end", (1, 1)),
    "nuslerp": MethodRule(("weight",), ("nuslerp_row_wise", "nuslerp_flatten"), "optional", (2, 2)),
    "karcher": MethodRule(("weight",), ("max_iter", "tol"), "input"),
    "model_stock": MethodRule((), ("filter_wise",), "deltas", (2, 10**6)),
    "sce": MethodRule((), ("select_topk",), "deltas"),
    "task_arithmetic": MethodRule(("weight",), ("normalize", "lambda")),
    "ties": _SPARSE_PEFT,
    "dare_linear": _SPARSE_PEFT,
    "dare_ties": _SPARSE_PEFT,
    "della": _DELLA,
    "della_linear": _DELLA,
    "breadcrumbs": _CRUMBS,
    "breadcrumbs_ties": _CRUMBS,
}

DEFAULTS: dict[str, float] = {"weight": 1.0, "density": 1.0, "gamma": 0.01, "epsilon": 0.15, "scale": 1.0}
"""Per-model parameters that a recipe does not give; mergekit's, but that it asks for every weight."""
