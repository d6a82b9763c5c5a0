"""The calls of tools in an answer's text, as the models of the families write them.

V3, R1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
         ```json
         {"city": "Rome"}
         ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"city": "Rome"}
         <｜tool▁call▁end｜><｜tool▁calls▁end｜>   (in one line)
V3.2     (behind an empty line)
         <｜DSML｜function_calls>
         <｜DSML｜invoke name="NAME">
         <｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
         </｜DSML｜invoke>
         </｜DSML｜function_calls>
Kimi-K2  <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"city": "Rome"}
         <|tool_call_end|><|tool_calls_section_end|>   (in one line)
GLM      <tool_call>NAME
         <arg_key>city</arg_key>
         <arg_value>Rome</arg_value>
         </tool_call>
Youtu    <tool_call>{"name": "NAME", "arguments": {"city": "Rome"}}</tool_call>   (as Hermes)
Mistral  [TOOL_CALLS]NAME[ARGS]{"city": "Rome"}   each call; before [ARGS] there may be [CALL_ID]abcdefghi
         [TOOL_CALLS][{"name": "NAME", "arguments": {"city": "Rome"}}]   (older)
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from batchinfer.data.schemas.outputs import TOOL_CALLS

Call = dict[str, str]  # name, arguments as JSON text of an object, and the id where the model wrote one


@dataclass(frozen=True, slots=True)
class _Form:
    """How calls are written: blocks from one mark to the next, and what is between."""

    begin: str
    end: str
    calls: Callable[[str], list[Call] | None]  # at least one of a block; None: not in this form
    inner: str  # begins a call, which outside a block is none
    before: str = ""  # between the words of an answer and its first block, which the chat template writes again
    # of name, key and place, where the chat template needs ids of its own when calls come back in a chat
    make_id: Callable[[str, str, int], str] | None = None
    needs_end: bool = False  # otherwise a stop string may have cut off the block's end, but not that of a call


def tool_calls(texts: pa.Array, finish_reasons: pa.Array) -> pa.Array:
    """The calls in each text; null where there is no text, or what it calls cannot be read."""
    answers = zip(texts.to_pylist(), finish_reasons.to_pylist(), strict=True)
    found = [None if text is None else parse_tool_calls(text, is_cut=reason == "length") for text, reason in answers]
    return pa.array(found, TOOL_CALLS)


def before_calls(text: str) -> str:
    """An answer up to its first call: what stands as content beside the calls when the answer comes back in a chat."""
    form = _form_of(text)
    return text if form is None else text.partition(form.begin)[0].removesuffix(form.before)


def parse_tool_calls(text: str, *, is_cut: bool = False) -> list[Call] | None:
    """The calls in an answer as {name, arguments}, arguments being JSON text of an object.

    Args:
        is_cut: by max_tokens; further calls might have followed in a block without an end.

    Returns:
        [] for an answer that calls nothing; None where one of its calls is cut off or not in a known form.
    """
    calls = _calls(text, is_cut)
    return calls and [{"name": call["name"], "arguments": call["arguments"]} for call in calls]


def call_ids(text: str, keys: list[str]) -> list[str]:
    """An id for each call in an answer, one that the model's chat template takes when the call comes back in a chat.

    Kimi-K2's template writes the id alone, without the name, so the model's own (functions.NAME:0) stays. Mistral's
    templates take ids of nine letters and digits only. Where the model wrote one id twice, all calls have new ones.

    Args:
        keys: of each call, different for each.
    """
    form = _form_of(text)
    if form is None or form.make_id is None:
        return [f"call_{key}" for key in keys]
    calls = _calls(text) or []
    own_ids = [call.get("id") for call in calls]
    are_apart = len(set(own_ids)) == len(own_ids)
    return [
        own if own is not None and are_apart else form.make_id(call["name"], key, place)
        for place, (key, call, own) in enumerate(zip(keys, calls, own_ids, strict=True))
    ]


def _calls(text: str, is_cut: bool = False) -> list[Call] | None:
    """As parse_tool_calls, with the ids that the model wrote."""
    form = _form_of(text)
    if form is None:
        return None if any(form.inner in text for form in _FORMS) else []
    before, *blocks = text.split(form.begin)
    if form.inner in before:
        return None
    calls: list[Call] = []
    for block in blocks:
        inside, end, _ = block.partition(form.end)
        found = form.calls(inside) if end or not (is_cut or form.needs_end) else None
        if not found:
            return None
        calls += found
    return calls


def _form_of(text: str) -> _Form | None:
    """The form of the first block in a text."""
    found = [(text.find(form.begin), form) for form in _FORMS if form.begin in text]
    return min(found, key=lambda place: place[0])[1] if found else None


def _pieces(text: str, head: re.Pattern[str], end: str) -> list[tuple[re.Match[str], str]] | None:
    """The pieces that a text consists of: the head of each, and what is between it and the next `end`.

    The time is linear in the text: nothing is looked for again behind a piece that has no end.

    Args:
        head: begins with the blanks before a piece.

    Returns:
        None where something else is in the text.
    """
    found, place = [], 0
    while (begin := head.match(text, place)) is not None:
        stop = text.find(end, begin.end())
        if stop < 0:
            return None
        found.append((begin, text[begin.end() : stop]))
        place = stop + len(end)
    return None if text[place:].strip() else found


# ---- DeepSeek V3, R1 and V3.1

_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"([^\n`]+)\n```json\n(.*)```", re.DOTALL)


def _calls_of_v3(block: str) -> list[Call] | None:
    head, *bodies = block.split(_CALL_BEGIN)
    calls = [_call_of_v3(body) for body in bodies]
    return None if head.strip() or None in calls else [call for call in calls if call is not None]


def _call_of_v3(body: str) -> Call | None:
    inside, end, rest = body.partition(_CALL_END)
    name, separator, arguments = (part.strip() for part in inside.partition(_SEPARATOR))
    fenced = _FENCED.fullmatch(arguments) if name == "function" else None
    if fenced is not None:
        name, arguments = fenced[1].strip(), fenced[2].strip()
    if not end or not separator or not name or rest.strip() or not isinstance(_json(arguments), dict):
        return None
    return {"name": name, "arguments": arguments}


# ---- DeepSeek V3.2

_INVOKE = re.compile(r'\s*<｜DSML｜invoke name="([^"\n]+)">')
_PARAMETER = re.compile(r'\s*<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">')


def _calls_of_v32(block: str) -> list[Call] | None:
    calls = []
    for invoke, inside in _pieces(block, _INVOKE, "</｜DSML｜invoke>") or []:
        parameters = _pieces(inside, _PARAMETER, "</｜DSML｜parameter>")
        if parameters is None:
            return None
        pairs = [(one[1], value if one[2] == "true" else _json(value)) for one, value in parameters]
        if not (arguments := _object(pairs)):
            return None
        calls.append({"name": invoke[1], "arguments": arguments})
    return calls


# ---- Kimi-K2

_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*((?:functions\.)?([^<\s]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
)


def _calls_of_kimi(block: str) -> list[Call] | None:
    found = _pieces(block, _KIMI_CALL, "<|tool_call_end|>") or []
    calls = [{"id": one[1], "name": one[2], "arguments": arguments.strip()} for one, arguments in found]
    return calls if all(isinstance(_json(call["arguments"]), dict) for call in calls) else None


# ---- GLM

_GLM_NAME = re.compile(r"[^\s<]+")
_GLM_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)


def _calls_of_glm(block: str) -> list[Call] | None:
    name, mark, pairs = block.partition("<arg_key>")
    name = name.strip()
    found = _pieces(mark + pairs, _GLM_KEY, "</arg_value>")
    if found is None or not _GLM_NAME.fullmatch(name):
        return None
    # texts are written as they are, other values as JSON
    values = [(one[1].strip(), text if (value := _json(text)) is _NO_JSON else value) for one, text in found]
    arguments = _object(values)
    return [{"name": name, "arguments": arguments}] if arguments else None


# ---- Youtu, between GLM's marks


def _calls_in_marks(block: str) -> list[Call] | None:
    if not block.lstrip().startswith("{"):
        return _calls_of_glm(block)
    call = _call_of_object(_json(block))
    return None if call is None else [call]


# ---- Mistral

_MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")


def _calls_of_mistral(block: str) -> list[Call] | None:
    head, mark, arguments = (part.strip() for part in block.partition("[ARGS]"))
    name, _, own_id = (part.strip() for part in head.partition("[CALL_ID]"))
    if mark:
        is_call = name and isinstance(_json(arguments), dict)
        return [{"name": name, "arguments": arguments, **_mistral_id(own_id)}] if is_call else None
    listed = _json(block)
    calls = [_call_of_object(one) for one in listed] if isinstance(listed, list) else [None]
    return None if None in calls else [call for call in calls if call is not None]


def _call_of_object(found: object) -> Call | None:
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False), **_mistral_id(found.get("id"))}


def _mistral_id(found: object) -> dict[str, str]:
    return {"id": found} if isinstance(found, str) and _MISTRAL_ID.fullmatch(found) else {}


def _nine_characters(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=5).hexdigest()[:9]


# ---- JSON

_NO_JSON = object()


def _json(text: str) -> object:
    """As the standard has it: no NaN, no number beyond a double, and no half surrogate pair, which no text can hold."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _NO_JSON


def _object(pairs: list[tuple[str, object]]) -> str | None:
    """As JSON text; None: a name comes twice, or a value is none."""
    found = dict(pairs)
    if len(found) < len(pairs) or _NO_JSON in found.values():
        return None
    return json.dumps(found, ensure_ascii=False)


_FORMS = (
    _Form("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _calls_of_v3, _CALL_BEGIN),
    _Form("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _calls_of_v32, "<｜DSML｜invoke", before="\n\n"),
    _Form(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _calls_of_kimi,
        "<|tool_call_begin|>",
        make_id=lambda name, key, place: f"functions.{name}:{place}",
    ),
    _Form("[TOOL_CALLS]", "</s>", _calls_of_mistral, "[ARGS]", make_id=lambda name, key, place: _nine_characters(key)),
    _Form("<tool_call>", "</tool_call>", _calls_in_marks, "<arg_key>", needs_end=True),
)
