"""Rows, templates and tokenizers made to break what reads them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

SAMPLE_MODEL = Path(__file__).parents[2] / "sample_data" / "model"
# of DeepSeek-V3; its last parts cost much for long white space
DEEPSEEK_SPLIT = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_SAMPLE = json.loads((SAMPLE_MODEL / "tokenizer.json").read_text())
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
CONTROLS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


# none of these can render a harmless chat
TEMPLATES = {
    "lists": "{{ [[0] * 10**9] }}",
    "nested loops": NESTED,
    "deep loops": "{% for a in range(9) %}" + NESTED + "{% endfor %}",
    "slices": "{{ messages | slice(10**9) | list }}",
    "batches": "{{ messages | batch(10**9, 1) | list }}",
    "long text": "{{ '%01000000000000d' % 1 }}",
    "center": "{{ 'x' | center(10**12) }}",
    "doubling": "{% set n = namespace(s='x' * 64) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "recursive macro": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}{{ m(1) }}",
    "joins": "{{ range(99999) | map('string') | join('x' * 10**7) }}",
    "broken": "{% for %}",
    "deep": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "many ifs": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "sorting": "{% for i in range(99999) %}{% set x = range(99999) | sort | list %}{% endfor %}",
    "uniques": "{% for i in range(99999) %}{% set x = range(99999) | unique | list %}{% endfor %}",
    "sums": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    "tojson": "{% for i in range(99999) %}{% set x = (range(99999) | list) | tojson %}{% endfor %}",
    "formats": "{% for i in range(99999) %}{% set x = '%9999999d' % i %}{% endfor %}",
    "joins of lists": "{% for i in range(99999) %}{% set x = (range(99999) | list) | join %}{% endfor %}",
    "groups": "{% for i in range(99999) %}{% set x = range(99999) | batch(7) | list %}{% endfor %}",
    "reversals": "{% for i in range(99999) %}{% set x = range(99999) | reverse | list %}{% endfor %}",
    "selects": "{% for i in range(99999) %}{% set x = range(99999) | select | list %}{% endfor %}",
    "maximums": "{% for i in range(99999) %}{% set x = range(99999) | max %}{% endfor %}",
    "growing list": "{% set n = namespace(l=[0]) %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "many variables": "{{ (" + "messages + " * 50 + "messages) * 10**9 }}",
    "escapes": "{% for i in range(99999) %}{% set x = ('<' * 10**6) | e %}{% endfor %}",
    "products": "{% for i in range(99999) %}{% set x = [0] * 10**8 %}{% endfor %}",
}
# parts of tokenizer.json, or all of it, that cannot be used
TOKENIZERS: dict[str, dict[str, Any] | str] = {
    "bad pattern": {"pre_tokenizer": {**_SPLIT, "pattern": {"Regex": "(a+"}}},
    "dropout": {"model": {**_SAMPLE["model"], "dropout": 0.1}},
    "dropout 1": {"model": {**_SAMPLE["model"], "dropout": 1.0}},
    "no model": {"model": None},
    "no such model": {"model": {"type": "Nothing"}},
    "merges of nothing": {"model": {**_SAMPLE["model"], "merges": [["not", "there"]]}},
    "an id below zero": {"model": {**_SAMPLE["model"], "vocab": {**_SAMPLE["model"]["vocab"], "zz": -1}}},
    "an id too large": {"model": {**_SAMPLE["model"], "vocab": {**_SAMPLE["model"]["vocab"], "zz": 2**40}}},
    "vocabulary as a list": {"model": {**_SAMPLE["model"], "vocab": [1, 2]}},
    "no added tokens": {"added_tokens": None},
    "added token without text": {"added_tokens": [{"id": 0}]},
    "version": {"version": "99"},
    "normalizer of nothing": {"normalizer": {"type": "Nothing"}},
    "bad charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "decoder of nothing": {"decoder": {"type": "Nothing"}},
    "unigram": {"model": {"type": "Unigram", "unk_id": 7, "vocab": []}},
    "empty file": "",
    "half a file": json.dumps(_SAMPLE)[:20_000],
    "a list": "[]",
    "deep list": "[" * 1_000_000,
    "not text": "\udcff",
    "a number": "1e999999",
}  # fmt: skip


def model_folder(folder: Path, *, split: str | None = None, template: str | None = None, **parts: Any) -> Path:
    """The sample model's folder with another pre-tokenizer pattern, template or other parts of tokenizer.json."""
    shutil.copytree(SAMPLE_MODEL, folder)
    found = json.loads((folder / "tokenizer.json").read_text())
    if split is not None:
        found["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = split
        found["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = False
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer.json").write_text(json.dumps(found | parts))
    return folder


def hostile_texts(count: int, *, seed: int = 0) -> list[str]:
    """Control tokens, endless white space, words of a megabyte, what a pattern (a+)+$ cannot match, odd characters."""
    chance = random.Random(seed)
    kinds = [
        lambda: "".join(chance.choices([*CONTROLS, "x", " "], k=20)),
        lambda: " " * 11_000_000,
        lambda: "a" * chance.randint(28, 60) + "!",
        lambda: chance.choice("aÄ漢🏳") * 1_000_000,
        lambda: "".join(map(chr, chance.choices([*range(1, 0xD800), *range(0xE000, 0x11_0000)], k=500))),
        lambda: "\u200d\u202e\x00\ufffe\ud7ff" * 100,
    ]
    return [kinds[number % len(kinds)]() for number in range(count)]


def hostile_model(folder: Path, name: str) -> Path:
    """A model folder with one of TEMPLATES or TOKENIZERS."""
    if name in TEMPLATES:
        return model_folder(folder, template=TEMPLATES[name])
    parts = TOKENIZERS[name]
    model_folder(folder, **(parts if isinstance(parts, dict) else {}))
    if isinstance(parts, str):
        (folder / "tokenizer.json").write_bytes(parts.encode(errors="surrogateescape"))
    return folder
