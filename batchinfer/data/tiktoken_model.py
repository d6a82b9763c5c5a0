"""Reader of tiktoken.model, the vocabulary file of Moonshot's checkpoints (Moonlight, Kimi-K2, K2.5).

Such a folder has no tokenizer.json. Its rule for splitting texts is in Python code, which is never run here; PATTERN is
a copy of this rule. Source: class TikTokenTokenizer of moonshotai/Kimi-K2-Instruct.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from batchinfer.records import ModelError

FILE = "tiktoken.model"
TOKENIZER_CLASS = "TikTokenTokenizer"  # in tokenizer_config.json of folders whose rule is PATTERN
NUM_RESERVED = 256  # ids after the vocabulary, for tokens with names
_UPPER, _LOWER = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def tokenizer_of(file: Path, text: str) -> Tokenizer:
    """Return the tokenizer without its named tokens.

    Args:
        file: the file's name, for messages.
        text: the file's content: a token's bytes in base64 and its rank on each line.

    Raises:
        ModelError: the file is damaged.
    """
    return bpe_tokenizer(_read_ranks(file, text), PATTERN, {})


def bpe_tokenizer(ranks: dict[bytes, int], pattern: str, before: dict[str, int]) -> Tokenizer:
    """Return a byte-level BPE tokenizer whose merges have the order of the tokens' ranks.

    Args:
        ranks: the tokens in the order of their ranks, all single bytes among them.
        pattern: regular expression that splits a text before merges.
        before: tokens with the first ids, which are not merged.
    """
    chars = _chars_of_bytes()
    names = {token: "".join(chars[byte] for byte in token) for token in ranks}
    merges = [pair for token in ranks for pair in _pairs(token, ranks)]
    tokenizer = Tokenizer(
        models.BPE(
            {names[token]: len(before) + rank for token, rank in ranks.items()} | before,
            [(names[left], names[right]) for left, right in merges],
            ignore_merges=True,  # a part of a text that is a token needs no merges
        )
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def named_tokens(file: Path, config: dict[str, Any], num_ranks: int) -> dict[str, dict[str, Any]]:
    """Return `added_tokens_decoder` with a reserved token for each id without a name.

    Args:
        file: tokenizer_config.json, for messages.
        config: its content.
        num_ranks: number of tokens in the vocabulary file.

    Raises:
        ModelError: `added_tokens_decoder` is no object of tokens by id.
    """
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(
        id.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        for id, token in listed.items()
    ):
        raise ModelError(f"added_tokens_decoder in {file} is no object of tokens by their ids; {_RESTORE}")
    ids = range(num_ranks, num_ranks + NUM_RESERVED)
    return {str(id): {"content": f"<|reserved_token_{id}|>", "special": True} for id in ids} | listed


def check_names(file: Path, tokenizer: Tokenizer, names: dict[str, dict[str, Any]]) -> None:
    """Raise ModelError if a named token has another id than in `file`."""
    for listed, token in names.items():
        found = tokenizer.token_to_id(token["content"])
        if found != int(listed):
            raise ModelError(
                f"added_tokens_decoder in {file} gives {token['content']!r} the id {listed}, but it is {found} behind "
                f"{FILE}: ids follow each other, and a name stands once and is no token of the vocabulary; {_RESTORE}"
            )


def _read_ranks(file: Path, text: str) -> dict[bytes, int]:
    """Return the rank of each token, in the order of ranks."""
    tokens = []
    for number, line in enumerate(text.splitlines()):
        token, _, rank = line.partition(" ")
        if rank != str(number):
            raise ModelError(f"line {number + 1} of {file} does not hold a token and its rank {number}; {_RESTORE}")
        try:
            tokens.append(base64.b64decode(token, validate=True))
        except binascii.Error:
            raise ModelError(f"the token in line {number + 1} of {file} is not base64; {_RESTORE}") from None
    return ranks_of(tokens, file)


def ranks_of(tokens: list[bytes], file: Path) -> dict[bytes, int]:
    """Return the rank of each token, which is its place in the vocabulary.

    Raises:
        ModelError: a token is there twice, or a single byte is missing; the message names the file.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelError(f"{file} holds a token twice, or lacks one of the 256 single bytes; {_RESTORE}")
    return ranks


_RESTORE = "restore the file"


def _pairs(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that can be merged to `token`, sorted by the ranks of the two."""
    cuts = [(token[:place], token[place:]) for place in range(1, len(token))]
    return sorted(
        ((left, right) for left, right in cuts if left in ranks and right in ranks),
        key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
    )


def _chars_of_bytes() -> list[str]:
    """Return the character of each byte in a byte-level vocabulary; printable bytes are themselves (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
