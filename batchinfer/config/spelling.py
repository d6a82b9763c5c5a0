"""Suggestions for misspelt words, and for other projects' words."""

import difflib
from collections.abc import Iterable

# what others call a value, as the value here
_OTHER_WORDS = {
    "int8": "fp8",  # 8 bits a weight
    "w8a8": "fp8",
    "float8": "fp8",
    "fp16": "bfloat16",
    "float16": "bfloat16",
    "half": "bfloat16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
}


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the known word closest to `word` as a question; `otherwise` if no known word is close."""
    meant = closest(word, known)
    return otherwise if meant is None else f"did you mean {meant}?"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to `word`; None if no known word is close."""
    by_fold = {name.lower(): name for name in known}
    if (meant := _OTHER_WORDS.get(word.lower())) in by_fold:
        return meant
    found = difflib.get_close_matches(word.lower(), by_fold, n=1)
    return by_fold[found[0]] if found else None
