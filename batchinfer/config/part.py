"""Base class and common types of the parts of a TOML file: a job, or the specification of a simulated cluster."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

INT64_MAX = 2**63 - 1

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=INT64_MAX)]


class Part(BaseModel):
    """A part of a TOML file, frozen and strict: unknown keys, wrong types, NaN and infinities are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
