"""Every merge method by the name that recipes use."""

from __future__ import annotations

from finetune.merge.methods import task_vectors
from finetune.merge.methods.chunk import Method
from finetune.merge.methods.linear import linear, passthrough
from finetune.merge.methods.model_stock import model_stock
from finetune.merge.methods.sce import sce
from finetune.merge.methods.spherical import karcher, nuslerp, slerp

METHODS: dict[str, Method] = {
    "linear": linear,
    "passthrough": passthrough,
    "slerp": slerp,
    "nuslerp": nuslerp,
    "karcher": karcher,
    "model_stock": model_stock,
    "sce": sce,
    "task_arithmetic": task_vectors.task_arithmetic,
    "ties": task_vectors.ties,
    "dare_linear": task_vectors.dare_linear,
    "dare_ties": task_vectors.dare_ties,
    "della": task_vectors.della,
    "della_linear": task_vectors.della_linear,
    "breadcrumbs": task_vectors.breadcrumbs,
    "breadcrumbs_ties": task_vectors.breadcrumbs_ties,
}
