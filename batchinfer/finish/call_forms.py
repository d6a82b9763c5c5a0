"""Tool calls as the models of the families write them, read from the text of an answer.

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
         </｜DSML｜function_calls>   (V4: tool_calls)
Kimi-K2  <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"city": "Rome"}
         <|tool_call_end|><|tool_calls_section_end|>   (in one line; also tool_call_section)
GLM      <tool_call>NAME
         <arg_key>city</arg_key>
         <arg_value>Rome</arg_value>
         </tool_call>
Hermes   <tool_call>{"name": "NAME", "arguments": {"city": "Rome"}}</tool_call>   (Youtu, too)
MiniMax  <minimax:tool_call>
         <invoke name="NAME">
         <parameter name="city">Rome</parameter>
         </invoke>
         </minimax:tool_call>
harmony  <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"city": "Rome"}<|call|>   (in one line)
         <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>
Mistral  [TOOL_CALLS]NAME[ARGS]{"city": "Rome"}   each call; before [ARGS] there may be [CALL_ID]abcdefghi
         [TOOL_CALLS][{"name": "NAME", "arguments": {"city": "Rome"}}]   (older)

Nothing here knows which tools a row offers: offered_tools.py decides about names and the types of parameters.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from batchinfer.data.call_ids import NINE_CHARACTERS, WITH_NAME, IdForm
from batchinfer.finish.json_text import BLANKS, NO_JSON, elements, is_object, json_value, members, object_of, quoted


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call as the model wrote it.

    arguments: JSON text of an object; or the text of each parameter, where the form has no types.
    id: the model's own id, where it wrote one.
    """

    name: str
    arguments: str | dict[str, str]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of tool calls: blocks from one mark to the next, and the calls between the marks.

    name: in data/tokenizer_worker.py.
    opens: matches the text after the mark of a real block; prose that quotes the mark continues differently.
    opening: the common beginning of the text after the mark in all calls.
    inner: a mark of calls inside blocks; outside a block it begins no call.
    before: text between the words of an answer and its first block; the chat template writes it again.
    ids: the ids that the chat template accepts when calls come back in a chat; None: any.
    make_id: makes such an id from the call's name, a key and the call's position.
    needs_end: whether a block needs its end; if not, a stop string may have removed the end.
    """

    name: str
    begin: re.Pattern[str]
    end: re.Pattern[str]
    read: Callable[[str], list[WrittenCall] | None]  # the calls of a block, at least one; None: not in this form
    opens: re.Pattern[str]
    opening: str
    inner: str | None
    before: str = ""
    ids: IdForm | None = None
    make_id: Callable[[str, str, int], str] = lambda name, key, place: f"call_{key}"
    needs_end: bool = False


def _pieces(text: str, head: re.Pattern[str], end: str) -> list[tuple[re.Match[str], str]] | None:
    """Cut a text into its pieces: the head of each, and the text between the head and the next `end`.

    The time is linear in the text: the search stops at a piece without an end.

    Args:
        head: pattern that begins with the blanks before a piece.

    Returns:
        None if the text contains anything else.
    """
    found, place = [], 0
    while (begin := head.match(text, place)) is not None:
        stop = text.find(end, begin.end())
        if stop < 0:
            return None
        found.append((begin, text[begin.end() : stop]))
        place = stop + len(end)
    return None if text[place:].strip() else found


def _all_read(calls: list[WrittenCall | None]) -> list[WrittenCall] | None:
    """Return the calls, None if one of them could not be read."""
    return None if None in calls else [call for call in calls if call is not None]


# ---- DeepSeek V3, R1 and V3.1

_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"([^\n`]+)\n```json\n(.*)```", re.DOTALL)
TYPE_OF_TOOL = "function"  # V3 writes this word in place of the name


def _calls_of_v3(block: str) -> list[WrittenCall] | None:
    head, *bodies = block.split(_CALL_BEGIN)
    return None if head.strip() else _all_read([_call_of_v3(body) for body in bodies])


def _call_of_v3(body: str) -> WrittenCall | None:
    inside, end, rest = body.partition(_CALL_END)
    name, separator, arguments = (part.strip() for part in inside.partition(_SEPARATOR))
    fenced = _FENCED.fullmatch(arguments) if name == TYPE_OF_TOOL else None
    if fenced is not None:
        name, arguments = fenced[1].strip(), fenced[2].strip()
    if not end or not separator or not name or rest.strip() or not is_object(arguments):
        return None
    return WrittenCall(name, arguments)


# ---- DeepSeek V3.2

_INVOKE = re.compile(r'\s*<｜DSML｜invoke name="([^"\n]+)">')
_PARAMETER = re.compile(r'\s*<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">')


def _calls_of_v32(block: str) -> list[WrittenCall] | None:
    invokes = _pieces(block, _INVOKE, "</｜DSML｜invoke>") or []
    return _all_read([_call_of_v32(invoke[1], inside) for invoke, inside in invokes])


def _call_of_v32(name: str, inside: str) -> WrittenCall | None:
    if inside.lstrip(BLANKS).startswith("{"):
        return WrittenCall(name, inside.strip(BLANKS)) if is_object(inside) else None
    parameters = _pieces(inside, _PARAMETER, "</｜DSML｜parameter>")
    if parameters is None:
        return None
    values = {one[1]: quoted(text) if one[2] == "true" else text.strip(BLANKS) for one, text in parameters}
    if len(values) < len(parameters) or any(json_value(value) is NO_JSON for value in values.values()):
        return None
    return WrittenCall(name, object_of(values))


# ---- Kimi-K2

_KIMI_CALL = re.compile(r"\s*+<\|tool_call_begin\|>\s*+([^<\s]++)\s*+<\|tool_call_argument_begin\|>")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _calls_of_kimi(block: str) -> list[WrittenCall] | None:
    found = _pieces(block, _KIMI_CALL, "<|tool_call_end|>") or []
    return _all_read([_call_of_kimi(head[1], arguments.strip()) for head, arguments in found])


def _call_of_kimi(own_id: str, arguments: str) -> WrittenCall | None:
    match = _KIMI_ID.fullmatch(own_id)
    return WrittenCall(match[1], arguments, own_id) if match and is_object(arguments) else None


# ---- GLM

_GLM_NAME = re.compile(r"[^\s<]+")
_GLM_KEY = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)


def _calls_of_glm(block: str) -> list[WrittenCall] | None:
    name, mark, pairs = block.partition("<arg_key>")
    name = name.strip()
    found = _pieces(mark + pairs, _GLM_KEY, "</arg_value>")
    if found is None or not _GLM_NAME.fullmatch(name):
        return None
    texts = {key[1].strip(): text for key, text in found}
    return [WrittenCall(name, texts)] if len(texts) == len(found) else None


# ---- MiniMax

_MINIMAX_INVOKE = re.compile(r'\s*<invoke name="([^"\n]+)">')
_MINIMAX_PARAMETER = re.compile(r'\s*<parameter name="([^"\n]+)">')


def _calls_of_minimax(block: str) -> list[WrittenCall] | None:
    invokes = _pieces(block, _MINIMAX_INVOKE, "</invoke>") or []
    return _all_read([_call_of_minimax(invoke[1], inside) for invoke, inside in invokes])


def _call_of_minimax(name: str, inside: str) -> WrittenCall | None:
    parameters = _pieces(inside, _MINIMAX_PARAMETER, "</parameter>")
    if parameters is None:
        return None
    texts = {parameter[1]: text for parameter, text in parameters}
    return WrittenCall(name, texts) if len(texts) == len(parameters) else None


# ---- harmony, of gpt-oss

_HARMONY_HEAD = r"([\w.-]++)\s*+(?:<\|channel\|>commentary\s*+)?(?:<\|constrain\|>\s*+)?(?:json\s*+)?"
_HARMONY_CALL = re.compile(rf"{_HARMONY_HEAD}<\|message\|>(.*)", re.DOTALL)


def _calls_of_harmony(block: str) -> list[WrittenCall] | None:
    call = _HARMONY_CALL.fullmatch(block)
    return [WrittenCall(call[1], call[2].strip())] if call and is_object(call[2]) else None


# ---- Hermes, and Mistral's older form


def _calls_of_hermes(block: str) -> list[WrittenCall] | None:
    return _all_read([_call_of_object(block)])


def _call_of_object(text: str) -> WrittenCall | None:
    found = json_value(text)
    if not isinstance(found, dict):
        return None
    name, own_id = found.get("name"), found.get("id")
    arguments = found.get("arguments")
    if isinstance(arguments, str) and is_object(arguments):
        written = arguments.strip(BLANKS)  # JSON text of the object, as in OpenAI's API
    elif isinstance(arguments, dict):
        written = members(text)["arguments"]
    else:
        return None
    if not isinstance(name, str) or not name:
        return None
    return WrittenCall(name, written, own_id if isinstance(own_id, str) else None)


# ---- Mistral


def _calls_of_mistral(block: str) -> list[WrittenCall] | None:
    head, mark, arguments = (part.strip() for part in block.partition("[ARGS]"))
    name, _, own_id = (part.strip() for part in head.partition("[CALL_ID]"))
    if mark:
        text = json_value(arguments)
        arguments = text.strip(BLANKS) if isinstance(text, str) else arguments
        return [WrittenCall(name, arguments, own_id or None)] if name and is_object(arguments) else None
    if not isinstance(json_value(block), list):
        return None
    return _all_read([_call_of_object(text) for text in elements(block)])


def _nine_characters(name: str, key: str, place: int) -> str:
    return hashlib.blake2b(key.encode(), digest_size=5).hexdigest()[:9]


# ---- all of them

_NAME = r"\s*+\w[\w.:/-]*+\s*+"
FORMS = (
    CallForm(
        "deepseek_v3",
        begin=re.compile("<｜tool▁calls▁begin｜>"),
        end=re.compile("<｜tool▁calls▁end｜>"),
        read=_calls_of_v3,
        opens=re.compile(rf"\s*+{_CALL_BEGIN}"),
        opening=_CALL_BEGIN,
        inner=_CALL_BEGIN,
    ),
    CallForm(
        "deepseek_v32",
        begin=re.compile("<｜DSML｜(?:function|tool)_calls>"),
        end=re.compile("</｜DSML｜(?:function|tool)_calls>"),
        read=_calls_of_v32,
        opens=re.compile(r"\s*+<｜DSML｜invoke"),
        opening='<｜DSML｜invoke name="',
        inner="<｜DSML｜invoke",
        before="\n\n",
    ),
    CallForm(
        "kimi_k2",
        begin=re.compile(r"<\|tool_calls?_section_begin\|>"),
        end=re.compile(r"<\|tool_calls?_section_end\|>"),
        read=_calls_of_kimi,
        opens=re.compile(r"\s*+<\|tool_call_begin\|>"),
        opening="<|tool_call_begin|>",
        inner="<|tool_call_begin|>",
        ids=WITH_NAME,
        make_id=lambda name, key, place: f"functions.{name}:{place}",
    ),
    CallForm(
        "glm",
        begin=re.compile("<tool_call>"),
        end=re.compile("</tool_call>"),
        read=_calls_of_glm,
        opens=re.compile(rf"{_NAME}(?:<arg_key>|</tool_call>|\Z)"),
        opening="",
        inner="<arg_key>",
        needs_end=True,
    ),
    CallForm(
        "hermes",
        begin=re.compile("<tool_call>"),
        end=re.compile("</tool_call>"),
        read=_calls_of_hermes,
        opens=re.compile(r'\s*+\{\s*+(?:"|\Z)'),
        opening='{"',
        inner=None,
        needs_end=True,
    ),
    CallForm(
        "minimax",
        begin=re.compile("<minimax:tool_call>"),
        end=re.compile("</minimax:tool_call>"),
        read=_calls_of_minimax,
        opens=re.compile(r"\s*+<invoke"),
        opening='<invoke name="',
        inner='<invoke name="',
    ),
    CallForm(
        "harmony",
        # the recipient may be in front of the channel or behind it
        begin=re.compile(
            r"(?:<\|end\|>)?(?:<\|start\|>assistant)?"
            r"(?:<\|channel\|>commentary to=functions\.| to=functions\.(?=[\w.-]{1,128}+<\|channel\|>))"
        ),
        end=re.compile(r"<\|(?:call|end|return)\|>"),
        read=_calls_of_harmony,
        opens=re.compile(rf"{_HARMONY_HEAD}(?:<\|message\|>|\Z)"),
        opening="",
        inner=None,
    ),
    CallForm(
        "mistral",
        begin=re.compile(r"\[TOOL_CALLS\]"),
        end=re.compile("</s>"),
        read=_calls_of_mistral,
        opens=re.compile(rf"\s*+\[\s*+(?:\{{|\]|\Z)|{_NAME}(?:\[(?:ARGS\]|CALL_ID\])|\Z)"),
        opening="[{",
        inner="[ARGS]",
        ids=NINE_CHARACTERS,
        make_id=_nine_characters,
    ),
)
