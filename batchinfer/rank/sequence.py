"""One request on its way through prefill and decode: its pages, its tokens, and when it is finished."""

from dataclasses import dataclass, field

from batchinfer.data.prompt_tokenizer import PromptTokenizer, TextStream
from batchinfer.kv.pages import pages_for
from batchinfer.protocol.messages import CachedTokens
from batchinfer.rank.logit_rules import LogitRules
from batchinfer.rank.thinking import Thinking
from batchinfer.records import Completion, Request, RequestTimes, TokenLogprob


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request.

    pages   [0, num_shared)   held together with the prefix tree, read only up to the prompt's end
            [num_shared, end)  its own, enough for the prompt and all tokens it may generate
    """

    request: Request
    pages: list[int]
    num_computed: int  # prompt tokens whose KV is in the pages (after the step being built)
    times: RequestTimes
    stream: TextStream | None  # only for requests with stop strings
    rules: LogitRules | None = None  # only for requests that change the model's logits
    thinking: Thinking | None = None  # only where thinking is told from the answer
    tells_reasoning: bool = False
    num_prefill_steps: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of the tokens to be scored, as they have run
    text_so_far: str = ""
    text_end: int | None = None  # where a stop string cuts the text
    finish_reason: str | None = None
    stop_reason: str | None = None
    ended_by_token: bool = False  # by the model's end token or a stop token, which is then not part of the text
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def kv_tokens(self) -> int:
        """KV length that the next decode step attends to, its own new token included."""
        return self.num_prompt_tokens + len(self.token_ids)

    @property
    def looks_at_every_token(self) -> bool:
        """Whether more than its end depends on a token."""
        watched = (self.stream, self.rules, self.thinking, self.request.sampling.logprobs)
        return any(item is not None for item in watched)

    def accept(self, token: int, logprob: TokenLogprob | None, eos_token_ids: frozenset[int]) -> None:
        """Add a generated token and decide whether it was the last one."""
        sampling = self.request.sampling
        self.token_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.thinking is not None:
            self.thinking.accept(token)
        if self.rules is not None:
            self.rules.accept(token)
            if self.rules.problem is not None:
                self.fail(f"its structured output cannot go on: {self.rules.problem}")
                return
        if token in eos_token_ids and not sampling.ignore_eos:
            self.finish_reason, self.ended_by_token = "stop", True
        elif token in sampling.stop_token_ids:
            self.finish_reason, self.stop_reason, self.ended_by_token = "stop", str(token), True
        else:
            self._look_for_stop_string(token)
        if self.finish_reason is None and self.rules is not None and self.rules.is_complete:
            self.finish_reason = "stop"
        if self.finish_reason is None and len(self.token_ids) >= self.request.sampling.max_tokens:
            self.finish_reason = "length"

    def fail(self, error: str) -> None:
        """End this request alone as an error row."""
        self.finish_reason, self.error = "error", error

    def completion(self, tokenizer: PromptTokenizer) -> Completion:
        """The finished request; the text ends before a stop token or stop string unless these are to be part of it."""
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
            logprobs=tuple(self.logprobs) if self.request.sampling.logprobs is not None else None,
            error=self.error,
            replicated_tokens=self.cached.replicated,
            recomputed_tokens=self.cached.recomputed,
            computed_tokens=self.cached.computed,
            prompt_logprobs=tuple(self.prompt_logprobs) if self.request.score_from and not failed else None,
            reasoning=reasoning,
            reasoning_tokens=0 if reasoning is None or self.thinking is None else self.thinking.num_tokens,
            structured_valid=self._structured_valid,
        )

    @property
    def _structured_valid(self) -> bool | None:
        """Whether the answer is all that its grammar asks for, and nothing has been cut off; None: it has none."""
        if self.request.sampling.structured is None or self.rules is None:
            return None
        return self.rules.is_complete and not self._is_cut and self.error is None

    @property
    def _is_cut(self) -> bool:
        """Whether something that was generated is not part of the text, because it ended the text."""
        if self.text_end is not None:
            return self.text_end < len(self.text_so_far)
        return self.stop_reason is not None and not self.request.sampling.include_stop_str_in_output

    def _texts(self, tokenizer: PromptTokenizer) -> tuple[str, str | None]:
        """The answer; and what was thought before it, None where it did not begin in thinking or nobody asked."""
        without_end = self.ended_by_token and not self.request.sampling.include_stop_str_in_output
        token_ids = self.token_ids[:-1] if without_end else self.token_ids
        whole = tokenizer.decode(token_ids)
        thinking, cut = self.thinking, 0 if self.text_end is None else len(whole) - self.text_end
        if not self.tells_reasoning or thinking is None or not thinking.has_begun:
            return whole[: self.text_end], None
        thought, answer = map(tokenizer.decode, thinking.split(token_ids))
        if thinking.is_open:  # a stop string has ended it there, or max_tokens
            return "", thought[: len(thought) - cut].strip()
        return answer[: max(0, len(answer) - cut)].lstrip("\n"), thought.strip()

    def _look_for_stop_string(self, token: int) -> None:
        if self.stream is None:
            return
        piece = self.stream.push(token)
        if not piece:
            return
        sampling = self.request.sampling
        stop = sampling.stop
        self.text_so_far += piece
        if len(self.token_ids) <= sampling.min_tokens:
            return
        # a stop string can only be new where it touches the new piece
        start = max(0, len(self.text_so_far) - len(piece) - max(map(len, stop)) + 1)
        found = [(self.text_so_far.find(text, start), text) for text in stop]
        found = [(start, text) for start, text in found if start >= 0]
        if found:
            self.text_end, self.stop_reason = min(found)
            self.text_end += len(self.stop_reason) * sampling.include_stop_str_in_output
            self.finish_reason = "stop"


def pages_needed(request: Request, *, prompt_only: bool = False) -> int:
    """Pages for the prompt and every token it may generate but the last, which nobody attends to.

    Args:
        prompt_only: without the generated tokens, for a rank that only runs prefill.
    """
    return pages_for(len(request.token_ids) + (0 if prompt_only else max(0, request.sampling.max_tokens - 1)))
