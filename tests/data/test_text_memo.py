"""Texts put together from parts that were tokenised before have the tokens that the tokenizers library gives them."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import accumulate

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from batchinfer.data import text_encoder
from batchinfer.data.safe_cuts import safe_cuts
from batchinfer.data.text_encoder import TextEncoder, ids_of_bytes
from support.hostile import CONTROLS, DEEPSEEK_SPLIT, SAMPLE_MODEL, hostile_texts

ADDED = {
    "none": [],
    "marked": [*CONTROLS, "<think>", "</think>", "<|EOT|>", "<｜tool▁calls▁begin｜>"],
    "odd": [*CONTROLS, "two words", "\n\n\n", "end.Next", "12a", "，是"],
}
SPLITS = {
    "deepseek": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_SPLIT],
    "llama": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "by case": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "byte level": [],
    "digits": [r" ?\p{N}"],
    "each digit": [r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
}
PIECES = [
    *ADDED["marked"], *ADDED["odd"], *"aZéßЖ漢字가あ０²9,.;!?'-_/<>|｜▁。，（😀\u0301\u200d\t\r\n \u00a0\u3000\x00",
    "  ", "\r\n", "It's", "don'T ", " the", "Question: ", "\n\nQ: ", "12345", "🏳️‍🌈", "é", "2^10=1024",
    "<<3*4=12>>", "我们去吧", "한국어 ", "x" * 40, " " * 30,
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=40).map("".join)


def words() -> list[str]:
    rows = pq.read_table(SAMPLE_MODEL.parent / "prompts" / "part-00000.parquet")["messages"].to_pylist()
    found = [message["content"] or "" for chat in rows if chat for message in chat if message]
    return [*found, "".join(PIECES), *["".join(random.Random(seed).choices(PIECES, k=200)) for seed in range(50)]]


@cache
def tokenizer_of(name: str, added: str = "none") -> Tokenizer:
    """Return a tokenizer with merges across every split of the pre-tokenizer, so that a wrong cut changes tokens."""
    made = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = whole
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(words(), trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, whole if splits else pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.add_special_tokens([token for token in ADDED[added] if token in CONTROLS])
    made.add_tokens([token for token in ADDED[added] if token not in CONTROLS])
    return made


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def cases(quick: set[tuple[str, str]]) -> list:
    """All pre-tokenizers with all added tokens, most of them slow."""
    every = [(name, added) for added in ADDED for name in SPLITS]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in every]


# ---- equal to the library


@pytest.mark.parametrize(
    ("name", "added"),
    cases(
        {("deepseek", "marked"), ("llama", "odd"), ("by case", "none"), ("byte level", "odd"), ("each digit", "marked")}
    ),
)
def test_thousands_of_texts_have_the_library_s_tokens(name, added, monkeypatch):
    monkeypatch.setattr(text_encoder, "STRETCH_CHARS", 40)
    monkeypatch.setattr(text_encoder, "MEMO_BYTES", 100_000)  # both caches are emptied on the way
    tokenizer, chance = tokenizer_of(name, added), random.Random(1)
    heads = ["".join(chance.choices(PIECES, k=chance.randint(1, 60))) for _ in range(20)]
    found = [text for text in hostile_texts(60) if len(text) < 10_000] + words()
    for _ in range(1200):
        head = chance.choice(heads)
        found.append(head[: chance.randint(0, len(head))] + "".join(chance.choices(PIECES, k=chance.randint(0, 30))))
    encoder = TextEncoder(tokenizer)
    assert encoder._memo is not None
    for first in range(0, len(found), 100):
        part = found[first : first + 100]
        found_ids = map(ids_of_bytes, encoder.encode(part, None, add_special_tokens=False))
        assert list(found_ids) == [ids_of(tokenizer, text) for text in part]


@pytest.mark.parametrize(
    ("name", "added"),
    cases({(name, "marked") for name in SPLITS} | {("deepseek", "odd"), ("by case", "odd")}),
)
@settings(max_examples=100, deadline=None)
@given(text=texts)
@example(text="a two words b")
@example(text="²5 5² ٣5")
@example(text=" \n \n x")
@example(text="Row 123: 45 and 6,789")
def test_a_text_may_be_cut_at_each_of_its_cuts(name, added, text):
    """The tokenizers library alone gives the same tokens for the parts around a cut as for the whole text."""
    tokenizer = tokenizer_of(name, added)
    chunks = safe_cuts(tokenizer).chunk.findall(text)
    assert "".join(chunks) == text
    whole = ids_of(tokenizer, text)
    for cut in accumulate(map(len, chunks)):
        assert ids_of(tokenizer, text[:cut]) + ids_of(tokenizer, text[cut:]) == whole


def test_what_the_tokenizer_puts_around_a_text_is_there_once():
    tokenizer = Tokenizer.from_file(str(SAMPLE_MODEL / "tokenizer.json"))
    found = ["", "one two", "one two " * 200, f"{CONTROLS[0]}one"]
    expected = [tokenizer.encode(text).ids for text in found]
    assert list(map(ids_of_bytes, TextEncoder(tokenizer).encode(found, None, add_special_tokens=True))) == expected
    assert expected[0] == [0]


# ---- where cuts are


def test_a_prompt_is_cut_between_words_numbers_and_marks():
    text = "Sold 48/2 = 24 clips.\n\nNext: it's 1,234 我们，去吧。"
    chunks = safe_cuts(tokenizer_of("deepseek")).chunk.findall(text)
    assert [chunk for chunk in chunks if chunk] == [
        *["Sold", " ", "48", "/", "2", " =", " ", "24", " clips", ".\n\nNext", ":", " it", "'s", " ", "1", ",", "234"],
        *[" ", "我们", "，", "去吧", "。"],
    ]


def test_a_number_is_cut_between_its_digits_where_each_of_them_is_a_word():
    for name, expected in (
        ("digits", ["No 1", "2", "3", ": 4", "5"]),
        ("deepseek", ["No", " ", "123", ":", " ", "45"]),
    ):
        assert [chunk for chunk in safe_cuts(tokenizer_of(name)).chunk.findall("No 123: 45") if chunk] == expected


def test_a_shared_beginning_goes_through_the_tokenizer_once(monkeypatch):
    head = "".join(f"Question {number}: how many are {number} and {number}?\n" for number in range(100))
    encoder, asked = TextEncoder(tokenizer_of("deepseek")), []
    encode = encoder._memo._encode
    monkeypatch.setattr(encoder._memo, "_encode", lambda part: asked.extend(part) or encode(part))
    encoder.encode([f"{head}Question: what is first?"], None, add_special_tokens=False)
    num_asked = len(asked)
    encoder.encode([f"{head}Question: what is second?"], None, add_special_tokens=False)
    assert asked[num_asked:] == [" second"]


class AskedByKey(dict):
    """A cache whose entries may not be iterated: there are hundreds of thousands."""

    def keys(self):
        raise AssertionError("all that is remembered is gone through")

    __iter__ = items = values = keys


def test_a_batch_does_not_go_through_all_that_is_remembered():
    encoder = TextEncoder(tokenizer_of("deepseek"))
    for memo in (encoder._memo._stretches, encoder._memo._chunks):
        memo._ids = AskedByKey()
    expected = [ids_of(tokenizer_of("deepseek"), text) for text in ("one two", "two three")]
    encoded = [encoder.encode([text], None, add_special_tokens=False)[0] for text in ("one two", "two three")]
    assert list(map(ids_of_bytes, encoded)) == expected


def changed(**parts) -> Tokenizer:
    found = json.loads(tokenizer_of("deepseek").to_str())
    return Tokenizer.from_str(json.dumps(found | parts))


def split(pattern: str, **keys) -> dict:
    found = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": found | keys}


WORDS = r"\p{L}+|\s+|[^\p{L}\s]+"


def test_a_plain_expression_has_cuts():
    assert safe_cuts(changed(**split(WORDS))).chunk.findall("one two!") == ["one", " ", "two", "!", ""]


@pytest.mark.parametrize(
    "parts",
    [
        split(r"\p{L}+(?=\s)|\s+|[^\p{L}\s]+"),  # looks at what comes after the cut
        split(r"(?<=\s)\p{L}+|\s+"),
        split(r"\p{L}+\b|\s+"),
        split(r"(?:\p{L}+ )+|\s+"),
        split(r"[[:alpha:]]+|\s+"),
        split(r"[\p{L}&&[^a]]+|\s+"),
        split(r"\p{L}?+\p{L}+|\s+"),
        split(r"\p{L}*|\s+"),  # matches nothing, too
        split(r"(\p{L})\1|\s+"),
        split(r".+"),
        split(r"(?x) \p{L}+ | \s+"),
        split(r"[\p{L} ]+|[^\p{L} ]+"),  # the rest can be read, and cuts nothing after a letter
        split(r"\p{L}{2,}"),  # a letter alone is no word, and stays with its neighbour
        split(WORDS, behavior="MergedWithPrevious"),
        split(WORDS, invert=True),
        {"pre_tokenizer": {**split(WORDS)["pre_tokenizer"], "pattern": {"String": " "}}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
    ],
)
def test_what_is_not_proven_is_not_cut_between_two_words(parts):
    found = safe_cuts(changed(**parts))
    assert found is None or not found.cut.match("e words")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_look_around_them_forbid_cuts(flag):
    tokenizer = changed()
    tokenizer.add_tokens([AddedToken("word", **{flag: True})])
    assert safe_cuts(tokenizer) is None


def test_a_normalizer_of_nothing_is_none():
    tokenizer = changed()
    tokenizer.normalizer = normalizers.Sequence([])
    assert safe_cuts(tokenizer) is not None
