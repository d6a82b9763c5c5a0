"""Marks of calls inside strings of JSON, hidden from the search for the marks that begin and end calls."""

import json
import re
from dataclasses import dataclass, replace

from batchinfer.finish.call_forms import WrittenCall

# what stands before the JSON of a call, in any form
_BEFORE_JSON = re.compile(
    r"(?:<｜tool▁sep｜>(?:[^\n<]*\n```json\n)?|<\|tool_call_argument_begin\|>|<tool_call>|\[ARGS\]|\[TOOL_CALLS\])"
    r"\s*+(?=[\[{\"])"
)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_DECODER = json.JSONDecoder()
_FIRST_CHARACTERS = "<["  # of all marks
_MOST_FAILED = 100  # texts that are no JSON; each takes time linear in the answer
_PRIVATE = range(0xE000, 0xF900)  # characters that mean nothing in Unicode


@dataclass(frozen=True, slots=True)
class HiddenMarks:
    """An answer in which the strings of its calls' JSON hold no mark.

    text: as long as the answer; in these strings, characters that the answer does not have stand for < and [.
    """

    text: str
    _back: dict[int, str]

    def restored(self, call: WrittenCall) -> WrittenCall:
        """Return a call that was read from the text as the answer has it."""
        arguments = call.arguments
        if not self._back or isinstance(arguments, dict):
            return call
        own_id = None if call.id is None else call.id.translate(self._back)
        return replace(call, name=call.name.translate(self._back), arguments=arguments.translate(self._back), id=own_id)


def hide_marks(text: str) -> HiddenMarks:
    """Hide the marks in an answer's JSON; text that is not JSON stays as it is."""
    parts: list[str] = []
    place = done = num_failed = 0
    if _BEFORE_JSON.search(text) is None or not (there := _stand_ins(text)):
        return HiddenMarks(text, {})
    while num_failed < _MOST_FAILED and (begin := _BEFORE_JSON.search(text, place)) is not None:
        place = begin.end()
        try:
            _, end = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            num_failed += 1
            continue
        inside = _STRING.sub(lambda string: string[0].translate(there), text[place:end])
        parts += [text[done:place], inside]
        place = done = end
    return HiddenMarks("".join(parts) + text[done:], {ord(new): chr(old) for old, new in there.items()})


def _stand_ins(text: str) -> dict[int, str]:
    used = set(text)
    free = [char for char in map(chr, _PRIVATE) if char not in used]
    return {ord(char): new for char, new in zip(_FIRST_CHARACTERS, free, strict=False)} if len(free) > 1 else {}
