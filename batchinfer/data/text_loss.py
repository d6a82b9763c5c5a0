"""Check that a tokenizer decodes its tokens to the text that was encoded.

A tokenizer file with a pre-tokenizer, normalizer or decoder that does not belong to its vocabulary still encodes every
prompt, but silently loses blanks, capitals or whole characters.
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
    '\n\n\t"quoted" ``lines``\n \n',
    "Größe, déjà vu, привет, 你好世界, 🙂",
)


def load_checked_tokenizer(folder: Path) -> PromptTokenizer:
    """Load a model's tokenizer and check that it loses no text.

    Raises:
        ModelError: the tokenizer is missing or broken, or loses text.
    """
    tokenizer = load_tokenizer(folder)
    check_round_trip(tokenizer)
    return tokenizer


def check_round_trip(tokenizer: PromptTokenizer) -> None:
    """Refuse a tokenizer that decodes the tokens of a plain text to another text.

    A blank at the start may differ (SentencePiece), and so may the Unicode normal form. A text that cannot be encoded
    is no loss: a row with such a text becomes an error row.

    Raises:
        ModelError: a text comes back changed.
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
