"""Reader of tekken.json, the vocabulary file of Mistral's own code (Mistral Large 3).

Special tokens have the first ids, byte-level tokens the ids after them. A file may list more tokens than are used.
Source: transformers' integrations/mistral/tokenizer.py, which converts the same file to a tokenizer.json.
"""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from batchinfer.data.tiktoken_model import bpe_tokenizer, ranks_of
from batchinfer.records import ModelError

FILE = "tekken.json"
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def tokenizer_of(file: Path, text: str, shown: tuple[str, ...]) -> Tokenizer:
    """Return the tokenizer with its special tokens.

    Args:
        file: the file's name, for messages.
        text: the file's content.
        shown: special tokens that decoded texts contain.

    Raises:
        ModelError: the file is damaged, or so old that it does not name its special tokens.
    """
    try:
        values = json.loads(text)
        settings = values["config"]
        special = _special_tokens(values["special_tokens"], settings.get("default_num_special_tokens"))
        tokens = [base64.b64decode(token["token_bytes"], validate=True) for token in values["vocab"]]
        size = settings.get("default_vocab_size")
        if size is not None:
            tokens = tokens[: size - len(special)]
        pattern = settings["pattern"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} is no vocabulary with special_tokens ({error!r}); restore the file") from None
    tokenizer = bpe_tokenizer(ranks_of(tokens, file), pattern, {name: id for id, name in enumerate(special)})
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=name not in shown) for name in special])
    return tokenizer


def _special_tokens(listed: list[dict[str, Any]], count: int | None) -> list[str]:
    """Return the texts of the special tokens by id; ids without a text get a placeholder name."""
    texts = [token["token_str"] for token in sorted(listed, key=lambda token: token["rank"])]
    if sorted(token["rank"] for token in listed) != list(range(len(texts))) or len(set(texts)) < len(texts):
        raise ValueError("special tokens that do not follow each other")
    return [*texts, *(f"<SPECIAL_{id}>" for id in range(len(texts), count or 0))]
