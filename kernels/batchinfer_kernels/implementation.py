"""The declaration of an implementation: its function, the arguments it rejects, and the operations it uses."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Implementation(Generic[P, R]):
    """One version of an operation; the reference's function of the same name documents the parameters.

    run: the function; its result is undefined for arguments that `rejects` gives a reason for. The registry asks first.
    rejects: takes the same arguments and returns one short sentence, without values, why `run` cannot take them, or
        None. The first line of its docstring, "Reject ARGUMENTS.", lists these; `doctor` prints ARGUMENTS.
    uses: other operations that `run` takes as keywords of their names.
    """

    run: Callable[P, R]
    rejects: Callable[..., str | None]
    uses: tuple[str, ...] = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run this implementation without the registry.

        Raises:
            RuntimeError: the arguments are rejected, with the reason.
        """
        reason = self.rejects(*args, **kwargs)
        if reason is not None:
            raise RuntimeError(reason)
        return self.run(*args, **kwargs)

    @property
    def rejected_arguments(self) -> str:
        """The arguments that every call rejects, as `rejects` lists them."""
        return (self.rejects.__doc__ or "").partition("\n")[0].removeprefix("Reject ").rstrip(".")


def implementation(
    *, rejects: Callable[..., str | None], uses: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Implementation[P, R]]:
    """Decorate a function as the `run` of an Implementation."""
    return lambda run: Implementation(run, rejects, uses)


def on_args(rejects: Callable[..., str | None], *indices: int) -> Callable[..., str | None]:
    """Apply `rejects` only to the positional arguments with these indices."""

    # itemgetter of one index alone returns the item, not a tuple
    pick = itemgetter(*indices) if len(indices) > 1 else itemgetter(slice(indices[0], indices[0] + 1))

    def rejects_some(*args: Any, **_: Any) -> str | None:
        return rejects(*pick(args))

    return functools.wraps(rejects)(rejects_some)


def accepts_all(*_: Any, **__: Any) -> None:
    """Reject nothing."""
