"""Reports on bit equality: whether a row's bits depend on the rows that it is batched with.

Each rank measures this for its own kernels (rank/bit_equality.py). A row must not depend on the rank that computed it
either, so bit equality of a run is unknown if its ranks round differently.
"""

from collections.abc import Iterable
from dataclasses import dataclass

UNEQUAL = "answers may depend on what rows are batched with"
_AND = " + "


@dataclass(frozen=True, slots=True)
class EqualRows:
    """Bit equality of the rows of a rank, a session or a run.

    bit_equal: whether equal rows get equal bits in every batch; None if unknown.
    bit_equal_reason: why `bit_equal` is False or None, and the remedy; None if it is True.
    processor: name and vector units in use; different ones are joined by " + ". None: no rank has computed anything.
    numerics: kernels and machine that decide the rounding: ranks with equal `numerics` compute equal bits. Different
        ones are joined as in `processor`.
    """

    bit_equal: bool | None = None
    bit_equal_reason: str | None = None
    processor: str | None = None
    numerics: str | None = None


def combine(reports: Iterable[EqualRows]) -> EqualRows:
    """Return one report for several: False if any is False, else None if any is None or their numerics differ."""
    parts = list(reports)
    processor, numerics = _distinct(one.processor for one in parts), _distinct(one.numerics for one in parts)
    for answer in (False, None):
        reasons = [one.bit_equal_reason for one in parts if one.bit_equal is answer]
        if reasons:
            return EqualRows(answer, next((reason for reason in reasons if reason), None), processor, numerics)
    if numerics is not None and not is_of_one_kind(numerics):
        reason = f"rows were computed with {numerics}, which may round differently; use machines of one kind"
        return EqualRows(None, reason, processor, numerics)
    return EqualRows(True if parts else None, None, processor, numerics)


def is_of_one_kind(numerics: str | None) -> bool:
    """Return whether all ranks that computed something round alike, as far as is known."""
    return numerics is not None and _AND not in numerics


def _distinct(texts: Iterable[str | None]) -> str | None:
    parts = dict.fromkeys(part for text in texts if text for part in text.split(_AND))
    return _AND.join(parts) or None
