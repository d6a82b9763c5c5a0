"""What the parts of a TOML file have in common: a job's, or that of a cluster on paper."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

INT64_MAX = 2**63 - 1

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=INT64_MAX)]


class Part(BaseModel):
    """Strict and frozen: unknown keys, wrong types, NaN and infinities are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
