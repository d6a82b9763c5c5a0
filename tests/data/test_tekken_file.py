"""Mistral's vocabulary files against the tokenizer that transformers makes of them."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
import torch
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

from batchinfer.data.prompt_tokenizer import thinking_tokens
from batchinfer.data.tekken_file import FILE
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import ModelError
from support.checkpoints import make_checkpoint
from support.jobs import batchinfer, outputs, write_job, write_shard

# as in tekken.json of Mistral Large 3
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<pad>")
WORDS = "The quick brown fox don't 北京市 naïve café HTTPResponse 2024 3.14 == /// \n\n  x"


def vocabulary() -> list[bytes]:
    """500 tokens, the longer ones made of two earlier ones."""
    draw, tokens, text = (
        random.Random(3),
        dict.fromkeys(bytes([byte]) for byte in range(256)),
        f"{WORDS} {WORDS}".encode(),
    )
    for _ in range(20_000):
        first = draw.randrange(len(text))
        data = text[first : first + draw.randint(2, 9)]
        if any(data[:cut] in tokens and data[cut:] in tokens for cut in range(1, len(data))):
            tokens.setdefault(data)
    assert len(tokens) > 500
    return list(tokens)[:500]


def write(folder, **changes: Any) -> None:
    values = {
        "config": {"pattern": PATTERN, "default_vocab_size": 480, "default_num_special_tokens": 20, "version": "v13"},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(vocabulary())
        ],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)],
    }
    (folder / FILE).write_text(json.dumps(values | changes))


def test_ids_and_texts_are_those_of_the_file_that_transformers_makes(tmp_path):
    write(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), convert_tekken_tokenizer(str(tmp_path / FILE))
    draw = random.Random(5)
    texts = ["", "<s>[INST]hello[/INST]", WORDS, *(" ".join(draw.choices(WORDS.split(" "), k=9)) for _ in range(50))]
    texts += ["".join(draw.choices(WORDS, k=40)) for _ in range(50)]
    expected = [theirs.encode(text) for text in texts]
    assert ours.encode_prompts(texts) == expected
    assert max(max(ids, default=0) for ids in expected) > 256 + 20
    for ids in expected:
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs) == 480
    assert ours.eos_token_ids == {2}
    assert ours.named_tokens["bos_token"] == "<s>"
    assert thinking_tokens(ours) == (7, 8)
    assert ours.token_id("<SPECIAL_19>") == 19


def test_marks_of_tool_calls_are_shown(tmp_path):
    write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = [5, *tokenizer.encode_piece("fox"), 6, *tokenizer.encode_piece("x"), 2]
    assert tokenizer.decode(ids) == "[TOOL_CALLS]fox[ARGS]x"


@pytest.mark.parametrize(
    "changes",
    [
        {"special_tokens": None},
        {"special_tokens": [{"rank": 1, "token_str": "<s>"}]},
        {"config": {}},
        {"config": []},
        {"vocab": [{"token_bytes": "-"}]},
        {"vocab": [{"token_bytes": "QQ=="}]},
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, changes):
    write(tmp_path, **changes)
    with pytest.raises(ModelError, match=FILE):
        load_tokenizer(tmp_path)


def test_a_folder_as_mistral_publishes_it_runs_as_it_is(tmp_path):
    theirs = make_checkpoint(tmp_path / "model", "mistral-params", vocab_size=480)
    write(tmp_path / "model")
    assert not any((tmp_path / "model" / name).exists() for name in ("config.json", "tokenizer.json"))
    prompt = " ".join([WORDS] * 2)
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [prompt]})
    sampling = {"max_tokens": 8, "ignore_eos": True}
    ended = batchinfer("run", write_job(tmp_path, model={"path": "model"}, sampling=sampling))
    assert ended.code == 0, ended.err
    assert "tensors vision_encoder.*" in ended.err
    (row,) = outputs(tmp_path / "run")["a.parquet"]
    ids = load_tokenizer(tmp_path / "model").encode_prompts([prompt])[0]
    assert row["prompt_tokens"] == len(ids) > 48  # queries have three factors
    with torch.no_grad():
        best = theirs(torch.tensor([[*ids, *row["token_ids"]]])).logits[0].argmax(-1)
    assert row["token_ids"] == best[len(ids) - 1 : -1].tolist()
