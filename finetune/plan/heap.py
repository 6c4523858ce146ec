"""What a CPU's heap keeps beside the tensors in use: blocks that were freed and stay with the process.

While a model trains, blocks of half a megabyte and more are mapped one by one and are gone once they are freed
(`model/memory.py`), so activations leave no holes. Adapters consist of smaller tensors. Compared with whole runs by
benchmarks/memory_forecast.py.
"""

from __future__ import annotations

from finetune.plan.activations import Tuning
from finetune.plan.architecture import Architecture

# The smallest block that is mapped by itself in training.
MAPPED_FROM_BYTES = 1 << 19
# Of what an update leaves in the heap, the share that the next step's small activations do not settle in: 38 to 84 MB beside
# 78 MB, whatever the length (adapters of rank 32); 43 MB beside 171 MB (rank 128).
_LEFT_OPEN = 0.5
# Answers are generated with a heap that keeps what is freed: 239 MB of holes beside 735 MB of activations.
_GENERATION_HOLES = 0.32


def update_holes_bytes(architecture: Architecture, tuning: Tuning) -> int:
    """Holes that an optimizer step leaves between the states of an adapter: its gradients, and the copies that tell how
    far the weights moved, as far as they are small tensors. Weights trained whole are large ones."""
    if tuning.kind == "none":
        return 0
    matrices = [4 * tuning.rank * size for linear in tuning.adapted for size in (linear.n_in, linear.n_out)]
    small = architecture.n_layers * sum(size for size in matrices if size < MAPPED_FROM_BYTES)
    return round(_LEFT_OPEN * 2 * small)


def generation_holes_bytes(activations: int) -> int:
    """Holes beside `activations` bytes of a forward pass while answers are generated."""
    return round(_GENERATION_HOLES * activations)
