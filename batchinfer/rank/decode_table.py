"""The running sequences of a rank as arrays, so that a decode step costs no Python per sequence."""

# S running sequences, P pages of the sequence with most

from collections.abc import Container

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.sampling import Sampled, SamplingRows
from batchinfer.model.step import StepHalves, StepInput
from batchinfer.rank.batch import sampling_rows, take_token
from batchinfer.rank.held_logprobs import HeldLogprobs
from batchinfer.rank.logit_rules import LogitRules
from batchinfer.rank.sequence import Sequence
from batchinfer.records import RequestKey

_ALL = slice(None)
HELD_STEPS = 64  # tokens of a sequence that the table holds before the sequence gets them

# as struct RequestRow of csrc/speculation.h
ROW = np.dtype(
    [
        ("kv_tokens", np.int64),  # KV tokens that the next step attends to, its own new token included
        ("num_new", np.int64),  # tokens generated
        ("max_tokens", np.int64),
        ("last_token", np.int64),
        ("slot", np.int64),  # of the sequence in DraftStates
        ("first_held", np.int64),  # column of the first token that its sequence does not have yet
        ("ignores_eos", np.bool_),
        ("is_watched", np.bool_),  # the sequence looks at every token, as more than its end depends on them
        ("has_rules", np.bool_),
    ],
    align=True,
)


class DecodeTable:
    """Table with a row per running sequence; a step counts up and stores the new tokens.

    Most tokens change nothing but a count. A sequence gets its tokens when it may have ended, when it looks at every
    token, when it leaves, and every HELD_STEPS steps.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self.sequences: list[Sequence] = []
        self._eos_token_ids = eos_token_ids
        self._eos_tokens = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._stop_tokens = np.zeros(0, dtype=np.int64)  # stop tokens of any sequence
        self._rows = np.zeros(0, ROW)
        self._pages = np.zeros((0, 1), dtype=np.int64)  # [S, P]
        self._state_slots = np.zeros(0, dtype=np.int64)  # [S], if the model's requests have a state
        self._held = np.zeros((0, HELD_STEPS), dtype=np.int64)  # [S, HELD_STEPS] new tokens
        self._held_logprobs = HeldLogprobs(HELD_STEPS)  # of the same tokens
        self._num_held = 0  # filled columns of _held
        self._num_first: int | None = None  # sequences of micro-batch 0; None if one joined or left since halving
        self._is_arranged = False  # since a sequence joined or left
        self.sampling = SamplingRows.of([], [])

    @property
    def num_new(self) -> np.ndarray:
        """[S] tokens that each sequence has generated so far."""
        return self._rows["num_new"]

    @property
    def kv_lengths(self) -> np.ndarray:
        """[S] KV tokens that each sequence attends to in the next step."""
        return self._rows["kv_tokens"]

    @property
    def rules(self) -> list[tuple[int, LogitRules]]:
        """(row, rules) of each row that has logit rules."""
        rows = np.flatnonzero(self._rows["has_rules"]).tolist()
        return [(row, rules) for row in rows if (rules := self.sequences[row].rules) is not None]

    def add(self, sequences: list[Sequence]) -> None:
        """Add sequences with at least one generated token."""
        if not sequences:
            return
        rows = np.zeros(len(sequences), ROW)
        rows["kv_tokens"] = [sequence.kv_tokens for sequence in sequences]
        rows["num_new"] = [len(sequence.token_ids) for sequence in sequences]
        rows["max_tokens"] = [sequence.request.sampling.max_tokens for sequence in sequences]
        rows["last_token"] = [sequence.token_ids[-1] for sequence in sequences]
        rows["first_held"] = self._num_held
        rows["ignores_eos"] = [sequence.request.sampling.ignore_eos for sequence in sequences]
        rows["has_rules"] = [sequence.rules is not None for sequence in sequences]
        rows["is_watched"] = [sequence.looks_at_every_token for sequence in sequences]
        most_pages = max(self._pages.shape[1], *(len(sequence.pages) for sequence in sequences))
        pages = np.zeros((len(self._rows) + len(sequences), most_pages), dtype=np.int64)
        pages[: len(self._rows), : self._pages.shape[1]] = self._pages
        for row, sequence in enumerate(sequences, len(self._rows)):
            pages[row, : len(sequence.pages)] = sequence.pages
        stops = {token for sequence in sequences for token in sequence.request.sampling.stop_token_ids}
        self._stop_tokens = np.union1d(self._stop_tokens, np.array(sorted(stops), dtype=np.int64))
        self.sequences += sequences
        self._rows = np.concatenate([self._rows, rows])
        self._pages = pages
        slots = [sequence.state_slot for sequence in sequences if sequence.state_slot is not None]
        self._state_slots = np.concatenate([self._state_slots, np.array(slots, dtype=np.int64)])
        self._held = np.concatenate([self._held, np.zeros((len(sequences), HELD_STEPS), dtype=np.int64)])
        self._held_logprobs.add([sequence.request.sampling.logprobs for sequence in sequences])
        self.sampling = self.sampling.and_also(sampling_rows(sequences))
        self._num_first, self._is_arranged = None, False

    def remove(self, keys: Container[RequestKey]) -> list[Sequence]:
        """Remove and return the sequences of these requests; requests without a sequence are ignored."""
        rows = [row for row, sequence in enumerate(self.sequences) if sequence.request.key in keys]
        for row in rows:
            self._hand_over(row)
        return self._take_out(rows)

    def arrange(self) -> None:
        """Alternate long and short sequences, so that any run of neighbours has about the same total length.

        Each part of a GPU gets neighbouring sequences.
        """
        if not self._is_arranged:
            self._keep(_by_turns(np.argsort(-self._rows["kv_tokens"], kind="stable")))
            self._num_first, self._is_arranged = None, True

    def next_halves(self) -> StepHalves:
        """Return the next step as two micro-batches, equal in number, nearly in KV tokens, ordered as by `arrange`."""
        if self._num_first is None:
            order, self._num_first = _halve_sequences(self._rows["kv_tokens"])
            self._keep(order)
            self._is_arranged = False
        return StepHalves(self.next_step(slice(self._num_first)), self.next_step(slice(self._num_first, None)))

    def next_step(self, rows: slice = _ALL) -> StepInput:
        """Return the step that runs the last generated token of each sequence of `rows`, at the end of its KV."""
        table = self._rows[rows]
        slots = self._state_slots[rows] if len(self._state_slots) else None
        return decode_rows(table["last_token"].copy(), table["kv_tokens"].copy(), self._pages[rows], slots)

    def accept(self, sampled: Sampled) -> list[Sequence]:
        """Give every sequence one more token; remove and return the sequences that end with it."""
        rows = self._rows
        rows["kv_tokens"] += 1
        rows["num_new"] += 1
        rows["last_token"] = sampled.tokens
        may_end = ~sampled.is_finite | (rows["num_new"] >= rows["max_tokens"])
        may_end |= _are_among(sampled.tokens, self._eos_tokens) & ~rows["ignores_eos"]
        may_end |= _are_among(sampled.tokens, self._stop_tokens)
        if len(watched := np.flatnonzero(rows["is_watched"])):
            pairs = zip(watched.tolist(), sampled.tokens[watched].tolist(), strict=True)
            may_end[watched] |= [self.sequences[row].must_see(token) for row, token in pairs]
        asked = np.flatnonzero(may_end).tolist()
        is_behind = (rows["first_held"] < self._num_held).tolist()
        for row in asked:
            if is_behind[row]:
                self._hand_over(row)
            take_token(self.sequences[row], sampled, row, self._eos_token_ids)
        self._held[:, self._num_held] = sampled.tokens
        self._held_logprobs.put(self._num_held, sampled)
        self._num_held += 1
        rows["first_held"][asked] = self._num_held
        if self._num_held == HELD_STEPS:
            for row in range(len(rows)):
                self._hand_over(row)
            rows["first_held"] = self._num_held = 0
        return self._take_out([row for row in asked if self.sequences[row].finish_reason is not None])

    def _hand_over(self, row: int) -> None:
        """Give a sequence its tokens that are only in the table."""
        first = int(self._rows["first_held"][row])
        if first < self._num_held:
            sequence, steps = self.sequences[row], slice(first, self._num_held)
            sequence.token_ids += self._held[row, steps].tolist()
            if sequence.logprobs is not None:
                self._held_logprobs.give(row, steps, self._held[row, steps], sequence.logprobs)

    def _take_out(self, rows: list[int]) -> list[Sequence]:
        taken = [self.sequences[row] for row in rows]
        if taken:
            self._keep(np.delete(np.arange(len(self.sequences)), rows))
            self._num_first, self._is_arranged = None, False
        return taken

    def _keep(self, rows: np.ndarray) -> None:
        """Keep only these rows, in this order."""
        self.sequences = [self.sequences[row] for row in rows.tolist()]
        self._rows, self._pages, self._held = self._rows[rows], self._pages[rows], self._held[rows]
        self._held_logprobs.keep(rows)
        if len(self._state_slots):
            self._state_slots = self._state_slots[rows]
        self.sampling = self.sampling.take(rows)


def decode_rows(
    tokens: np.ndarray, kv_tokens: np.ndarray, pages: np.ndarray, state_slots: np.ndarray | None = None
) -> StepInput:
    """Return a decode step with a row per token, each at the end of its sequence's KV."""
    positions = kv_tokens - 1
    page = pages[np.arange(len(positions)), positions // PAGE_TOKENS]
    used_pages = -(-int(kv_tokens.max(initial=1)) // PAGE_TOKENS)
    return StepInput(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(page * PAGE_TOKENS + positions % PAGE_TOKENS),
        logit_rows=torch.arange(len(positions)),
        page_table=torch.from_numpy(pages[:, :used_pages]),
        kv_tokens=torch.from_numpy(kv_tokens),
        state_slots=None if state_slots is None else torch.from_numpy(state_slots),
    )


def _are_among(tokens: np.ndarray, few: np.ndarray) -> np.ndarray:
    """Return [S] bool, whether each token is one of `few`; for a handful several times faster than np.isin."""
    return (tokens[:, None] == few).any(axis=1)


def _halve_sequences(kv_tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """Return [S] rows, the rows of micro-batch 0 first, and their number.

    From the longest sequence to the shortest, the micro-batches are 0 1 1 0 0 1 1 0 ...
    """
    longest_first = np.argsort(-kv_tokens, kind="stable")
    micro_batch = (np.arange(len(kv_tokens)) + 1) // 2 % 2
    halves = [_by_turns(longest_first[micro_batch == half]) for half in (0, 1)]
    return np.concatenate(halves), len(halves[0])


def _by_turns(rows: np.ndarray) -> np.ndarray:
    """Return the first row, the last, the second, the last but one, and so on to the middle."""
    order = np.empty_like(rows)
    order[::2], order[1::2] = rows[: (len(rows) + 1) // 2], rows[::-1][: len(rows) // 2]
    return order
