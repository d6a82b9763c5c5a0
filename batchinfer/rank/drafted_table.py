"""The running sequences of a rank whose decode steps have guesses: a step may give each several tokens."""

# S running sequences

from __future__ import annotations

import numpy as np
import torch

from batchinfer.model.fused.speculation import RequestTensors, bytes_of
from batchinfer.model.sampling import Sampled
from batchinfer.model.step import StepInput
from batchinfer.rank.batch import take_token, take_tokens
from batchinfer.rank.decode_table import DecodeTable, decode_rows
from batchinfer.rank.drafts import Drafts
from batchinfer.rank.sequence import Sequence


class DraftedTable(DecodeTable):
    """A DecodeTable that also takes several tokens per sequence and step."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        super().__init__(eos_token_ids)
        self._tensors: RequestTensors | None = None
        self._of_rows = self._rows  # of which _tensors is made

    @property
    def most_guesses(self) -> np.ndarray:
        """[S] largest number of guesses for each: 0 with logit rules, else its tokens left but one."""
        return np.where(self._rows["has_rules"], 0, self._rows["max_tokens"] - self._rows["num_new"] - 1)

    @property
    def slots(self) -> np.ndarray:
        """[S] slot of each sequence in DraftStates; Drafter writes them."""
        return self._rows["slot"]

    @property
    def are_told_tokens_alone(self) -> bool:
        """Whether no sequence has logit rules or reports log-probabilities."""
        return not self._rows["has_rules"].any() and int(self.sampling.num_logprobs.max(initial=-1)) < 0

    @property
    def tensors(self) -> RequestTensors:
        """The table's memory as tensors for C++; another object after a sequence joined or left."""
        if self._tensors is None or self._of_rows is not self._rows:
            self._of_rows = rows = self._rows
            sampling = self.sampling
            columns = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.key.view(np.int64)
            self._tensors = RequestTensors(
                rows=bytes_of(rows),
                page_table=torch.from_numpy(self._pages),
                settings=[torch.from_numpy(column) for column in columns],
                ends=[torch.from_numpy(self._eos_tokens), torch.from_numpy(self._stop_tokens)],
                num_positions=int((rows["kv_tokens"] - rows["num_new"] + rows["max_tokens"]).max(initial=0)),
            )
        return self._tensors

    def next_drafted_step(self, drafts: Drafts) -> StepInput:
        """Return `next_step` with a further row for each guess after its sequence's row, which it attends to."""
        of_row, tokens = drafts.of_row, self._rows["last_token"][drafts.of_row]
        tokens[drafts.depths > 0] = drafts.tokens[drafts.are_tried]
        return decode_rows(tokens, self._rows["kv_tokens"][of_row] + drafts.depths, self._pages[of_row])

    def accept_drafted(self, sampled: Sampled, drafts: Drafts) -> tuple[list[Sequence], np.ndarray]:
        """Give every sequence its tokens up to the first that was not guessed.

        Returns:
            The sequences that end, which leave, and [S] the number of tokens of each sequence.
        """
        self._hand_all_over()
        rows, taken = self._rows, _take_tokens(self.sequences, sampled, drafts, self._eos_token_ids)
        rows["kv_tokens"] += taken
        rows["num_new"] += taken
        rows["last_token"] = sampled.tokens[drafts.first_rows + taken - 1]
        finished = [row for row, sequence in enumerate(self.sequences) if sequence.finish_reason is not None]
        return self._take_out(finished), taken

    def accept_steps(self, outcome: list[list[int]]) -> tuple[list[Sequence], np.ndarray]:
        """Give every sequence its tokens as `accept_drafted` does; counts and last tokens are in the rows already.

        Args:
            outcome: see Speculated.
        """
        self._hand_all_over()
        taken, finished = np.empty(len(outcome), dtype=np.int64), []
        for row, (count, asks, is_finite, *tokens) in enumerate(outcome):
            taken[row] = count
            if not asks:
                self.sequences[row].token_ids += tokens[:count]
                continue
            taken[row] = take_tokens(self.sequences[row], tokens[:count], bool(is_finite), self._eos_token_ids)
            if self.sequences[row].finish_reason is not None:
                finished.append(row)
        return self._take_out(finished), taken

    def _hand_all_over(self) -> None:
        """Give the sequences their tokens that are only in the table."""
        if self._num_held:
            for row in range(len(self.sequences)):
                self._hand_over(row)
            self._rows["first_held"] = self._num_held = 0


def _take_tokens(
    sequences: list[Sequence], sampled: Sampled, drafts: Drafts, eos_token_ids: frozenset[int]
) -> np.ndarray:
    """Give each sequence its tokens up to the first that was not guessed; return [S] the numbers of tokens taken."""
    taken = np.ones(len(sequences), dtype=np.int64)
    tokens, guesses = sampled.tokens.tolist(), drafts.tokens.tolist()
    for row, (sequence, first) in enumerate(zip(sequences, drafts.first_rows.tolist(), strict=True)):
        take_token(sequence, sampled, first, eos_token_ids)
        for place, guess in enumerate(guesses[row][: drafts.counts[row]], first):
            if sequence.finish_reason is not None or tokens[place] != guess:
                break
            take_token(sequence, sampled, place + 1, eos_token_ids)
            taken[row] += 1
    return taken
