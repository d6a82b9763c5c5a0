"""Whether reading KV from disk is still worth it: the rule of [kv] reuse, pure logic."""

from typing import Literal

TRIAL_BYTES = 64_000_000  # a verdict needs at least this many


class ReuseRule:
    """Reading is the default; with "auto" it ends after a trial of reads that took longer than computing would have.

    A trial is at least TRIAL_BYTES long and begins anew after each that was worthwhile, so that a disk that becomes
    slow is noticed. The verdict is final for this process: what made reads slow is seldom gone within a job.
    """

    def __init__(self, reuse: Literal["auto", "always"]) -> None:
        self._can_end = reuse == "auto"
        self.is_worthwhile = True
        self._num_bytes = 0
        self._read_s = 0.0
        self._compute_s = 0.0

    def note(self, *, num_bytes: int, read_s: float, num_tokens: int, compute_s_per_token: float) -> bool:
        """Learn from one read; returns whether reading is still worthwhile.

        Args:
            num_bytes: read from disk.
            read_s: that computation waited for them and for copying them into pages; reads ahead that were done in
                time cost nothing.
            num_tokens: whose KV they held.
            compute_s_per_token: what computing one of them takes at present.
        """
        self._num_bytes += num_bytes
        self._read_s += read_s
        self._compute_s += num_tokens * compute_s_per_token
        if self._can_end and self.is_worthwhile and self._num_bytes >= TRIAL_BYTES:
            self.is_worthwhile = self._read_s <= self._compute_s
            self._num_bytes, self._read_s, self._compute_s = 0, 0.0, 0.0
        return self.is_worthwhile
