"""The error for a lost rank; reports of all ranks and exits of their processes give the cause."""

from batchinfer.protocol.messages import Failed
from batchinfer.records import BatchinferError, ConfigError, ModelError, PeerLostError, StoreError

# errors of a rank that end the job: no request is the cause, and a restarted rank would fail again
REFUSALS: dict[str, type[BatchinferError]] = {kind.__name__: kind for kind in (ConfigError, ModelError, StoreError)}


class RanksDiedError(Exception):
    """A rank was lost and all ranks were ended; the message names the rank and the cause.

    has_reason: whether the rank itself reported the cause.
    """

    def __init__(self, text: str, *, has_reason: bool = False) -> None:
        super().__init__(text)
        self.has_reason = has_reason


def cause_of_death(said: dict[int, Failed], ended: dict[int, str], silent: list[int]) -> Exception:
    """Return the error that ended the ranks.

    Args:
        said: the error that each rank reported.
        ended: the end of each local process, as text.
        silent: connected ranks that reported nothing.
    """
    for message in said.values():
        if message.error_class in REFUSALS:
            return REFUSALS[message.error_class](message.error)
    # a rank that complains about another one is not the cause
    culprits = {rank: how for rank, how in ended.items() if rank not in said}
    if culprits:
        return RanksDiedError("; ".join(f"rank {rank} {how}" for rank, how in culprits.items()))
    for rank, message in said.items():
        if message.error_class != PeerLostError.__name__:
            return RanksDiedError(f"rank {rank} failed: {message.error}", has_reason=True)
    for rank, message in said.items():
        return RanksDiedError(f"rank {rank}: {message.error}")
    return RanksDiedError(f"the connection to one of the ranks {', '.join(map(str, silent))} was lost")
