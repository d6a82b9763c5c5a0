"""The amount of text that this process writes, as --quiet and --verbose set it."""

from enum import IntEnum


class Verbosity(IntEnum):
    """An amount of text on stderr, and on stdout at the end of a run."""

    QUIET = -1  # warnings and errors
    NORMAL = 0
    VERBOSE = 1  # progress more often, and the whole report


_verbosity = Verbosity.NORMAL


def set_verbosity(verbosity: Verbosity) -> None:
    """Set the amount of text of this process."""
    global _verbosity  # noqa: PLW0603
    _verbosity = verbosity


def is_quiet() -> bool:
    """Return whether only warnings and errors are written."""
    return _verbosity is Verbosity.QUIET


def is_verbose() -> bool:
    """Return whether more is written than usual."""
    return _verbosity is Verbosity.VERBOSE
