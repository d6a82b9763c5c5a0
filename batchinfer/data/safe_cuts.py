"""Where a text may be cut so that the tokens of its parts joined are its tokens, whatever stands around the cut.

A fast tokenizer looks for added tokens, splits what is between them by regular expressions into words, and turns
each word into tokens. So tokens never reach over a place where every text is split:

    ... word| word   no alternative of the expressions can take a letter and then a space: always a place to cut
    ... end.|Next    some alternative takes a full stop and then letters: never one here

Between which kinds of characters that is so is proven for the tokenizer at hand; a character of no kind is never
beside a cut. An expression with anything in it that the proof does not know means no cuts at all.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, pairwise, permutations
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
    """One of some character classes, or a look at the next character; it may be repeated."""

    atoms: list[str]
    is_optional: bool
    is_single: bool  # one character is enough
    looks_ahead: bool = False

    def takes_any(self, chars: str) -> bool:
        return any(_taken(atom, chars) != "none" for atom in self.atoms)

    def takes_all(self, chars: str) -> bool:
        return len(self.atoms) == 1 and _taken(self.atoms[0], chars) == "all"


class _Unknown(ValueError):
    """Something that the proof does not know."""


@dataclass(frozen=True, slots=True)
class SafeCuts:
    """chunk: matches a text from cut to cut (and nothing at its end); cut: the character before a cut."""

    chunk: re.Pattern[str]
    cut: re.Pattern[str]


def safe_cuts(tokenizer: Tokenizer) -> SafeCuts | None:
    """The places at which texts for this tokenizer may be cut; None: none is proven.

    The tokens are those without what a post-processor puts around a text.
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
    pairs = {(a, b) for a, b in permutations(kinds, 2) if _is_cut(steps, a, b)}
    # no cut inside an added token
    kind_of = {char: kind for kind in kinds for char in kind}
    pairs -= {(kind_of.get(a, ""), kind_of.get(b, "")) for text in added for a, b in pairwise(text)}
    return _compiled(kinds, pairs) if pairs else None


def _kinds(in_added: set[str]) -> list[str]:
    """The characters of each kind; punctuation that added tokens are written with is apart, as they have no cuts."""
    kinds: list[str] = []
    for ranges in _KINDS:
        ends = zip(map(ord, ranges[::2]), map(ord, ranges[1::2]), strict=True)
        chars = [chr(code) for first, last in ends for code in range(first, last + 1)]
        apart = [char for char in chars if char in in_added and not char.isalnum()]
        kinds += filter(None, ["".join(char for char in chars if char not in apart), "".join(apart)])
    return kinds


def keeps_text(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer looks at texts as they are, without normalizing them."""
    if tokenizer.normalizer is None:
        return True
    found = json.loads(tokenizer.normalizer.__getstate__())
    return bool(found["type"] == "Sequence" and not found["normalizers"])


def _patterns(pre_tokenizer: dict[str, Any]) -> Iterator[str]:
    """The regular expressions by which a text is split, one after the other."""
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
    """The parts of each alternative of a regular expression.

    Raises:
        _Unknown: it holds anything but classes of characters, repeated, groups of such, and one to look ahead at.
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
            alternatives[-1].append(_Part(atoms, fewest == 0, fewest <= 1 and not group))
    if any(all(part.is_optional for part in parts) for parts in alternatives):
        raise _Unknown  # it can match nothing at all
    return alternatives


@cache
def _taken(atom: str, chars: str) -> str:
    """Which of the characters a class takes, as the tokenizers library itself sees it: "all", "some" or "none"."""
    left = pre_tokenizers.Split(Regex(f"(?:{atom})+"), "removed").pre_tokenize_str(chars)
    if not left:
        return "all"
    return "none" if left[0][0] == chars else "some"


def _is_cut(steps: list[list[list[_Part]]], a: str, b: str) -> bool:
    """Whether every text is split between a character of kind a and one of kind b, with the same parts around it."""
    for alternatives in steps:
        if any(_goes_on(parts, a, b) for parts in alternatives):
            return False
        # the character is in a match then, which the one beside it is not
        if any(_always_takes(parts, chars) for chars in (a, b) for parts in alternatives):
            return True
    return False


def _goes_on(parts: list[_Part], a: str, b: str) -> bool:
    """Whether an alternative that has taken a character of kind a may take, or look at, one of kind b."""
    after = dropwhile(lambda part: not part.takes_any(a), parts)
    return any(part.looks_ahead or part.takes_any(b) for part in after)


def _always_takes(parts: list[_Part], chars: str) -> bool:
    """Whether an alternative matches each of the characters by itself."""
    needed = [part for part in parts if not part.is_optional or part.looks_ahead]
    return len(needed) == 1 and needed[0].is_single and needed[0].takes_all(chars)


def _compiled(kinds: list[str], pairs: set[tuple[str, str]]) -> SafeCuts:
    """Runs of one kind after the other, up to one that is cut off from the next."""
    ends = {kind: "".join(_ranges(b) for a, b in pairs if a == kind) for kind in kinds}
    cut = sorted((kind for kind in kinds if ends[kind]), key=lambda kind: "a" not in kind)  # letters first: quicker
    apart = {kind: _ranges(kind) + "".join(_ranges(a) for a, b in pairs if b == kind) for kind in cut}
    # most chunks are a run, with a character such as a space before it, that goes up to a cut
    quick = [f"[^{apart[kind]}]?+[{_ranges(kind)}]++(?=[{ends[kind]}])" for kind in cut]
    joined = [f"[{_ranges(kind)}]++(?![{ends[kind]}])" for kind in cut]
    last = [f"[{_ranges(kind)}]++" for kind in cut]
    other = f"[^{''.join(map(_ranges, cut))}]++"
    return SafeCuts(
        chunk=re.compile("|".join([*quick, f"(?:{'|'.join([*joined, other])})*+(?:{'|'.join(last)})?"])),
        cut=re.compile("|".join(f"[{_ranges(kind)}](?=[{ends[kind]}])" for kind in cut)),
    )


@cache
def _ranges(chars: str) -> str:
    """The characters as the inside of a class, in order of their codes."""
    starts = [char for char, before in zip(chars, chr(0) + chars, strict=False) if ord(char) != ord(before) + 1]
    last = [char for char, after in zip(chars, chars[1:] + chr(0), strict=True) if ord(char) + 1 != ord(after)]
    return "".join(f"{re.escape(a)}-{re.escape(b)}" for a, b in zip(starts, last, strict=True))
