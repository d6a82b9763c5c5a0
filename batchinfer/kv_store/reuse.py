"""The rule of [kv] reuse: whether reading KV from disk is still worthwhile. Pure logic."""

from typing import Literal

TRIAL_BYTES = 64_000_000  # a verdict needs at least this many


class ReuseRule:
    """The rule: read by default; with "auto" stop after a trial of reads that took longer than computing.

    A trial is at least TRIAL_BYTES long, and each successful trial is followed by another, so that a disk that becomes
    slow is found. The verdict is final for this process: the cause of slow reads is seldom gone within a job.
    """

    def __init__(self, reuse: Literal["auto", "always"]) -> None:
        self._can_end = reuse == "auto"
        self.is_worthwhile = True
        self._num_bytes = 0
        self._read_s = 0.0
        self._compute_s = 0.0

    def note(self, *, num_bytes: int, read_s: float, num_tokens: int, compute_s_per_token: float) -> bool:
        """Add one read to the trial; return whether reading is still worthwhile.

        Args:
            num_bytes: read from disk.
            read_s: that computation waited for the read and for copying into pages; reads that were done in time cost
                nothing.
            num_tokens: whose KV was read.
            compute_s_per_token: current time to compute one token.
        """
        self._num_bytes += num_bytes
        self._read_s += read_s
        self._compute_s += num_tokens * compute_s_per_token
        if self._can_end and self.is_worthwhile and self._num_bytes >= TRIAL_BYTES:
            self.is_worthwhile = self._read_s <= self._compute_s
            self._num_bytes, self._read_s, self._compute_s = 0, 0.0, 0.0
        return self.is_worthwhile
