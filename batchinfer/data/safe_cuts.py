"""Places at which a text may be cut: the tokens of the parts, joined, are the tokens of the whole text.

A fast tokenizer searches for added tokens, splits the text between them by regular expressions into words, and turns
each word into tokens. So no token crosses a place where every text is split:

    ... word| word   no alternative of the expressions can take a letter and then a space: always a place to cut
    ... end.|Next    some alternative takes a full stop and then letters: never one here

The pairs of kinds of characters with a cut between them are proven for each tokenizer; a character of no kind is never
next to a cut. If an expression contains anything that the proof does not cover, there are no cuts at all.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

# characters that tokenizers treat alike, as ranges (first, last)
_KINDS = [
    "  ",
    "\n\n\r\r",
    "09",
    "AZaz",
    "!/:@[`{~",
    "ÀÖØöøɏͰͳΆΆΈΊΌΌΎΡΣϵЀҁҊԯ",  # Latin with accents, Greek, Cyrillic
    "一龥",
    "ぁゖァヺ",
    "가힣",
    "。。，，、、！！？？：：；；（（））「」",
]
# of pre_tokenizers.ByteLevel
_BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ESCAPED = r"\\p\{\w+\}|\\[sSdDrnt]|\\[^\w\s]"
_ATOM = rf"\[\^?(?:{_ESCAPED}|&(?!&)|[^\[\]\\&])+\]|{_ESCAPED}|[^\\^$.|?*+()\[\]{{}}]"
_TOKEN = re.compile(
    rf"(?P<bar>\|)|(?P<ahead>\(\?[!=](?:{_ATOM})\))(?=\||$)"
    rf"|(?:(?P<atom>{_ATOM})|(?P<flags>\(\?i?:)(?P<group>(?:{_ATOM}|\|)+)\))"
    r"(?P<count>[?*+]|\{\d+(?:,\d*)?\})?(?![?*+{])"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a regular expression: some character classes, perhaps repeated, or a look at the next character."""

    atoms: list[str]
    is_optional: bool
    is_single: bool  # one character is enough
    looks_ahead: bool = False
    is_once: bool = False  # it takes at most one character

    def takes_any(self, chars: str) -> bool:
        return any(_taken(atom, chars) != "none" for atom in self.atoms)

    def takes_all(self, chars: str) -> bool:
        return len(self.atoms) == 1 and _taken(self.atoms[0], chars) == "all"


class _Unknown(ValueError):
    """A part of a tokenizer that the proof does not cover."""


@dataclass(frozen=True, slots=True)
class SafeCuts:
    """Patterns of the cuts of a tokenizer.

    chunk: matches the text from one cut to the next (the empty text at the end).
    cut: matches the character before a cut.
    """

    chunk: re.Pattern[str]
    cut: re.Pattern[str]


def safe_cuts(tokenizer: Tokenizer) -> SafeCuts | None:
    """Return the cuts of texts for this tokenizer, None if none can be proven.

    Tokens are meant without the special tokens that a post-processor puts around a text.
    """
    tokens = tokenizer.get_added_tokens_decoder().values()
    if (
        not isinstance(tokenizer.model, models.BPE)
        or tokenizer.pre_tokenizer is None
        or not keeps_text(tokenizer)
        or any(token.single_word or token.lstrip or token.rstrip for token in tokens)
    ):
        return None
    added = [token.content for token in tokens]
    try:
        steps = [_alternatives(pattern) for pattern in _patterns(json.loads(tokenizer.pre_tokenizer.__getstate__()))]
    except _Unknown:
        return None
    kinds = _kinds(set("".join(added)))
    pairs = {(a, b) for a, b in product(kinds, repeat=2) if _is_cut(steps, a, b)}
    # no cut inside an added token
    kind_of = {char: kind for kind in kinds for char in kind}
    pairs -= {(kind_of.get(a, ""), kind_of.get(b, "")) for text in added for a, b in pairwise(text)}
    return _compiled(kinds, pairs) if pairs else None


def _kinds(in_added: set[str]) -> list[str]:
    """Return the characters of each kind. Punctuation of added tokens has separate kinds, because it has no cuts."""
    kinds: list[str] = []
    for ranges in _KINDS:
        ends = zip(map(ord, ranges[::2]), map(ord, ranges[1::2]), strict=True)
        chars = [chr(code) for first, last in ends for code in range(first, last + 1)]
        apart = [char for char in chars if char in in_added and not char.isalnum()]
        kinds += filter(None, ["".join(char for char in chars if char not in apart), "".join(apart)])
    return kinds


def keeps_text(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer does not normalize texts."""
    if tokenizer.normalizer is None:
        return True
    found = json.loads(tokenizer.normalizer.__getstate__())
    return bool(found["type"] == "Sequence" and not found["normalizers"])


def _patterns(pre_tokenizer: dict[str, Any]) -> Iterator[str]:
    """Yield the regular expressions that split a text, in order of their use."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    for place, step in enumerate(steps):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            if "Regex" not in step["pattern"]:
                raise _Unknown
            yield step["pattern"]["Regex"]
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"] and place == len(steps) - 1:
            if step["use_regex"]:
                yield _BYTE_LEVEL
        else:
            raise _Unknown


def _alternatives(pattern: str) -> list[list[_Part]]:
    """Return the parts of each alternative of a regular expression.

    Raises:
        _Unknown: the expression has parts other than repeated character classes, groups of them, and one look ahead.
    """
    alternatives: list[list[_Part]] = [[]]
    place = 0
    while place < len(pattern):
        found = _TOKEN.match(pattern, place)
        if found is None:
            raise _Unknown
        place = found.end()
        if found["bar"]:
            alternatives.append([])
        elif found["ahead"]:
            alternatives[-1].append(_Part([], True, True, looks_ahead=True))
        else:
            count = found["count"] or "{1}"
            fewest = 0 if count in "?*" else 1 if count == "+" else int(re.findall(r"\d+", count)[0])
            # of a group, the characters count as if in any order
            group = [f"{found['flags']}{atom})" for atom in re.findall(_ATOM, found["group"] or "")]
            if "i" in (found["flags"] or ""):
                group.append(r"[^\x00-\x7f]")  # where case does not matter, one such character can stand for several
            atoms = [found["atom"]] if found["atom"] else group
            is_once = not group and count in ("?", "{1}")
            alternatives[-1].append(_Part(atoms, fewest == 0, fewest <= 1 and not group, is_once=is_once))
    if any(all(part.is_optional for part in parts) for parts in alternatives):
        raise _Unknown  # it can match nothing at all
    return alternatives


@cache
def _taken(atom: str, chars: str) -> str:
    """Return whether a class matches "all", "some" or "none" of the characters, asked of the tokenizers library."""
    left = pre_tokenizers.Split(Regex(f"(?:{atom})+"), "removed").pre_tokenize_str(chars)
    if not left:
        return "all"
    return "none" if left[0][0] == chars else "some"


def _is_cut(steps: list[list[list[_Part]]], a: str, b: str) -> bool:
    """Return whether every text is split between characters of kinds a and b, with the same words around the cut."""
    for alternatives in steps:
        if any(_goes_on(parts, a, b) for parts in alternatives):
            return False
        # the character is in a match then, and its neighbour is not
        if any(_always_takes(parts, chars) for chars in (a, b) for parts in alternatives):
            return True
    return False


def _goes_on(parts: list[_Part], a: str, b: str) -> bool:
    """Return whether an alternative may match, or look at, a character of kind b after one of kind a."""
    return any(
        other.looks_ahead or other.takes_any(b)
        for place, part in enumerate(parts)
        if part.takes_any(a)
        for other in parts[place + part.is_once :]
    )


def _always_takes(parts: list[_Part], chars: str) -> bool:
    """Return whether an alternative matches each of the characters alone."""
    needed = [part for part in parts if not part.is_optional or part.looks_ahead]
    return len(needed) == 1 and needed[0].is_single and needed[0].takes_all(chars)


def _compiled(kinds: list[str], pairs: set[tuple[str, str]]) -> SafeCuts:
    """Compile the patterns of chunks (runs of characters of one kind each, up to the first cut) and of cuts.

    A run is a single character where each character of the kind is a word (digits of many tokenizers).
    """
    ends = {kind: "".join(_ranges(b) for a, b in pairs if a == kind) for kind in kinds}
    cut = sorted((kind for kind in kinds if ends[kind]), key=lambda kind: "a" not in kind)  # letters first: quicker
    apart = {kind: _ranges(kind) + "".join(_ranges(a) for a, b in pairs if b == kind) for kind in cut}
    last = [f"[{_ranges(kind)}]" if (kind, kind) in pairs else f"[{_ranges(kind)}]++" for kind in cut]
    # most chunks are a run, with a character such as a space before it, that goes up to a cut
    quick = [f"[^{apart[kind]}]?+{run}(?=[{ends[kind]}])" for kind, run in zip(cut, last, strict=True)]
    joined = [f"{run}(?![{ends[kind]}])" for kind, run in zip(cut, last, strict=True)]
    other = f"[^{''.join(map(_ranges, cut))}]++"
    return SafeCuts(
        chunk=re.compile("|".join([*quick, f"(?:{'|'.join([*joined, other])})*+(?:{'|'.join(last)})?"])),
        cut=re.compile("|".join(f"[{_ranges(kind)}](?=[{ends[kind]}])" for kind in cut)),
    )


@cache
def _ranges(chars: str) -> str:
    """Return the characters in the form of a regular expression's class, without brackets, sorted."""
    starts = [char for char, before in zip(chars, chr(0) + chars, strict=False) if ord(char) != ord(before) + 1]
    last = [char for char, after in zip(chars, chars[1:] + chr(0), strict=True) if ord(char) + 1 != ord(after)]
    return "".join(f"{re.escape(a)}-{re.escape(b)}" for a, b in zip(starts, last, strict=True))
