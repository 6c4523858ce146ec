"""What every section of a recipe is built from."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: immutable, and closed so that a typing error is never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
