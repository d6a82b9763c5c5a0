"""Location of tool calls in the text of an answer: after the thinking, in the model's own form, not inside strings."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchinfer.data.prompt_tokenizer import ANALYSIS_MARKS, THINKING_MARKS
from batchinfer.finish.call_forms import FORMS, CallForm, WrittenCall

_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of an answer's text.

    calls: [] if the answer calls nothing, None if a call is cut off or not in the form.
    content: the text before, between and behind the calls, without blanks alone between and behind them; the whole text
        if there are no calls.
    form: the form of the calls.
    """

    calls: list[WrittenCall] | None
    content: str
    form: CallForm | None = None


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """A parser of tool calls in the forms of one model.

    own_forms: the forms that the model folder shows as the model's own, by name. If it shows none, all forms are
        tried, and a mark counts only if it begins a call: prose may quote the marks of another family.
    """

    own_forms: Sequence[str] = ()

    def read(self, text: str, *, is_cut: bool = False) -> Answer:
        """Parse an answer; calls inside the thinking do not count.

        Args:
            is_cut: whether max_tokens cut the answer; its last block of calls may then lack an end.
        """
        hidden = hide_marks(text)
        found = self._read_hidden(hidden.text, is_cut)
        calls = None if found.calls is None else [hidden.restored(call) for call in found.calls]
        return Answer(calls, hidden.shown(found.content), found.form)

    def _read_hidden(self, text: str, is_cut: bool) -> Answer:
        start, is_certain = _end_of_thinking(text)
        # a call's arguments may contain the mark that ends thinking
        if start and not is_certain and any(self._is_open(form, text, start) for form in self._forms()):
            whole = self._read_from(0, text, is_cut)
            if whole.calls:
                return whole
        return self._read_from(start, text, is_cut)

    def _forms(self) -> list[CallForm]:
        return [form for form in FORMS if form.name in self.own_forms or not self.own_forms]

    def _read_from(self, start: int, text: str, is_cut: bool) -> Answer:
        places = [(self._first_block(form, text, start, is_cut), form) for form in self._forms()]
        found = [(place, form) for place, form in places if place is not None]
        if not found:
            is_broken = self.own_forms and any(form.inner and text.find(form.inner, start) >= 0 for _, form in places)
            return Answer(None if is_broken else [], text)
        # two forms may have the same mark
        place, form = min(found, key=lambda one: (one[0], not self._opens(one[1], text, one[0])))
        thought = _end_of_later_thinking(text, start, place, is_cut)
        if thought is not None:
            return self._read_from(thought, text, is_cut)
        is_broken = self.own_forms and form.inner is not None and text.find(form.inner, start, place) >= 0
        calls, others = (None, "") if is_broken else _calls(form, text[place:], is_cut)
        return Answer(calls, text[:place].removesuffix(form.before) + others, form)

    def _first_block(self, form: CallForm, text: str, start: int, is_cut: bool) -> int | None:
        """Return the position of the mark that begins the first block of calls, None if there is no block."""
        mark = None
        for mark in form.begin.finditer(text, start):
            if self.own_forms or form.opens.match(text, mark.end()):
                return mark.start()
        is_begun = mark is not None and is_cut and form.opening.startswith(text[mark.end() :].strip())
        return mark.start() if mark is not None and is_begun else None

    def _opens(self, form: CallForm, text: str, place: int) -> bool:
        mark = form.begin.match(text, place)
        return mark is not None and form.opens.match(text, mark.end()) is not None

    def _is_open(self, form: CallForm, text: str, place: int) -> bool:
        """Return whether a position is inside a block of calls."""
        ends = [mark.end() for mark in form.begin.finditer(text, 0, place) if self._opens(form, text, mark.start())]
        return bool(ends) and form.end.search(text, ends[-1], place) is None


def _end_of_thinking(text: str) -> tuple[int, bool]:
    """Return the position after the thinking in a text, and whether the text has the mark that begins the thinking.

    If the prompt has begun the thinking, the text has only the mark of its end.
    """
    blanks = _BLANKS.match(text)
    start = blanks.end() if blanks else 0
    for begin, end in (*THINKING_MARKS, ANALYSIS_MARKS):
        if text.startswith(begin, start):
            place = text.find(end)
            return (place + len(end) if place >= 0 else len(text)), True
    ends = [
        place + len(end)
        for begin, end in THINKING_MARKS
        if (place := text.find(end)) >= 0 and text.find(begin, 0, place) < 0
    ]
    return min(ends, default=0), False


def _end_of_later_thinking(text: str, start: int, place: int, is_cut: bool) -> int | None:
    """Return the end of the thinking that begins after `start` and contains `place`, None without such thinking.

    A mark that begins thinking without an end does so only in an answer that is cut off: else prose quotes the mark.
    """
    for begin, end in (*THINKING_MARKS, ANALYSIS_MARKS):
        first = text.rfind(begin, start, place)
        if first < 0 or text.find(end, first, place) >= 0:
            continue
        last = text.find(end, place)
        if last >= 0:
            return last + len(end)
        if is_cut:
            return len(text)
    return None


def _calls(form: CallForm, text: str, is_cut: bool) -> tuple[list[WrittenCall] | None, str]:
    """Return the calls in a text that begins with a block of calls, and the text behind the blocks."""
    calls: list[WrittenCall] = []
    others = ""
    for block in form.begin.split(text)[1:]:
        end = form.end.search(block)
        inside, behind = (block[: end.start()], block[end.end() :]) if end else (block, "")
        found = form.read(inside) if end or not (is_cut or form.needs_end) else None
        if not found:
            return None, ""
        calls += found
        others += behind if behind.strip() else ""
    return calls, others


# what stands before the JSON of a call, in any form
_BEFORE_JSON = re.compile(
    r"(?:<｜tool▁sep｜>(?:[^\n<]*\n```json\n)?|<\|tool_call_argument_begin\|>|<tool_call>|<\|message\|>|\[ARGS\]|\[TOOL_CALLS\])"
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

    def shown(self, text: str) -> str:
        """Return a part of the text as the answer has it."""
        return text.translate(self._back)

    def restored(self, call: WrittenCall) -> WrittenCall:
        """Return a call that was read from the text as the answer has it."""
        arguments = call.arguments
        if not self._back or isinstance(arguments, dict):
            return call
        own_id = None if call.id is None else call.id.translate(self._back)
        return replace(call, name=call.name.translate(self._back), arguments=arguments.translate(self._back), id=own_id)


def hide_marks(text: str) -> HiddenMarks:
    """Replace marks of calls and thinking inside an answer's JSON texts, so that no parser takes them for its own."""
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
