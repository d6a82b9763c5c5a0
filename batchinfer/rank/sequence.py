"""One running request: its pages, its tokens, and the end of its answer."""

from dataclasses import dataclass, field

from batchinfer.data.prompt_tokenizer import PromptTokenizer, TextStream
from batchinfer.kv.pages import pages_for
from batchinfer.model.step import StateMoves, StateParts
from batchinfer.protocol.messages import CachedTokens
from batchinfer.rank.logit_rules import LogitRules
from batchinfer.rank.stop_strings import CompletingTokens, StopSearch
from batchinfer.rank.thinking import AnyThinking, answer_text
from batchinfer.records import Completion, Request, RequestTimes, TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request.

    pages   [0, num_shared)   shared with the prefix tree, read only up to the prompt's end
            [num_shared, end)  owned by this sequence, enough for the prompt and all tokens it may generate
    """

    request: Request
    pages: list[int]
    num_computed: int  # prompt tokens whose KV is in the pages (after the step being built)
    times: RequestTimes
    stream: TextStream | None  # only for requests with stop strings
    rules: LogitRules | None = None  # only for requests that change the model's logits
    thinking: AnyThinking | None = None  # only if the end of thinking matters
    separates_reasoning: bool = False  # thinking is kept apart from the text
    completing: CompletingTokens | None = None  # tokens that may complete a stop string; None: look at every token
    state_slot: int | None = None  # of its state, if the model's requests have one
    # in these models, by prompt tokens before it: how the state begins, and the slots in which states are kept
    moves: dict[int, StateMoves] = field(default_factory=dict)
    kept_slots: dict[int, int] = field(default_factory=dict)
    num_branched: int = 0  # prompt tokens up to which states were kept
    stored_states: dict[int, StateParts] = field(default_factory=dict)  # likewise: get states for the KV store
    num_prefill_steps: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    token_ids: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = field(init=False)  # of token_ids, if they are asked for
    prompt_logprobs: TokenLogprobs | None = field(init=False)  # of the tokens to be scored, as they have run
    stop_search: StopSearch | None = field(init=False)
    finish_reason: str | None = None
    stop_reason: str | None = None
    ended_by_token: bool = False  # by the model's end token or a stop token, which is then not part of the text
    error: str | None = None

    def __post_init__(self) -> None:
        thinking = self.thinking if self.separates_reasoning else None
        request, wanted = self.request, self.request.sampling.logprobs
        self.stop_search = None if self.stream is None else StopSearch(request.sampling, self.stream, thinking)
        self.logprobs = None if wanted is None else TokenLogprobs(wanted)
        self.prompt_logprobs = TokenLogprobs(request.num_alternatives) if request.score_from else None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def kv_tokens(self) -> int:
        """KV length that the next decode step attends to, the step's own token included."""
        return self.num_prompt_tokens + len(self.token_ids)

    @property
    def looks_at_every_token(self) -> bool:
        """Whether `accept` may have to see other tokens than end, stop and last tokens; see `must_see`."""
        return self.stream is not None or self.rules is not None

    def must_see(self, token: int) -> bool:
        """Return whether `accept` must see this token at once; other tokens may be added to `token_ids` without it."""
        return self.completing is None or self.completing[token]

    def accept(self, token: int, eos_token_ids: frozenset[int]) -> None:
        """Add a generated token, after its log-probability, and decide whether it is the last one.

        Tokens that `accept` need not see may have been added to `token_ids` before.
        """
        sampling = self.request.sampling
        self.token_ids.append(token)
        if self.thinking is not None:
            for unseen in self.token_ids[self.thinking.num_seen :]:
                self.thinking.accept(unseen)
        have_stopped = False
        if self.rules is not None:
            self.rules.accept(token)
            have_stopped = self.rules.have_stopped
            if have_stopped and (problem := self.rules.problem) is not None:
                self.fail(f"its structured output cannot go on: {problem}")
                return
        if token in eos_token_ids and not sampling.ignore_eos:
            self.finish_reason, self.ended_by_token = "stop", True
        elif token in sampling.stop_token_ids:
            self.finish_reason, self.stop_reason, self.ended_by_token = "stop", str(token), True
        elif have_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= sampling.max_tokens:
            self.finish_reason = "length"
        if self.stop_search is not None:
            self._look_for_stop_strings(self.stop_search)

    def fail(self, error: str) -> None:
        """End this request alone as an error row."""
        self.finish_reason, self.error = "error", error

    def completion(self, tokenizer: PromptTokenizer) -> Completion:
        """Return the finished request.

        The text ends before a stop token or stop string unless `include_stop_str_in_output` is set.
        """
        failed = self.error is not None
        text, reasoning = ("", None) if failed else self._texts(tokenizer)
        num_prompt, num_new = self.num_prompt_tokens, len(self.token_ids)
        return Completion(
            key=self.request.key,
            unit=self.request.unit,
            text=text,
            token_ids=[] if failed else self.token_ids,
            finish_reason=self.finish_reason or "error",
            stop_reason=self.stop_reason,
            prompt_tokens=num_prompt,
            cached_memory_tokens=self.cached.memory,
            cached_disk_tokens=self.cached.disk,
            # the i-th new token (from 0) attends to the prompt and the i tokens before it
            kv_tokens_sum=num_new * num_prompt + num_new * (num_new - 1) // 2,
            times=self.times,
            logprobs=self.logprobs,
            error=self.error,
            replicated_tokens=self.cached.replicated,
            recomputed_tokens=self.cached.recomputed,
            computed_tokens=self.cached.computed,
            prompt_logprobs=None if failed else self.prompt_logprobs,
            reasoning=reasoning,
            reasoning_tokens=0 if reasoning is None or self.thinking is None else self.thinking.num_tokens,
            structured_valid=self._structured_valid,
        )

    @property
    def _structured_valid(self) -> bool | None:
        """Whether the answer is complete by its grammar and was not cut, None if the request has no grammar."""
        if self.request.sampling.structured is None or self.rules is None:
            return None
        return self.rules.is_complete and not self._is_cut and self.error is None

    @property
    def _is_cut(self) -> bool:
        """Whether a stop string or stop token was cut off the text."""
        by_token = self.ended_by_token and self.stop_reason is not None
        by_string = self.stop_search is not None and self.stop_search.is_cut
        return by_string or (by_token and not self.request.sampling.include_stop_str_in_output)

    @property
    def _num_text_tokens(self) -> int:
        """Number of generated tokens without the token that ended the answer, unless that one is part of the text."""
        return len(self.token_ids) - (self.ended_by_token and not self.request.sampling.include_stop_str_in_output)

    def _texts(self, tokenizer: PromptTokenizer) -> tuple[str, str | None]:
        """Return the answer, and the thinking before it if that is kept apart."""
        token_ids = self.token_ids[: self._num_text_tokens]
        end = None if self.stop_search is None else self.stop_search.text_end
        if not self.separates_reasoning or self.thinking is None or not self.thinking.has_begun:
            return tokenizer.decode(token_ids)[:end], None
        thought, answer = map(tokenizer.decode, self.thinking.split(token_ids))
        return answer_text(answer)[:end], thought.strip()

    def _look_for_stop_strings(self, search: StopSearch) -> None:
        """End the answer at its first stop string, if one is complete; drop the tokens behind it."""
        found = search.read(self.token_ids, self._num_text_tokens, is_whole=self.finish_reason is not None)
        if found is not None:
            self.stop_reason, num_tokens = found
            del self.token_ids[num_tokens:]
            if self.logprobs is not None:
                self.logprobs.cut(num_tokens)
            self.finish_reason, self.ended_by_token = "stop", False


def pages_needed(request: Request, *, prompt_only: bool = False) -> int:
    """Return the number of pages for the prompt and all tokens it may generate but the last, which no token attends to.

    Args:
        prompt_only: leave the generated tokens out, for a rank that only runs prefill.
    """
    return pages_for(len(request.token_ids) + (0 if prompt_only else max(0, request.sampling.max_tokens - 1)))
