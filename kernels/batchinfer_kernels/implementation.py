"""What a candidate declares of an operation that it has: its function, and which arguments that does not take."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Implementation(Generic[P, R]):
    """One version of an operation; the reference's function of the same name says what the parameters mean.

    run: gives nothing good for arguments that `refuses` names a reason for; the registry asks before each call.
    refuses: gets the same arguments; one short sentence, without their values, why `run` cannot take them, or None. The
        first line of its docstring says what it does not take.
    uses: other operations that `run` takes as keywords of their names.
    """

    run: Callable[P, R]
    refuses: Callable[..., str | None]
    uses: tuple[str, ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it by itself.

        Raises:
            RuntimeError: it refuses the arguments, with its reason.
        """
        reason = self.refuses(*args, **kwargs)
        if reason is not None:
            raise RuntimeError(reason)
        return self.run(*args, **kwargs)

    @property
    def not_taken(self) -> str:
        """What it does not take, whatever the call."""
        return (self.refuses.__doc__ or "").partition("\n")[0].rstrip(".")


def refusing(
    refuses: Callable[..., str | None], *, uses: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Implementation[P, R]]:
    """A decorator: this function is an implementation, and that is what it refuses."""
    return lambda run: Implementation(run, refuses, uses)


def at(refuses: Callable[..., str | None], *places: int) -> Callable[..., str | None]:
    """What it refuses of the arguments at these places alone, which callers give by position."""

    # one place alone would be picked without a tuple around it
    pick = itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))

    def refuses_some(*args: Any, **_: Any) -> str | None:
        return refuses(*pick(args))

    return functools.wraps(refuses)(refuses_some)


def nothing(*_: Any, **__: Any) -> None:
    """Nothing."""
