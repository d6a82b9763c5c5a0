"""Choice of the unit that a controller tries to claim next.

With many controllers, checking every unit before each claim would take all their time. Instead a controller lists two
folders from time to time: units/ has a folder for each unit that was ever claimed, done/ a file for each done unit.

    plan    [ done )[ mine )[ free: continues here until it meets another's unit ... )[ held )[ free )
                                                                                    jumps ------^

Units that were unclaimed at the last listing come first, one after the other, since neighbours share prefixes. After
meeting another controller's unit, a controller continues at a random unit: so controllers spread over the plan and
rarely meet. Units that others hold are tried last, a few at each listing and between listings, since their leases may
have been released or have expired. The next try is at the second when the first of these leases would expire.
"""

import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.run.store.interface import Storage
from batchinfer.run.units.claims import Claim, UnitClaims

MISSES = 8  # units in a row that others claimed first: list again
MOST_WATCHED = 16  # units of others to try at each listing
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # between listings that find no unit


class OpenUnits:
    """Units of the plan as of the last listing: done, claimed or free.

    Args:
        rows: all units, rows of plan/units: unit U is the U-th.
        start: the unit to begin with; None: a random one, for controllers of which many start at once.
    """

    def __init__(self, storage: Storage, rows: list[dict[str, Any]], *, start: int | None = 0) -> None:
        self._storage, self._run, self._rows = storage, storage.run, rows
        self._random = random.Random()
        self._is_open = np.ones(len(rows), dtype=bool)  # not done at the last listing
        # by any controller, at any time: a listing may be older than what this controller has seen
        self._was_claimed = np.zeros(len(rows), dtype=bool)
        self._untried: np.ndarray = np.zeros(0, dtype=np.int64)  # sorted
        self._held: np.ndarray = np.zeros(0, dtype=np.int64)  # by any controller, at the last listing
        self._is_taken = np.zeros(len(rows), dtype=bool)  # by this controller, at any time
        self._done_elsewhere: list[int] = []  # units not returned yet
        self._reopened: list[int] = []
        self._num_completed = 0  # by this controller, at the last listing
        # two times: asking whether all is done must not delay the next claim
        self._list_again_s = self._ask_again_s = 0.0
        self._watch_again_s = math.inf
        self._pause_s = FIRST_PAUSE_S
        self._watched_from = self._random.randrange(max(1, len(rows)))  # random: controllers differ
        self._list()
        self._done_elsewhere = []
        # leases of units that were claimed before may have been released
        self._untried = np.flatnonzero(self._is_open)
        self._next = self._any_unit() if start is None else start

    @property
    def all_rows(self) -> list[dict[str, Any]]:
        """All units, done or not."""
        return self._rows

    @property
    def is_waiting(self) -> bool:
        """Whether all open units were held at the last listing."""
        return not len(self._untried) and self.num_open > 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The units that were not done at the last listing, in the plan's order."""
        return [self._rows[unit] for unit in np.flatnonzero(self._is_open)]

    @property
    def num_open(self) -> int:
        """Number of units that were not done at the last listing."""
        return int(self._is_open.sum())

    def claim(self, claims: UnitClaims, mine: set[int]) -> tuple[dict[str, Any], Claim] | None:
        """Claim a unit; return None if none is free now.

        Args:
            mine: units that this controller holds already.
        """
        found = self._claim_untried(claims)
        if found is not None or self._has_only(mine):
            return found
        if time.monotonic() >= self._list_again_s:
            self._list()
            found = self._claim_untried(claims) or self._claim_held(claims, mine)
            # the pause doubles: long waits tolerate longer pauses
            self._pause_s = FIRST_PAUSE_S if found is not None else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._list_again_s = time.monotonic() + self._pause_s
        elif time.monotonic() >= self._watch_again_s:
            found = self._claim_held(claims, mine)
        return found

    def are_all_done(self, completed: set[int]) -> bool:
        """Return whether all units are done.

        Args:
            completed: units that this controller has completed.
        """
        if len(self._untried):
            return False
        if self._is_open.any():
            has_done_the_last = self._has_only(completed) and len(completed) > self._num_completed
            if not has_done_the_last and time.monotonic() < self._ask_again_s:
                return False
            self._num_completed = len(completed)
            self._list()  # units may have been opened again
            self._ask_again_s = time.monotonic() + self._pause_s
        return not self._is_open.any()

    def take_done_elsewhere(self) -> list[int]:
        """Return the units that others have completed since the last call."""
        units, self._done_elsewhere = self._done_elsewhere, []
        return units

    def take_reopened(self) -> list[int]:
        """Return the units that were reopened since the last call."""
        units, self._reopened = self._reopened, []
        return units

    def _list(self) -> None:
        before = self._is_open
        self._is_open = ~_named(self._storage, self._run.done_marks, len(self._rows))
        if (self._is_open & ~self._was_claimed).any():  # the folder of a unit is never removed
            self._was_claimed |= _named(self._storage, self._run.unit_folders, len(self._rows))
        reopened = self._is_open & ~before
        self._reopened += np.flatnonzero(reopened).tolist()
        self._is_taken &= ~reopened
        self._done_elsewhere += np.flatnonzero(before & ~self._is_open & ~self._is_taken).tolist()
        self._untried = np.flatnonzero(self._is_open & ~self._was_claimed)
        self._held = np.flatnonzero(self._is_open & self._was_claimed)

    def _has_only(self, units: set[int]) -> bool:
        """Return whether every open unit is one of these."""
        return self.num_open <= len(units) and units.issuperset(np.flatnonzero(self._is_open).tolist())

    def _claim_untried(self, claims: UnitClaims) -> tuple[dict[str, Any], Claim] | None:
        misses = 0
        while len(self._untried):
            index = int(np.searchsorted(self._untried, self._next)) % len(self._untried)
            unit = int(self._untried[index])
            self._untried = np.delete(self._untried, index)
            claim = claims.try_claim(unit, is_new=not self._was_claimed[unit])
            self._was_claimed[unit] = True
            if claim is not None:
                self._next = unit + 1
                self._is_taken[unit] = True
                return self._rows[unit], claim
            misses += 1
            if misses % MISSES == 0:
                self._list()
            self._next = self._any_unit()
        return None

    def _claim_held(self, claims: UnitClaims, mine: set[int]) -> tuple[dict[str, Any], Claim] | None:
        """Try to take over units of other workers. Watch the same ones on each call: a lease must be seen unchanged."""
        first = int(np.searchsorted(self._held, self._watched_from))
        others = [unit for unit in np.roll(self._held, -first).tolist() if unit not in mine]
        watched = others[:MOST_WATCHED]
        for unit in watched:
            claim = claims.try_claim(unit)
            if claim is not None:
                self._is_taken[unit] = True
                return self._rows[unit], claim
        now_s = time.monotonic()
        lapses_s = min((claims.lapses_s(unit) for unit in watched), default=math.inf)
        self._watch_again_s = min(now_s + self._storage.watch_s, max(lapses_s, now_s + FIRST_PAUSE_S))
        return None

    def _any_unit(self) -> int:
        return int(self._random.choice(self._untried)) if len(self._untried) else 0


def _named(storage: Storage, folder: Path, num_units: int) -> np.ndarray:
    """Return [U] bool: units that a folder has a name for. An earlier plan may have had more units."""
    is_named = np.zeros(num_units, dtype=bool)
    numbers = [int(name) for name in storage.names(folder) if name.isdecimal()]
    is_named[[number for number in numbers if number < num_units]] = True
    return is_named
