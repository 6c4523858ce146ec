"""What a run does by itself when its loss diverges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from finetune.recipe.section import Count, Section

OnDivergence = Literal["stop", "rewind"]


class RewindSection(Section):
    """The remedy of `on_divergence: rewind`: back to the last good checkpoint, and something else from there on."""

    remedy: Literal["halve_rate", "skip_rows"] = Field(
        "halve_rate",
        description="`halve_rate`: half the learning rate from that checkpoint to the end. `skip_rows`: the rows of the step where the "
        "loss began to rise, and of the one before, carry no loss any more (SFT).",
    )
    at_most: Count = Field(3, description="Times; the next divergence stops the run.")
