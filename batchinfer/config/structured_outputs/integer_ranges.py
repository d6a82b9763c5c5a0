"""Patterns of the integers between two bounds, however large these are."""


def integer_range(lowest: int | None, highest: int | None) -> str:
    """Return a regex of the integers from `lowest` to `highest`, both included, as JSON writes them.

    Args:
        lowest: None: there is no bound.
        highest: None, or at least `lowest`.
    """
    parts = []
    if lowest is None or lowest < 0:
        parts += [f"-(?:{part})" for part in _natural(max(1, -highest) if highest is not None else 1, _minus(lowest))]
    if highest is None or highest >= 0:
        parts += _natural(max(0, lowest or 0), highest)
    return "|".join(parts)


def _minus(number: int | None) -> int | None:
    return None if number is None else -number


def _natural(lowest: int, highest: int | None) -> list[str]:
    """Return patterns that together are the integers from a number of at least 0 on."""
    if lowest == 0:
        return ["0", *(_natural(1, highest) if highest != 0 else ())]
    first = len(str(lowest))
    last = first if highest is None else len(str(highest))
    parts = []
    for num_digits in range(first, last + 1):
        least, most = 10 ** (num_digits - 1), 10**num_digits - 1
        parts.append(_between(str(max(lowest, least)), str(most if highest is None else min(highest, most))))
    return parts if highest is not None else [*parts, f"[1-9][0-9]{{{first},}}"]


def _between(low: str, high: str) -> str:
    """Return the pattern of the texts of digits between two that are equally long."""
    if low == high:
        return low
    rest = len(low) - 1
    if low[0] == high[0]:
        return low[0] + f"(?:{_between(low[1:], high[1:])})"
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(f"{first}(?:{_between(low[1:], '9' * rest)})")
        first += 1
    if high[1:].strip("9"):
        parts.append(f"{last}(?:{_between('0' * rest, high[1:])})")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)
