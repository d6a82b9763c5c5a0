"""The calls of tools in an answer's text, as DeepSeek's models write them.

V3, R1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
         ```json
         {"city": "Rome"}
         ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"city": "Rome"}
         <｜tool▁call▁end｜><｜tool▁calls▁end｜>   (in one line)
"""

import json
import re

import pyarrow as pa

from batchinfer.data.schemas import TOOL_CALLS

CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"([^\n`]+)\n```json\n(.*)```", re.DOTALL)


def tool_calls(texts: pa.Array) -> pa.Array:
    """The calls in each text; null where there is no text, or what it calls cannot be read."""
    return pa.array([None if text is None else parse_tool_calls(text) for text in texts.to_pylist()], TOOL_CALLS)


def parse_tool_calls(text: str) -> list[dict[str, str]] | None:
    """The calls in an answer as {name, arguments}, arguments being JSON text of an object.

    Returns:
        [] for an answer that calls nothing; None where one of its calls is cut off or not in a known form.
    """
    before, *blocks = text.split(CALLS_BEGIN)
    if _CALL_BEGIN in before:
        return None
    calls = []
    for block in blocks:
        # a stop string may have cut off the end of the block, but not that of a call
        head, *bodies = block.partition(_CALLS_END)[0].split(_CALL_BEGIN)
        if head.strip() or not bodies:
            return None
        for body in bodies:
            call = _call(body)
            if call is None:
                return None
            calls.append(call)
    return calls


def _call(body: str) -> dict[str, str] | None:
    inside, end, rest = body.partition(_CALL_END)
    name, separator, arguments = (part.strip() for part in inside.partition(_SEPARATOR))
    fenced = _FENCED.fullmatch(arguments) if name == "function" else None
    if fenced is not None:
        name, arguments = fenced[1].strip(), fenced[2].strip()
    if not end or not separator or not name or rest.strip() or not _is_object(arguments):
        return None
    return {"name": name, "arguments": arguments}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
