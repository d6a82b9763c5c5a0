"""Stop strings end an answer as if its text came character by character, at any borders of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import pytest

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stop_strings import find_stop
from batchinfer.rank.thinking import Thinking, ThinkingTokens
from batchinfer.records import Completion, Request, RequestKey, RequestTimes
from support.scripted_model import write_tokenizer

ALPHABET = "ab-\né😀"
MOST_BYTES = 3  # of a token, so that an emoji is never whole in one
END, THINK, UNTHINK = b"</s>", b"<think>", b"</think>"


@dataclass
class Answer:
    """The tokens that a model generates, and the parts of it that the reference goes by."""

    tokens: list[bytes]
    prompt: bytes = b"<a>"  # its last token
    mode: str = "auto"  # of output.reasoning
    thought: slice | None = None  # tokens of the thinking, its marks left out
    answer: int = 0  # first token of the text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Let a request generate the tokens of an answer until it is finished."""
    folder = tmp_path_factory.mktemp("bytes")
    letters = sorted({bytes([byte]) for byte in ALPHABET.encode()})
    pieces = [b"".join(letter) for length in range(1, MOST_BYTES + 1) for letter in product(letters, repeat=length)]
    words = [bytes([byte]) for byte in range(256)] + [b"ND", b"END", b"END\xf0", b"ENDE x", b"abc"]
    found = write_tokenizer(folder, dict.fromkeys([*pieces, *words]))
    ids = {mark.encode() if isinstance(mark, str) else mark: place for mark, place in found.items()}
    tokenizer = load_tokenizer(folder)
    marks = ThinkingTokens.of(tokenizer)

    def made(answer: Answer, **sampling) -> Completion:
        settings = SamplingConfig(**{"max_tokens": 99} | sampling).to_sampling()
        request = Request(RequestKey(0, 0, 0), 0, [ids[answer.prompt]], settings, 0)
        thinking = None if answer.mode == "none" else Thinking(marks, request.token_ids, answer.mode)
        is_told = answer.mode != "none"
        stream = tokenizer.stream() if settings.stop else None
        sequence = Sequence(request, [0], 1, RequestTimes(), stream, None, thinking, is_told)
        for token in answer.tokens:
            if sequence.finish_reason is None:
                sequence.accept(ids[token], frozenset([ids[END]]))
        return sequence.completion(tokenizer)

    return made


def plain(*tokens: bytes | str) -> Answer:
    return Answer([token.encode() if isinstance(token, str) else token for token in tokens])


@pytest.mark.parametrize(
    ("tokens", "sampling", "text", "stop_reason"),
    [
        # of several the one that is complete first
        (["abc"], {"stop": ["b", "abc"]}, "a", "b"),
        ([*"abc"], {"stop": ["b", "abc"]}, "a", "b"),
        (["E", "ND", "E"], {"stop": ["ENDE", "END"]}, "", "END"),
        (["ENDE x"], {"stop": ["ENDE", "END"]}, "", "END"),
        (["ENDE x"], {"stop": ["ENDE", "END"], "include_stop_str_in_output": True}, "END", "END"),
        # of those that end at the same character the first in the list
        (["END"], {"stop": ["ND", "END"]}, "E", "ND"),
        (["E", "ND"], {"stop": ["END", "ND"]}, "", "END"),
        # text from before min_tokens is not found later, whatever other strings there are
        ([*"ab-cdefghij"], {"stop": ["b"], "min_tokens": 5}, "ab-cdefghij", None),
        ([*"ab-cdefghij"], {"stop": ["b", "0123456789"], "min_tokens": 5}, "ab-cdefghij", None),
        ([*"ab-cdefghib"], {"stop": ["b", "0123456789"], "min_tokens": 5}, "ab-cdefghi", "b"),
        # a stop string may begin in it
        ([*"abcd"], {"stop": ["abc"], "min_tokens": 2}, "", "abc"),
        ([*"abcd"], {"stop": ["abc"], "min_tokens": 3}, "abcd", None),
        ([*"abcabc"], {"stop": ["abc"], "min_tokens": 3}, "abc", "abc"),
        (["ENDE x"], {"stop": ["x", "E"], "min_tokens": 1}, "ENDE x", None),
        # half a character is none, and what comes before it in its token counts
        ([b"\xf0\x9f", b"\x98\x80", "a"], {"stop": ["😀"]}, "", "😀"),
        ([b"\xf0\x9f", b"\x98\x80", "a"], {"stop": ["\ufffd"]}, "😀a", None),
        ([b"END\xf0"], {"stop": ["END"]}, "", "END"),
        ([b"END\xf0", b"\x9f\x98\x80"], {"stop": ["END"], "min_tokens": 1}, "END😀", None),
    ],
)
def test_worked_examples(run, tokens, sampling, text, stop_reason):
    done = run(plain(*tokens, END), **sampling)
    assert (done.text, done.stop_reason, done.finish_reason) == (text, stop_reason, "stop")


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reasoning", "num_tokens"),
    [
        ([b"\n", b"\n", UNTHINK, b"a", b"\n", b"\n"], ["\n\n"], "a", "", 6),
        # line breaks before the answer are not part of the text
        ([b"a", UNTHINK, b"\n\n", b"a", b"\n\n"], ["\n\n"], "a", "a", 5),
        # a stop string does not begin in the thinking
        ([b"a", b"-", UNTHINK, b"b", b"b"], ["-b", "</think>b", "bb"], "", "a-", 5),
        ([b"\xf0\x9f", UNTHINK, b"\x98\x80", b"a"], ["😀", "a"], "\ufffd\ufffd", "\ufffd", 4),
        # thinking that never ends
        ([b"a", b"b", b"b"], ["b"], "", "abb", 4),
    ],
)
def test_behind_thinking(run, tokens, stop, text, reasoning, num_tokens):
    done = run(Answer([*tokens, END], THINK), stop=stop)
    assert (done.text, done.reasoning, len(done.token_ids)) == (text, reasoning, num_tokens)


@pytest.mark.parametrize("stop", [["\n"], ["\n", "\n\n"], ["\n\n", "\n-"]])
def test_white_space_before_thinking_ends_no_answer_and_other_white_space_does(run, stop):
    thinks = [b"\n", b"\n", THINK, b"a", UNTHINK, b"b", b"\n", b"\n", END]
    assert run(Answer(thinks), stop=stop).text == "b"
    for tokens in ([b"\n", b"\n", b"\n", b"-", b"a"], [b"\n\n", END], [b"\n", b"\n"]):
        how = {"stop": stop, "max_tokens": len(tokens)}
        found = [run(Answer(tokens, mode=mode), **how) for mode in ("auto", "none")]
        parts = [(one.text, one.token_ids, one.stop_reason, one.finish_reason) for one in found]
        assert parts[0] == parts[1]
        assert found[0].text == ""


def test_a_stop_string_within_a_stop_token_counts_when_the_token_is_part_of_the_text(run):
    token = run(plain("ENDE x")).token_ids
    how = {"stop": ["N"], "stop_token_ids": token}
    done = run(plain("ENDE x"), **how, include_stop_str_in_output=True)
    assert (done.text, done.stop_reason) == ("EN", "N")
    done = run(plain("ENDE x"), **how)
    assert (done.text, done.stop_reason) == ("", str(token[0]))


# ---- random answers


@pytest.mark.parametrize("seed", range(20))
def test_random_answers_end_where_one_character_at_a_time_would_end_them(run, seed):
    draw = random.Random(seed)
    num_stopped = 0
    for _ in range(20):
        answer = random_answer(draw)
        how = {
            "stop": random_stops(draw, answer),
            "min_tokens": draw.choice([0, 0, draw.randint(0, len(answer.tokens))]),
            "include_stop_str_in_output": draw.random() < 0.4,
        }
        how["max_tokens"] = draw.choice([99, draw.randint(max(1, how["min_tokens"]), 20)])
        done = run(answer, **how)
        found = done.text, done.reasoning, done.finish_reason, done.stop_reason, len(done.token_ids)
        assert found == expected(answer, **how), (answer, how)
        num_stopped += done.stop_reason is not None
    assert num_stopped > 1


@pytest.mark.parametrize("seed", range(10))
def test_the_tokens_do_not_matter(run, seed):
    draw = random.Random(seed)
    text, before = random_text(draw, 20), draw.choice([[], [*random_tokens(draw, "aé"), UNTHINK]])
    stop = [text[place : place + draw.randint(1, 4)] for place in draw.sample(range(len(text)), 2)]
    found = set()
    for _ in range(10):
        tokens = [*before, *random_tokens(draw, text), END]
        done = run(Answer(tokens, THINK if before else b"<a>"), stop=stop)
        found.add((done.text, done.stop_reason))
    assert len(found) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_stop_string_is_that_of_adding_one_character_at_a_time(seed):
    draw = random.Random(seed)
    text = random_text(draw, 30)
    stop = tuple(random_text(draw, draw.randint(1, 3)) for _ in range(4))
    num_new = draw.randint(1, 30)
    ends = range(len(text) - num_new + 1, len(text) + 1)
    first = ((end - len(one), one) for end in ends for one in stop if text[:end].endswith(one))
    assert find_stop(text, num_new, stop) == next(first, None)


def random_text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(ALPHABET, k=length))


def random_tokens(draw: random.Random, text: str) -> list[bytes]:
    """Cut a text into tokens anywhere, within its characters, too."""
    left, tokens = text.encode(), []
    while left:
        length = draw.randint(1, MOST_BYTES)
        tokens.append(left[:length])
        left = left[length:]
    return tokens


def random_answer(draw: random.Random) -> Answer:
    thought, text = (random_tokens(draw, random_text(draw, draw.randint(0, 12))) for _ in range(2))
    blanks = [b"\n" * draw.randint(1, MOST_BYTES) for _ in range(draw.randint(0, 2))]
    match draw.choice(["no thinking", "text alone", "nobody looks", "open", "begins", "unclosed"]):
        case "no thinking":
            return Answer([*blanks, *text, END])
        case "text alone":
            return Answer([*text, END], UNTHINK, draw.choice(["auto", "deepseek_r1"]))
        case "nobody looks":
            return Answer([THINK, *thought, UNTHINK, *text, END], THINK, "none")
        case "open":
            prompt, mode = draw.choice([(THINK, "auto"), (THINK, "deepseek_r1"), (b"<a>", "deepseek_r1")])
            tokens = [*thought, UNTHINK, *text, END]
            return Answer(tokens, prompt, mode, slice(0, len(thought)), len(thought) + 1)
        case "begins":
            first, end = len(blanks) + 1, len(blanks) + 1 + len(thought)
            tokens = [*blanks, THINK, *thought, UNTHINK, *text, END]
            return Answer(tokens, thought=slice(first, end), answer=end + 1)
        case _:
            tokens = [*thought, *text, END]
            return Answer(tokens, THINK, thought=slice(0, len(tokens)), answer=len(tokens))


def random_stops(draw: random.Random, answer: Answer) -> list[str]:
    """Draw parts of the text, and others."""
    text = b"".join(answer.tokens).decode()
    starts = [draw.randrange(len(text)) for _ in range(draw.randint(1, 3))]
    stops = [text[start : start + draw.randint(1, 4)] for start in starts]
    stops += [random_text(draw, draw.randint(1, 9)) for _ in range(draw.randint(0, 2))]
    draw.shuffle(stops)
    return stops


def expected(
    answer: Answer, *, stop: list[str], min_tokens: int, max_tokens: int, include_stop_str_in_output: bool
) -> tuple[str, str | None, str, str | None, int]:
    """Return text, reasoning, finish_reason, stop_reason and number of tokens, a character at a time."""
    tokens = answer.tokens[:max_tokens]
    thinks = answer.thought is not None and len(tokens) >= answer.thought.start
    reasoning = text_of(tokens[answer.thought]).strip() if thinks else None
    first = answer.answer if thinks else 0
    text, waiting = "", b""
    for place, token in enumerate(tokens[first:], first):
        if token == END:
            break
        for byte in token:
            waiting += bytes([byte])
            if not is_whole(waiting):
                continue
            character, waiting = waiting.decode(), b""
            if thinks and not text and character == "\n":
                continue
            text += character
            for one in stop if place >= min_tokens else []:
                if text.endswith(one):
                    kept = text if include_stop_str_in_output else text.removesuffix(one)
                    return kept, reasoning, "stop", one, place + 1
    finish_reason = "stop" if tokens[-1] == END else "length"
    return text + waiting.decode(errors="replace"), reasoning, finish_reason, None, len(tokens)


def text_of(tokens: list[bytes]) -> str:
    return b"".join(token for token in tokens if token != END).decode(errors="replace")


def is_whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
