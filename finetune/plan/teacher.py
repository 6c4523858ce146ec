"""What a teacher adds to the memory of a training: its weights, when it runs beside the student, and its pass over each batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.plan.activations import Tuning
from finetune.plan.architecture import Architecture, read_architecture
from finetune.plan.states import BYTES_PER_ELEMENT, Quantization
from finetune.plan.weights import forward_bytes, weight_terms
from finetune.recipe.schema import DistilSection, Recipe

# The loss makes logits for this many at a time (finetune/distil/losses.py), and so many tensors of their size in fp32:
# both models' logits and log-probabilities, their difference and product, and gradients.
_CHUNK_LOGITS = 1 << 22
_LOSS_TENSORS = 8


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    """A teacher as memory sees it: config.json, how its weights are held, and elements of an adapter in fp32."""

    config: Mapping[str, Any]
    dtype: str = "bf16"
    quantize: Quantization = "none"
    double_quantization: bool = True
    adapter_parameters: int = 0

    def held_bytes(self) -> int:
        """Weights, constants and adapter."""
        architecture = read_architecture(self.config)
        terms = weight_terms(
            architecture, BYTES_PER_ELEMENT[self.dtype], self.quantize, self.double_quantization
        )
        return sum(terms.values()) + 4 * self.adapter_parameters

    def hidden_bytes(self, n_targets: int) -> int:
        """Last hidden states at the targets, of which the loss makes logits."""
        return n_targets * read_architecture(self.config).hidden * BYTES_PER_ELEMENT[self.dtype]

    def pass_bytes(self, n_tokens: int) -> int:
        """Alive at once in its forward pass without gradients: one layer's tensors and the last hidden states."""
        architecture, c = read_architecture(self.config), BYTES_PER_ELEMENT[self.dtype]
        return n_tokens * (forward_bytes(architecture, c) + architecture.hidden * c)

    def add_to(
        self, terms: dict[str, int], moments: dict[str, dict[str, int]], n_tokens: int, n_targets: int
    ) -> None:
        """What is held at every moment of a step, and the moment in which the teacher reads the batch, before the student."""
        terms["teacher"] = self.held_bytes() + self.hidden_bytes(n_targets)
        moments["teacher's pass"] = moments["loss"] | {"activations": self.pass_bytes(n_tokens), "logits": 0}


def runs_beside(recipe: Recipe) -> DistilSection | None:
    """The section of a recipe whose teacher is in memory while the student trains."""
    section = recipe.distil
    return section if section is not None and section.way != "answers" and section.targets == "live" else None


def loss_bytes(architecture: Architecture, tuning: Tuning, n_targets: int) -> int:
    """Transient bytes of a distillation loss: a chunk of logits of both models, and gradients of states and head."""
    vocabulary, hidden = architecture.vocabulary, architecture.hidden
    n_chunk = min(n_targets, max(8, _CHUNK_LOGITS // vocabulary))
    head = 4 * architecture.head_parameters if tuning.kind == "none" else 0
    return _LOSS_TENSORS * n_chunk * vocabulary * 4 + head + 2 * n_targets * hidden * tuning.compute_bytes
