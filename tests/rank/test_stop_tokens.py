"""Stop strings that are looked for only when a token may complete one: answers end where and when they ended before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from batchinfer.config import SamplingConfig
from batchinfer.data.prompt_tokenizer import UNFINISHED, PromptTokenizer
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.sampling import Sampled
from batchinfer.rank.batch import take_token
from batchinfer.rank.decode_table import HELD_STEPS, DecodeTable
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.stop_strings import StopTokens
from batchinfer.rank.thinking import Thinking, ThinkingTokens
from batchinfer.records import Request, RequestKey, RequestTimes
from support.paths import SAMPLE_MODEL

EOS = 1


def sentence_piece():
    """Words with a blank before them, characters, and bytes."""
    words = ["▁the", "▁end", "▁.", "\n", "▁", "the", "end", ".", "é", "▁日本", "日"]
    vocabulary = {
        token: number for number, token in enumerate(["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def word_piece():
    """Words and their ends; blanks come before words, and none before marks."""
    words = ["[UNK]", "</s>", "the", "end", "##s", "##ing", ".", ",", "'", "s", "do", "not", "é", "##é"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=True)
    return tokenizer


TOKENIZERS = {
    "bytes": lambda: load_tokenizer(SAMPLE_MODEL),
    "pieces": lambda: PromptTokenizer(sentence_piece(), SAMPLE_MODEL, {}, {}, frozenset(), ""),
    "words": lambda: PromptTokenizer(word_piece(), SAMPLE_MODEL, {}, {}, frozenset(), ""),
}


def table_of(tokenizer, samplings, first, *, sees_all, thinking=None):
    """A table of running sequences, of which each has its first token.

    Args:
        thinking: the tokens of its marks; every second answer begins in thinking, others may.
    """
    table, stop_tokens = DecodeTable(frozenset({EOS})), StopTokens(tokenizer)
    for row, sampling in enumerate(samplings):
        how = SamplingConfig(**sampling).to_sampling()
        completing = None if sees_all or thinking or not how.stop else stop_tokens.of(how.stop)
        stream = tokenizer.stream() if how.stop else None
        request = Request(RequestKey(0, row, 0), 0, [5], how, 0)
        thoughts = thinking and Thinking(thinking, [5], "deepseek_r1" if row % 2 else "auto")
        sequence = Sequence(
            request,
            [row],
            1,
            RequestTimes(),
            stream,
            thinking=thoughts,
            separates_reasoning=thinking is not None and row % 3 > 0,
            completing=completing,
        )
        take_token(sequence, sampled_in(-1, [row], first), 0, frozenset({EOS}))
        if sequence.finish_reason is None:
            table.add([sequence])
    if sees_all:
        table._rows["is_watched"] = True
    return table


def sampled_in(step, rows, of_rows):
    """The tokens of these rows in a step, with log-probabilities that tell rows and steps apart."""
    tokens, logprobs = np.array([of_rows[row] for row in rows]), -1.0 - step - 0.01 * np.array(rows)
    return Sampled(tokens, np.ones(len(rows), dtype=bool), logprobs, tokens[:, None], logprobs[:, None])


def ended(table, tokens, tokenizer):
    """By row: the step in which its answer ends, and the answer."""
    found = {}
    for step, of_rows in enumerate(tokens):
        rows = [sequence.request.key.row for sequence in table.sequences]
        if not rows:
            break
        sampled = sampled_in(step, rows, of_rows)
        for sequence in table.accept(sampled):
            done = sequence.completion(tokenizer)
            logprobs = done.logprobs and (bytes(done.logprobs.token_ids), bytes(done.logprobs.logprobs))
            answer = (
                done.text,
                done.token_ids,
                done.finish_reason,
                done.stop_reason,
                done.reasoning,
                done.reasoning_tokens,
                logprobs,
            )
            found[sequence.request.key.row] = step, answer
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_answers_end_in_the_same_step_as_when_every_token_is_looked_at(kind, thinks, seed):
    tokenizer, draw = TOKENIZERS[kind](), random.Random(seed)
    num_rows, num_steps = 24, HELD_STEPS + 20
    words = range(max(2, tokenizer.vocab_size - 12), tokenizer.vocab_size)
    few = [*words, *draw.sample(range(2, tokenizer.vocab_size), min(20, tokenizer.vocab_size - 2))]
    tokens = [[draw.choice(few) for _ in range(num_rows)] for _ in range(num_steps)]
    samplings = []
    for row in range(num_rows):
        text = tokenizer.decode([of_rows[row] for of_rows in tokens])
        starts = [draw.randrange(max(1, len(text))) for _ in range(draw.choice([1, 1, 3]))]
        stop = [text[start : start + draw.choice([1, 2, 2, 3, 5])] or "never" for start in starts]
        sampling = {"max_tokens": draw.choice([30, num_steps + 1]), "stop": stop}
        if row % 4 == 1:
            sampling |= {"min_tokens": 12, "include_stop_str_in_output": True}
        if row % 4 == 3:
            sampling |= {"logprobs": 1}
        samplings.append({"max_tokens": 50} if row % 6 >= 4 else sampling)
    first = [draw.choice(few) for _ in range(num_rows)]
    marks = ThinkingTokens(few[0], few[1], lambda token: token == few[2]) if thinks else None
    lazy, eager = (
        table_of(tokenizer, samplings, first, sees_all=sees_all, thinking=marks) for sees_all in (False, True)
    )
    expected = ended(eager, tokens, tokenizer)
    assert thinks == any(answer[4] for _, answer in expected.values())
    assert ended(lazy, tokens, tokenizer) == expected
    assert {"stop", "length"} <= {answer[2] for _, answer in expected.values()}


def test_a_token_is_looked_at_if_its_text_has_the_last_character_of_a_stop_string():
    tokenizer = TOKENIZERS["pieces"]()
    texts = ("▁the", "the", "▁", ".", "\n", "日", "<0xE6>", "</s>", "<0x0A>")
    tokens = {text: tokenizer.token_id(text) for text in texts}

    def looked_at(*stop):
        completing = StopTokens(tokenizer).of(stop)
        return {text for text, token in tokens.items() if completing[token]}

    partial = {"<0xE6>"}  # a part of a character may complete any
    assert looked_at("END.") == {"."} | partial
    assert looked_at("a ") == {"▁the", "▁"} | partial  # the blank shows behind other text only
    assert looked_at("\n\n", "日") == {"\n", "<0x0A>", "日"} | partial
    assert looked_at("ß") == partial
    assert StopTokens(tokenizer).of(("END", UNFINISHED)) is None


def test_a_stop_string_that_was_overlooked_cuts_the_answer_at_the_same_place():
    """Whatever a tokenizer does: the search at the answer's end finds the string, and drops the tokens behind it."""
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    (prompt,) = tokenizer.encode_prompts(["one two three four five six"])
    prompt = [token for token in prompt if tokenizer.decode([token])]
    first, tokens = prompt[:1], [[token] for token in prompt[1:]]
    how = [{"max_tokens": len(prompt), "stop": ["three"]}]
    table, blind = (table_of(tokenizer, how, first, sees_all=sees_all) for sees_all in (True, False))
    for token in prompt:
        blind.sequences[0].completing[token] = False
    (step, answer), (late, late_answer) = (ended(one, tokens, tokenizer)[0] for one in (table, blind))
    assert late > step
    assert late_answer == answer
    assert answer[0] == "one two "
