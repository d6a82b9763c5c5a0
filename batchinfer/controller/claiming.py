"""How a controller gets units and hands in results, wherever the run folder is kept."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from batchinfer.controller import bucket_claims, claims
from batchinfer.controller.bucket_claims import BucketClaims
from batchinfer.controller.claims import Claim, UnitClaims
from batchinfer.run.store.bucket import BucketStorage
from batchinfer.run.store.interface import Storage


class Claims(Protocol):
    """Units of this process, whose leases are kept alive within `with`.

    completed: units that it has completed.
    watch_s: seconds between tries for units that others hold; inf: when their leases may have run out.
    """

    completed: set[int]
    watch_s: float

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def try_claim(self, unit: int) -> Claim | None:
        """Take a unit unless it is done or somebody alive holds it."""

    def lapses_s(self, unit: int) -> float:
        """When, by the monotonic clock, the lease of a unit that others hold runs out unless it is renewed."""

    def add(self, claim: Claim, path: Path) -> None:
        """Make a result file in a claim's folder durable."""

    def commit(self, claim: Claim) -> None:
        """Have the result files that were added count for whoever goes on with the unit."""

    def complete(self, claim: Claim) -> None:
        """Mark the unit done with this claim's results; the first claim to say so counts."""

    def release(self, claim: Claim) -> None:
        """Give a unit back; what is committed in its claim stays and counts."""


def claims_in(storage: Storage) -> Claims:
    """The claims of a run folder where it is kept."""
    if isinstance(storage, BucketStorage):
        return BucketClaims(storage.run, storage.bucket)
    return UnitClaims(storage.run)


def offer_again(storage: Storage, unit: int, *, inherited: list[Path], fill: Callable[[Path], None]) -> bool:
    """Have whoever claims a unit next inherit other results than the last claim's; see claims.offer_again."""
    if isinstance(storage, BucketStorage):
        return bucket_claims.offer_again(storage.run, storage.bucket, unit, inherited=inherited, fill=fill)
    return claims.offer_again(storage.run, unit, inherited=inherited, fill=fill)
