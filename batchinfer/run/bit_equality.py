"""Whether a row of a run has the same bits whatever it is batched with: what ranks say, for sessions and runs.

A rank knows it of itself (rank/bit_equality.py). A row must not depend on which rank computed it either, so ranks
that round differently make it unknown.
"""

from collections.abc import Iterable
from dataclasses import dataclass

UNEQUAL = "answers may depend on what rows are batched with"
_AND = " + "


@dataclass(frozen=True, slots=True)
class EqualRows:
    """What a rank, a session or a run says of its rows.

    bit_equal: None where it is not known.
    bit_equal_reason: why it is false or not known, with what to do about it; None where it holds.
    processor: name and vector units in use; several different ones with " + " between them. None: nobody has computed.
    numerics: what rounds: where this is the same, a row gets the same bits. Several as in `processor`.
    """

    bit_equal: bool | None = None
    bit_equal_reason: str | None = None
    processor: str | None = None
    numerics: str | None = None


def together(said: Iterable[EqualRows]) -> EqualRows:
    """What all of them make: false if one is, else not known if one is not, or if they do not round alike."""
    all_said = list(said)
    processor, numerics = _distinct(one.processor for one in all_said), _distinct(one.numerics for one in all_said)
    for answer in (False, None):
        reasons = [one.bit_equal_reason for one in all_said if one.bit_equal is answer]
        if reasons:
            return EqualRows(answer, next((reason for reason in reasons if reason), None), processor, numerics)
    if numerics is not None and _AND in numerics:
        reason = f"rows were computed with {numerics}, which may round differently; use machines of one kind"
        return EqualRows(None, reason, processor, numerics)
    return EqualRows(True if all_said else None, None, processor, numerics)


def _distinct(texts: Iterable[str | None]) -> str | None:
    parts = dict.fromkeys(part for text in texts if text for part in text.split(_AND))
    return _AND.join(parts) or None
