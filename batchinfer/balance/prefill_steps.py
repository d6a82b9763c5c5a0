"""Cuts of a rank's prompts into prefill steps of equal new tokens and equal core-attention work.

All ranks of a group meet in every MoE layer, so a step lasts as long as on its busiest rank. Equal sums over a work
unit do not make equal steps: a token near the end of a long prompt costs many times the attention of a token near a
beginning. So every step gets the same share of its rank's tokens and of its rank's attention work. Ranks with equal
sums and the same number of steps are then even in each step, also while one of them is a step behind.

A step is to its rank what a rank is to a group (prefill.py), so the same balancing fills it. A large prompt is cut into
pieces, which run in steps that follow each other. Small prompts then fill the steps up, largest first, and are
exchanged between steps.

Prompts run in branches: neighbours in the prefix tree that run in order, so that a prefix is computed just before its
followers. A branch runs no sooner than the step in which another branch has computed its prefix.
"""

# N prompts of one rank in the order of the prefix tree, B branches, P pieces, S steps, 2: new tokens and attention work
# A place is a number of new tokens since the first prompt: prompt n begins at place before_N1[n].

from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, sqrt

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from batchinfer.balance.prefill import attention_work, level, place
from batchinfer.balance.prefix_groups import cut_groups
from batchinfer.records import ConfigError

LARGEST_BRANCH = 2.0  # steps; a larger branch is cut where its children part
SMALLEST_BRANCH = 1 / 64  # of a step; smaller neighbours run together
LARGEST_WHOLE = 0.35  # of a step; a larger branch runs in several steps
LARGEST_PIECE = 0.25  # of a step; pieces of such a branch
WIDEN = 1.25  # pieces are this much larger when there are too few steps for them
MOST_OPEN = 8  # large branches that are under way when a step ends; their pages stay in memory
NUM_HALVINGS = 6
NUM_TRIALS = 3  # numbers of steps that are tried until no step has too many tokens
FULLEST = 1.02  # tokens of a step by the mean; further tokens run in other steps


@dataclass(frozen=True, slots=True)
class PrefillSteps:
    """Pieces of prompts in the order in which a rank runs them."""

    prompt_P: np.ndarray  # [P] int64, index of the prompt
    start_P: np.ndarray  # [P] int64, prompt tokens that are in memory before the piece
    end_P: np.ndarray  # [P] int64, prompt tokens that are in memory after it
    step_P: np.ndarray  # [P] int64, rising from 0
    num_steps: int
    num_open: int = 0  # most branches that are under way when a step ends; the KV of one prompt of each is kept
    prefix_tokens: int = 0  # of branches that other branches need, whose KV is kept for these

    def loads(self) -> np.ndarray:
        """Return new tokens and attention work of each step, [S, 2]."""
        new_P = self.end_P - self.start_P
        sizes = (new_P, attention_work(new_P, self.start_P))
        return np.stack([np.bincount(self.step_P, size_P, minlength=self.num_steps) for size_P in sizes], axis=1)


def num_steps_for(new_tokens_of_rank: np.ndarray, *, most_tokens: int) -> int:
    """Return the number of steps of all ranks in which no rank has to run more than `most_tokens` at once."""
    return max(1, ceil(int(np.max(new_tokens_of_rank, initial=0)) * FULLEST / most_tokens))


def plan_rank_steps(
    num_tokens: np.ndarray,
    shared_tokens: np.ndarray,
    rank_N: np.ndarray,
    *,
    num_ranks: int,
    most_tokens: int,
    answer_tokens: np.ndarray | None = None,
    page_tokens: int = 1,
    are_stored: bool = False,
    most_open: int = MOST_OPEN,
) -> list[PrefillSteps]:
    """Cut the prompts of each rank into steps, the same number for all ranks.

    Args:
        num_tokens, answer_tokens, page_tokens, are_stored, most_open: as for `plan_steps`.
        shared_tokens: [N] integers, tokens shared with the prompt before it on the same rank.
        rank_N: [N] integers, the rank of each prompt.
        most_tokens: of a step, at least 1; exceeded only if no few steps more help.

    Returns:
        The steps of each rank; prompts keep their index among all.
    """
    new_N = np.asarray(num_tokens) - shared_tokens
    num_steps = num_steps_for(np.bincount(rank_N, new_N, minlength=num_ranks), most_tokens=most_tokens)
    prompts_of_rank = [np.flatnonzero(rank_N == rank) for rank in range(num_ranks)]
    for more in range(NUM_TRIALS):
        plans = []
        for prompts in prompts_of_rank:
            steps = plan_steps(
                np.asarray(num_tokens)[prompts],
                np.asarray(shared_tokens)[prompts],
                num_steps=num_steps + more,
                answer_tokens=None if answer_tokens is None else np.asarray(answer_tokens)[prompts],
                page_tokens=page_tokens,
                are_stored=are_stored,
                most_open=most_open,
            )
            plans.append(replace(steps, prompt_P=prompts[steps.prompt_P]))
        if max(float(steps.loads()[:, 0].max()) for steps in plans) <= most_tokens:
            break
    return plans


def max_over_mean(loads_SRQ: np.ndarray) -> np.ndarray:
    """Return the load of the busiest rank, summed over steps, by the sum of the means, [Q]; 1.0 without a load."""
    mean_Q = loads_SRQ.mean(axis=1).sum(axis=0)
    return np.where(mean_Q > 0, loads_SRQ.max(axis=1).sum(axis=0) / np.where(mean_Q > 0, mean_Q, 1.0), 1.0)


def plan_steps(
    num_tokens: np.ndarray,
    shared_tokens: np.ndarray,
    *,
    num_steps: int,
    answer_tokens: np.ndarray | None = None,
    page_tokens: int = 1,
    are_stored: bool = False,
    most_open: int = MOST_OPEN,
) -> PrefillSteps:
    """Cut a rank's prompts into steps of equal new tokens and equal attention work.

    Nothing is random: the same input gives the same steps.

    Args:
        num_tokens: [N] integers, prompt lengths.
        shared_tokens: [N] integers, tokens shared with the prompt before it on this rank; below the prompt's length.
        num_steps: at least 1.
        answer_tokens: [N] tokens to expect; of prompts of about the same size those with longer answers run earlier.
        page_tokens: prompts share what a cut prompt has computed in pages of this number of tokens.
        are_stored: shared tokens come from a KV store instead: prompts wait for no other and run in any order.
        most_open: large branches that may be under way when a step ends, at least 1; more only where steps would stay
            empty without them.

    Raises:
        ConfigError: num_steps is below 1, or the arrays have different lengths.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps is {num_steps}, but prompts need at least 1 step; use 1 or more")
    if len(num_tokens) != len(shared_tokens):
        raise ConfigError(
            f"{len(num_tokens)} prompt lengths and {len(shared_tokens)} shared lengths; give both for every prompt"
        )
    if len(num_tokens) == 0:
        none = np.zeros(0, dtype=np.int64)
        return PrefillSteps(none, none, none, none, num_steps)
    line = _Line.of(np.asarray(num_tokens, dtype=np.int64), np.asarray(shared_tokens, dtype=np.int64), num_steps)
    branches = _Branches.of(line, np.zeros_like(line.shared_N) if are_stored else line.shared_N, page_tokens)
    segments = branches.place_large(most_open)
    small_B = np.flatnonzero(~branches.is_large_B)
    if len(small_B):
        small_B = small_B[np.argsort(-branches.sizes_B2[small_B].max(axis=1), kind="stable")]
        sizes_I2, ready_I = branches.sizes_B2[small_B], branches.ready_B[small_B]
        allowed_IS = np.arange(num_steps) >= ready_I[:, None]
        step_I = place(sizes_I2, branches.loads_S2, allowed_IS)
        if answer_tokens is not None:
            longest_B = np.maximum.reduceat(np.asarray(answer_tokens, dtype=np.float64), branches.starts_B1[:-1])
            _put_long_answers_first(step_I, longest_B[small_B], ready_I, num_steps, branches.loads_S2, sizes_I2)
        step_I = level(sizes_I2, step_I, branches.loads_S2, allowed_IS, floor=FULLEST)
        begin_I, end_I = branches.places_B1[small_B], branches.places_B1[small_B + 1]
        last = num_steps - 1
        segments += [
            _Segment(*item, last)
            for item in zip(step_I.tolist(), begin_I.tolist(), end_I.tolist(), ready_I.tolist(), strict=True)
        ]
    steps = _pieces(line, _level_tokens(line, segments))
    return replace(steps, num_open=int(branches.num_open_S.max()), prefix_tokens=branches.prefix_tokens)


@dataclass(slots=True)
class _Segment:
    """A stretch of new tokens that runs in one step."""

    step: int
    begin: int  # place
    end: int
    earliest: int  # step in which its head may run
    latest: int  # step in which its tail may run

    def give(self, tokens: int, step: int) -> "_Segment":
        """Cut off the head for an earlier step, or the tail for a later one, and return it."""
        if step < self.step:
            given = _Segment(step, self.begin, self.begin + tokens, self.earliest, self.step)
            self.begin, self.earliest = self.begin + tokens, step
        else:
            given = _Segment(step, self.end - tokens, self.end, self.step, self.latest)
            self.end, self.latest = self.end - tokens, step
        return given


@dataclass(frozen=True, slots=True)
class _Line:
    """The new tokens of a rank's prompts, one prompt after another."""

    shared_N: np.ndarray
    before_N1: np.ndarray  # [N + 1] place of each prompt, and of the end
    work_before_N1: np.ndarray  # [N + 1] attention work before it
    num_steps: int

    @classmethod
    def of(cls, num_tokens: np.ndarray, shared_N: np.ndarray, num_steps: int) -> "_Line":
        new_N = num_tokens - shared_N
        work_N = attention_work(new_N, shared_N)
        return cls(shared_N, np.append(0, np.cumsum(new_N)), np.append(0.0, np.cumsum(work_N)), num_steps)

    @property
    def step_2(self) -> np.ndarray:
        """New tokens and attention work of one step, [2]."""
        return np.maximum([self.before_N1[-1] / self.num_steps, self.work_before_N1[-1] / self.num_steps], 1.0)

    def prompt_at(self, places: np.ndarray) -> np.ndarray:
        """Return the prompt that each place is in; the last one for the end."""
        return np.minimum(np.searchsorted(self.before_N1, places, side="right") - 1, len(self.shared_N) - 1)

    def work_at(self, places: np.ndarray) -> np.ndarray:
        """Return the attention work before each place."""
        prompts = self.prompt_at(places)
        return self.work_before_N1[prompts] + attention_work(places - self.before_N1[prompts], self.shared_N[prompts])

    def place_of(self, work: float) -> int:
        """Return the last place with at most this attention work before it."""
        prompt = min(int(np.searchsorted(self.work_before_N1, work, side="right")) - 1, len(self.shared_N) - 1)
        base = float(self.shared_N[prompt]) + 0.5  # work of t tokens: t * (base + t / 2)
        tokens = sqrt(base * base + 2 * (work - float(self.work_before_N1[prompt]))) - base
        return int(min(self.before_N1[prompt] + int(tokens), self.before_N1[prompt + 1]))

    def sizes(self, places: np.ndarray) -> np.ndarray:
        """Return sizes between neighbouring places, in steps, [len(places) - 1, 2]."""
        return np.stack([np.diff(places), np.diff(self.work_at(places))], axis=1) / self.step_2

    def cut(self, begin: int, end: int, most_pieces: int) -> np.ndarray:
        """Return places that cut a stretch into even pieces of up to LARGEST_PIECE, or fewer larger ones."""
        largest = LARGEST_PIECE
        while len(places := self._cut(begin, end, largest)) - 1 > most_pieces:
            largest *= WIDEN
        num_pieces, low = len(places) - 1, 0.0
        for _ in range(NUM_HALVINGS):  # the smallest pieces of which there are as many
            middle = (low + largest) / 2
            smaller = self._cut(begin, end, middle)
            if len(smaller) - 1 > num_pieces:
                low = middle
            else:
                places, largest = smaller, middle
        return np.array(places)

    def _cut(self, begin: int, end: int, largest: float) -> list[int]:
        """Return places of pieces of `largest` steps, the last one smaller."""
        step_tokens, step_work = self.step_2.tolist()
        places = [begin]
        while places[-1] < end:
            work = float(self.work_at(np.array(places[-1]))) + largest * step_work
            place = min(self.place_of(work), places[-1] + int(largest * step_tokens), end)
            places.append(max(place, places[-1] + 1))
        return places


@dataclass(slots=True)
class _Branches:
    """Branches, and the steps as they fill up."""

    line: _Line
    starts_B1: np.ndarray  # first prompt of each branch, and the number of prompts
    places_B1: np.ndarray
    sizes_B2: np.ndarray  # in steps
    is_large_B: np.ndarray  # runs in several steps
    provider_B: np.ndarray  # the branch whose first prompt computes its prefix; -1: in memory already
    prefix_B: np.ndarray  # place in the provider at which its prefix is known to others
    ready_B: np.ndarray  # first step in which the branch finds its prefix
    loads_S2: np.ndarray
    num_open_S: np.ndarray  # large branches under way when a step ends

    @classmethod
    def of(cls, line: _Line, needed_N: np.ndarray, page_tokens: int) -> "_Branches":
        """Cut a line into branches, not assigned to steps yet.

        Args:
            needed_N: [N] tokens that each prompt needs of those before it.
        """
        sizes_N2 = line.sizes(line.before_N1)
        group_N = cut_groups(needed_N, sizes_N2, largest=LARGEST_BRANCH, smallest=SMALLEST_BRANCH)
        starts_B1 = np.append(np.flatnonzero(np.diff(group_N, prepend=-1)), len(group_N))
        first_B = starts_B1[:-1]
        provider_B = _providers(needed_N[first_B])
        known_B = -(-needed_N[first_B] // page_tokens) * page_tokens
        leader_B = first_B[provider_B]
        prefix_B = np.minimum(
            line.before_N1[leader_B] + known_B - line.shared_N[leader_B], line.before_N1[leader_B + 1]
        )
        places_B1 = line.before_N1[starts_B1]
        sizes_B2 = line.sizes(places_B1)
        is_provider_B = np.isin(np.arange(len(first_B)), provider_B)
        return cls(
            line=line,
            starts_B1=starts_B1,
            places_B1=places_B1,
            sizes_B2=sizes_B2,
            is_large_B=is_provider_B | ((sizes_B2 > LARGEST_WHOLE).any(axis=1) & (line.num_steps > 1)),
            provider_B=provider_B,
            prefix_B=prefix_B,
            ready_B=np.zeros(len(first_B), dtype=np.int64),
            loads_S2=np.zeros((line.num_steps, 2)),
            num_open_S=np.zeros(line.num_steps, dtype=np.int64),
        )

    @property
    def prefix_tokens(self) -> int:
        """Prompt tokens of branches that other branches need, each counted once."""
        is_needed_B = self.provider_B >= 0
        leader_B = self.starts_B1[self.provider_B]
        tokens_B = self.prefix_B - self.line.before_N1[leader_B]
        longest_B = np.zeros(len(tokens_B), dtype=np.int64)
        np.maximum.at(longest_B, self.provider_B[is_needed_B], tokens_B[is_needed_B])
        return int(longest_B.sum())

    def place_large(self, most_open: int) -> list[_Segment]:
        """Place branches that others need, in their order, then the other large ones, largest first."""
        providers = np.unique(self.provider_B[self.provider_B >= 0]).tolist()
        others = np.setdiff1d(np.flatnonzero(self.is_large_B), providers)
        others = others[np.argsort(-self.sizes_B2[others].max(axis=1), kind="stable")].tolist()
        segments: list[_Segment] = []
        for branch in (*providers, *others):
            followers = np.flatnonzero(self.provider_B == branch)
            ready, last = int(self.ready_B[branch]), self.line.num_steps - 1
            begin, end = self.places_B1[branch : branch + 2].tolist()
            places = self.line.cut(begin, end, last + 1 - ready)
            pieces_2 = self.line.sizes(places)
            step = self._first_step(pieces_2, ready, most_open, early=len(followers) > 0)
            steps = slice(step, step + len(pieces_2))
            self.loads_S2[steps] += pieces_2
            self.num_open_S[step : steps.stop - 1] += 1
            for index, (begin, end) in enumerate(pairwise(places.tolist())):
                earliest = ready if index == 0 else step + index - 1
                latest = last if index == len(pieces_2) - 1 else step + index + 1
                if len(followers):  # their ready step assumes this step
                    latest = step + index
                segments.append(_Segment(step + index, begin, end, earliest, latest))
            piece = np.maximum(np.searchsorted(places, self.prefix_B[followers], side="left") - 1, 0)
            self.ready_B[followers] = step + piece
        return segments

    def _first_step(self, pieces_2: np.ndarray, first: int, most_open: int, *, early: bool) -> int:
        """Return the step for the first piece: where the sum of squared loads grows least.

        Args:
            first: the first possible step.
            early: the first step in which all pieces fit, if there is one: others wait for them.
        """
        num_pieces = len(pieces_2)
        # [number of starts, pieces, 2]
        loads = sliding_window_view(self.loads_S2[first:], num_pieces, axis=0).transpose(0, 2, 1)
        if early and (fits := (loads + pieces_2).max(axis=(1, 2)) <= 1.0).any():
            return first + int(fits.argmax())
        growth = (pieces_2 * (2 * loads + pieces_2)).sum(axis=(1, 2))
        if num_pieces > 1:
            num_open = sliding_window_view(self.num_open_S[first:-1], num_pieces - 1).max(axis=1)
            growth = np.where(num_open < min(most_open, num_open.min() + 1), growth, np.inf)
        return first + int(growth.argmin())


def _providers(prefix_B: np.ndarray) -> np.ndarray:
    """Return for each branch the latest one before it with a shorter prefix, [B], -1 for none.

    All branches between the two share the longer prefix.
    """
    provider_B = np.full(len(prefix_B), -1)
    path: list[int] = []
    prefixes = prefix_B.tolist()
    for branch, prefix in enumerate(prefixes):
        while path and prefixes[path[-1]] >= prefix:
            path.pop()
        if path:
            provider_B[branch] = path[-1]
        path.append(branch)
    return provider_B


def _put_long_answers_first(
    step_I: np.ndarray,
    answers_I: np.ndarray,
    ready_I: np.ndarray,
    num_steps: int,
    loads_S2: np.ndarray,
    sizes_I2: np.ndarray,
) -> None:
    """Give the longest answers the earliest steps, within groups of `num_steps` items of about the same size."""
    for first in range(0, len(step_I), num_steps):
        items = first + np.flatnonzero(ready_I[first : first + num_steps] == 0)
        by_answer = items[np.argsort(-answers_I[items], kind="stable")]
        np.subtract.at(loads_S2, step_I[items], sizes_I2[items])
        step_I[by_answer] = np.sort(step_I[items])
        np.add.at(loads_S2, step_I[items], sizes_I2[items])


def _level_tokens(line: _Line, segments: list[_Segment]) -> list[_Segment]:
    """Move the heads of segments to earlier steps, or their tails to later ones, until no step has too many tokens.

    Of a step's segments the one whose attention per token is nearest to that of all tokens is cut first.
    """
    step_tokens, step_work = line.step_2.tolist()
    most = int(step_tokens * FULLEST)
    room = np.full(line.num_steps, most)
    for segment in segments:
        room[segment.step] -= segment.end - segment.begin
    moved = []
    for giver in np.flatnonzero(room < 0).tolist():
        own = [segment for segment in segments if segment.step == giver]
        middles = np.array([(segment.begin + segment.end) // 2 for segment in own])
        prompts = line.prompt_at(middles)
        rates = line.shared_N[prompts] + middles - line.before_N1[prompts]
        nearest = np.argsort(np.abs(rates - step_work / step_tokens), kind="stable").tolist()
        receivers = sorted(np.flatnonzero(room > 0).tolist(), key=lambda step: abs(step - giver))
        for receiver in receivers:
            for segment in (own[index] for index in nearest):
                tokens = min(-int(room[giver]), int(room[receiver]), segment.end - segment.begin - 1)
                if tokens > 0 and segment.earliest <= receiver <= segment.latest:
                    moved.append(segment.give(tokens, receiver))
                    room[giver] += tokens
                    room[receiver] -= tokens
            if room[giver] >= 0:
                break
    return segments + moved


def _pieces(line: _Line, segments: list[_Segment]) -> PrefillSteps:
    """Cut segments at the ends of prompts, in the order in which they run."""
    ordered = sorted((segment.step, segment.begin, segment.end) for segment in segments)
    step_G, begin_G, end_G = np.array(ordered, dtype=np.int64).reshape(-1, 3).T
    first_G, last_G = line.prompt_at(begin_G), line.prompt_at(end_G - 1)
    num_G = last_G - first_G + 1
    segment_P = np.repeat(np.arange(len(segments)), num_G)
    prompt_P = first_G[segment_P] + np.arange(len(segment_P)) - np.repeat(np.cumsum(num_G) - num_G, num_G)
    before_P = line.before_N1[prompt_P]
    begin_P = np.maximum(begin_G[segment_P], before_P)
    end_P = np.minimum(end_G[segment_P], line.before_N1[prompt_P + 1])
    shared_P = line.shared_N[prompt_P]
    return PrefillSteps(
        prompt_P, shared_P + begin_P - before_P, shared_P + end_P - before_P, step_G[segment_P], line.num_steps
    )
