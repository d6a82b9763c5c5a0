"""The type of answers for editors and type checkers: a pyarrow.Table, whose library has no types of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:

    class Answers(pa.Table):  # type: ignore[misc, unused-ignore]
        """A pyarrow.Table with the columns of outputs/; the methods named here are those of most callers."""

        num_rows: int
        column_names: list[str]

        def __len__(self) -> int: ...
        def __getitem__(self, name: str | int) -> Any: ...
        def select(self, columns: list[str]) -> Answers: ...
        def filter(self, mask: Any) -> Answers: ...
        def slice(self, offset: int = 0, length: int | None = None) -> Answers: ...
        def to_pylist(self) -> list[dict[str, Any]]: ...
        def to_pydict(self) -> dict[str, list[Any]]: ...
        def to_pandas(self) -> Any: ...

else:
    Answers = pa.Table
