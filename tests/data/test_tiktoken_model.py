"""Moonshot's vocabulary files against the tiktoken library itself."""

from __future__ import annotations

import base64
import json
import random
import shutil
from itertools import product

import pytest
import tiktoken

from batchinfer.data.tiktoken_model import FILE, NUM_RESERVED, PATTERN, tokenizer_of
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import ModelError
from support.jobs import answers, batchinfer, write_job, write_shard
from support.paths import RANDOM_MODEL

SINGLES = [bytes([byte]) for byte in range(256)]
# Every pair of bytes, those of an ASCII byte and another first: tokens show where a text was split.
PAIRS = sorted(
    (bytes(pair) for pair in product(range(256), repeat=2)), key=lambda pair: (pair[0] < 128) == (pair[1] < 128)
)
CONTEXTS = ("a%sb", "A%s1", "1%s.", " %s\n", "中%sx")
QUICK = [*range(0x3100), *range(0x3100, 0xD800, 37), *range(0xE000, 0x110000, 1009)]
CHARS = [
    pytest.param(QUICK, id="some"),
    pytest.param([*range(0xD800), *range(0xE000, 0x110000)], marks=pytest.mark.slow, id="all"),
]


def lines_of(tokens):
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def theirs(tokens, **special):
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("test", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


WORDS = (
    "The quick brown fox don't can't we're 北京市 你好世界 中文 English café naïve こんにちは 2024 3.14159 HTTPResponse"
)
ENDS = ["", " ", "'s", "\n", "\n\n  \t "]


def long_tokens():
    """A vocabulary whose tokens are made of two earlier ones, in several ways."""
    draw, tokens = random.Random(1), dict.fromkeys(SINGLES)
    for _ in range(3000):
        data = (draw.choice(WORDS.split()) + draw.choice(ENDS)).encode()
        data = data[draw.randrange(len(data)) :]
        left = draw.choice([token for token in tokens if data.startswith(token)])
        right = [token for token in tokens if data[len(left) :].startswith(token)]
        if right:
            tokens.setdefault(left + draw.choice(right))
    return list(tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The random model with such a vocabulary: 700 tokens and names for 256 ids."""
    folder = tmp_path_factory.mktemp("kimi") / "model"
    shutil.copytree(RANDOM_MODEL, folder, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens_map.json"))
    tokens = long_tokens()[:700]
    (folder / FILE).write_text(lines_of(tokens))
    names = {700: "[BOS]", 701: "[EOS]", 705: "<|im_end|>", 710: "<think>"}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(number): {"content": name, "special": name != "<think>"} for number, name in names.items()
        },
        "chat_template": "{% for m in messages %}<|im_end|>{{ m['content'] }}{% endfor %}<think>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("codes", CHARS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_texts_are_split_where_tiktoken_splits_them(folder, codes, context):
    tokens = SINGLES + PAIRS
    ours, expected = tokenizer_of(folder / FILE, lines_of(tokens)), theirs(tokens)
    texts = [context % chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    found = [encoding.ids for encoding in ours.encode_batch_fast(texts, add_special_tokens=False)]
    wrong = [text for text, ids in zip(texts, found, strict=True) if ids != expected.encode_ordinary(text)]
    assert not wrong


@pytest.mark.parametrize("num_texts", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_words_become_the_tokens_that_tiktoken_makes_of_them(folder, num_texts):
    tokens, draw = long_tokens(), random.Random(2)
    ours, expected = tokenizer_of(folder / FILE, lines_of(tokens)), theirs(tokens)
    assert max(map(len, tokens)) > 8
    parts = [token.decode(errors="ignore") for token in tokens] + ["'s", "\r\n", "  ", "…", "é", "漢字", "🎉"]
    for _ in range(num_texts):
        text = "".join(draw.choice(parts) for _ in range(draw.randrange(40)))
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode_ordinary(text), text
        assert ours.decode(ids) == text


def test_named_tokens_have_their_ids_and_the_others_reserved_names(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 700 + NUM_RESERVED
    expected = {
        "[BOS]": 700,
        "[EOS]": 701,
        "<|reserved_token_702|>": 702,
        "<think>": 710,
        "<|reserved_token_955|>": 955,
    }
    assert {name: tokenizer.token_id(name) for name in expected} == expected
    (ids,) = tokenizer.encode_chats([[{"role": "user", "content": "café"}]])
    assert ids == [705, *tokenizer.encode_piece("café"), 710]
    assert tokenizer.decode(ids) == "café<think>"


def test_a_job_runs_from_such_a_folder(folder, tmp_path):
    texts = ["The quick 北京市", "don't\n\n 2024"]
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": texts})
    job = write_job(tmp_path, model={"path": str(folder)}, sampling={"max_tokens": 8, "ignore_eos": True})
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    expected = theirs(long_tokens()[:700])
    rows = answers(tmp_path / "run")
    assert [row["prompt_tokens"] for row in rows] == [len(expected.encode_ordinary(text)) for text in texts]
    for row in rows:
        assert row["text"] == load_tokenizer(folder).decode(row["token_ids"])


GOOD = lines_of(SINGLES)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "lacks one of the 256 single bytes"),
        (GOOD + "???? 256\n", "the token in line 257 of .* is not base64"),
        (GOOD + "YWI= 258\n", "line 257 of .* does not hold a token and its rank 256"),
        (GOOD + "YWI=\n", "line 257 of .* does not hold"),
        (GOOD + "YQ== 256\n", "a token twice"),
        (GOOD[:-3], "restore the file"),
    ],
)
def test_a_damaged_file_is_a_sentence(folder, tmp_path, text, told):
    model = shutil.copytree(folder, tmp_path / "model")
    (model / FILE).write_text(text)
    with pytest.raises(ModelError, match=told):
        load_tokenizer(model)


def test_a_folder_that_splits_by_another_rule_is_refused(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer_class in tokenizer_config\.json is None, not 'TikTokenTokenizer'"):
        load_tokenizer(model)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"5000": "[FAR]"}, r"gives '\[FAR\]' the id 5000, but it is 956"),
        ({"700": "a"}, "gives 'a' the id 700, but it is 97"),
        ({"700": "[X]", "701": "[X]"}, r"gives '\[X\]' the id 701, but it is 700"),
        ({"abc": "[X]"}, "is no object of tokens by their ids"),
    ],
)
def test_names_that_cannot_have_their_ids_are_refused(folder, tmp_path, names, told):
    model = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {id: {"content": name, "special": True} for id, name in names.items()}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=told) as refused:
        load_tokenizer(model)
    assert "tokenizer_config.json" in str(refused.value)
