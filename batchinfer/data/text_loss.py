"""The check that a tokenizer gives plain text back.

A file that some tool saved with another pre-tokenizer, normalizer or decoder than its vocabulary needs still encodes
every prompt: blanks, capitals or whole characters are gone without a word.
"""

import json
import unicodedata
from pathlib import Path

from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import ModelError

PLAIN_TEXTS = (
    "hello world again",
    "Hello World, 12 times: 3.5 + 4 = 7.5 (isn't it?)",
    "if a:\n    b = c  # two  blanks\n\treturn b",
    "Größe, déjà vu, привет, 你好世界, 🙂",
)


def sound_tokenizer(folder: Path) -> PromptTokenizer:
    """Load a model's tokenizer.

    Raises:
        ModelError: it is missing or broken, or loses text.
    """
    tokenizer = load_tokenizer(folder)
    refuse_lost_text(tokenizer)
    return tokenizer


def refuse_lost_text(tokenizer: PromptTokenizer) -> None:
    """Encode plain texts and decode them again.

    A blank at the start may come or go, as SentencePiece has it, and characters may come back in another normal form of
    Unicode. A text that cannot be encoded is no loss: a row with such a text becomes an error row.

    Raises:
        ModelError: a text comes back as another one.
    """
    for text in PLAIN_TEXTS:
        try:
            found = tokenizer.decode(tokenizer.encode_piece(text))
        except Exception:  # the tokenizers library raises nothing more special
            continue
        if _compared(found) != _compared(text):
            raise ModelError(
                f"{tokenizer.file} loses text: it encodes {_quoted(text)} as tokens of {_quoted(found)}, so the model "
                "would not see the prompts as they are; restore the file as the model's authors published it"
            )


def _compared(text: str) -> str:
    return unicodedata.normalize("NFKC", text).removeprefix(" ")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
