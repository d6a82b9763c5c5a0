"""Space for new files below the store's bound: the files of least worth are evicted first.

Ranking all files of a large store takes a second or so. So one ranking serves for many files, up to one in RANKED_SHARE
of the ranked ones; files claimed since are skipped. In a small store each new file causes a ranking.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from batchinfer.kv_store.block_file import FileName
from batchinfer.kv_store.next_uses import BlockClaims
from batchinfer.kv_store.space_ledger import SpaceLedger, open_ledger
from batchinfer.kv_store.store_dir import StoredFile, StoreDir, quarantined_files, stored_files

Worth = tuple[int, float, int]  # kind, last use or minus the next use, minus the index in the chain: lowest goes first
NextUse = Callable[[bytes], int | None]  # of a block by its short name, over all live runs; None: not needed


def worth_of(name: FileName, next_use: int | None, last_use_s: float) -> Worth:
    """Return the worth of a file without regard to its descendants."""
    if next_use is None:
        return 0, last_use_s, -name.first
    return 1, -float(next_use), -name.first


def rank_files(
    files: Iterable[StoredFile], last_use_s: Mapping[str, float], next_use: NextUse
) -> list[tuple[Worth, StoredFile]]:
    """Return all files in the order of eviction.

    Args:
        last_use_s: path -> Unix seconds; a file without an entry is gone.
    """
    # deepest first, so that a file's descendants have passed on their worth before its turn
    known = [(file, file.name) for file in files if file.name is not None and file.path in last_use_s]
    known.sort(key=lambda item: (-item[1].first, item[0].path))
    holder = {block: index for index, (_, name) in enumerate(known) for block in name.blocks}
    inherited: dict[int, Worth] = {}
    ranked: list[tuple[Worth, StoredFile]] = []
    for index, (file, name) in enumerate(known):
        worth = worth_of(name, earliest(name, next_use), last_use_s[file.path])
        if index in inherited and inherited[index] > worth:
            worth = (*inherited[index][:2], -name.first)
        ranked.append((worth, file))
        parent = holder.get(name.parent)
        if parent is not None:
            inherited[parent] = max(inherited.get(parent, worth), worth)
    ranked.sort(key=lambda item: (item[0], item[1].path))
    return ranked


def earliest(name: FileName, next_use: NextUse) -> int | None:
    """Return the earliest next use of a file's blocks; None if there is none."""
    return min((use for block in name.blocks if (use := next_use(block)) is not None), default=None)


RANKED_SHARE = 64
_WORTHLESS: Worth = (-1, 0.0, 0)  # damaged files
_PRICELESS: Worth = (2, 0.0, 0)


class SpaceManager:
    """Books space for files and evicts others for them.

    Args:
        max_bytes: bound of all files together; None: none.
        on_evicted: called with each file that was deleted for space.
    """

    def __init__(
        self,
        store: StoreDir,
        claims: BlockClaims,
        session: str,
        max_bytes: int | None,
        on_evicted: Callable[[StoredFile], None],
    ) -> None:
        self._store = store
        self._claims = claims
        self._session = session
        self._numbers = count()
        self._on_evicted = on_evicted
        self.max_bytes = max_bytes
        self._ranked: list[tuple[Worth, StoredFile]] = []  # the next to evict is last
        self._num_left = 0  # evictions for which the ranking may still be used

    def is_within_bound(self) -> bool:
        """Recount all files; return whether they are below the bound."""
        with open_ledger(self._store) as ledger:
            ledger.recount()
            return self._fits(ledger, 0)

    def book(self, name: FileName, num_bytes: int, ancestors: set[str]) -> tuple[int, str] | None:
        """Book space for one file; return a descriptor and the path to write to, or None if all files are worth more.

        Args:
            ancestors: names of the files with the blocks before it, which stay: without them the file is useless.

        Raises:
            LockTimeoutError, OSError: as in space_ledger.py.
        """
        worth = worth_of(name, earliest(name, self._claims.next_use), time.time())
        with open_ledger(self._store) as ledger:
            if self._fits(ledger, num_bytes) or (
                self._num_left > 0 and self._evict(ledger, num_bytes, worth, ancestors)
            ):
                return self._create(ledger, num_bytes)
        if self._num_left > 0 and self._ranked:
            self._num_left -= 1
            return None
        self._rank()
        with open_ledger(self._store) as ledger:
            ledger.recount()
            if self._evict(ledger, num_bytes, worth, ancestors):
                return self._create(ledger, num_bytes)
        return None

    def shrink(self) -> None:
        """Evict until all files are below the bound."""
        self._rank()
        with open_ledger(self._store) as ledger:
            ledger.recount()
            self._evict(ledger, 0, _PRICELESS, set())

    def _fits(self, ledger: SpaceLedger, num_bytes: int) -> bool:
        return self.max_bytes is None or ledger.used_bytes + num_bytes <= self.max_bytes

    def _create(self, ledger: SpaceLedger, num_bytes: int) -> tuple[int, str]:
        return ledger.create(num_bytes, f"{self._session}-{next(self._numbers)}")

    def _evict(self, ledger: SpaceLedger, num_bytes: int, worth: Worth, ancestors: set[str]) -> bool:
        """Delete ranked files of less worth than `worth` until `num_bytes` fit; return False if they do not."""
        while not self._fits(ledger, num_bytes):
            if not self._ranked or self._ranked[-1][0] >= worth:
                return False
            victim_worth, victim = self._ranked.pop()
            if self._may_go(victim, victim_worth, ancestors) and ledger.remove(victim.path, victim.num_bytes):
                self._num_left -= 1
                self._on_evicted(victim)
        return True

    def _may_go(self, file: StoredFile, worth: Worth, ancestors: set[str]) -> bool:
        """Return whether a ranked file is still worth no more than when it was ranked."""
        if file.name is None:
            return True
        next_use = earliest(file.name, self._claims.next_use)
        is_needed_sooner = next_use is not None and worth < (1, -float(next_use), -file.name.first)
        return not is_needed_sooner and str(file.name) not in ancestors

    def _rank(self) -> None:
        self._claims.read_others()
        files = list(stored_files(self._store))
        last_use_s = {}
        for file in files:
            try:
                last_use_s[file.path] = os.stat(file.path).st_mtime
            except FileNotFoundError:  # evicted by another process
                continue
        ranked = [(_WORTHLESS, file) for file in quarantined_files(self._store)]
        ranked += rank_files(files, last_use_s, self._claims.next_uses().get)
        self._ranked = ranked[::-1]
        self._num_left = len(ranked) // RANKED_SHARE
