"""Reasoning effort, as OpenAI's requests ask for it, in the variables by which chat templates switch thinking."""

from collections.abc import Container

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LEVEL, _SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")
EFFORT_VARIABLES = (_LEVEL, *_SWITCHES)


def effort_variables(effort: str, names: Container[str]) -> dict[str, str | bool]:
    """Return the template's variables for an effort; {} if the template has no such variable.

    A template with levels gets the level as it is. A switch is off for "none" and on for every other effort.

    Args:
        effort: one of EFFORTS.
        names: the variables that the template reads.
    """
    found: dict[str, str | bool] = {name: effort != "none" for name in _SWITCHES if name in names}
    if _LEVEL in names and not (found and effort == "none"):
        found[_LEVEL] = effort
    return found
