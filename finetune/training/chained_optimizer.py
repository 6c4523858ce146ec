"""Several optimizers, each over its own parameters, behind the face of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class ChainedOptimizer(torch.optim.Optimizer):
    """Steps `parts` one after another. Their parameter groups are shared, so that one schedule sets every rate."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        if not parts:
            raise ValueError("there is no parameter to optimize")
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], parts[0].defaults)
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of every part. There is no closure: the gradients are there already."""
        assert closure is None
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """{"parts": the state of each}."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()
