"""Conversion of requests for chats and completions to a prompt with tools, and to keys of [sampling]."""

from typing import Any

from pydantic import ValidationError

from batchinfer.config import SamplingConfig
from batchinfer.data.formats.openai_keys import COMPLETIONS, GUIDED, SAMPLING, integer_of, shown, text_of
from batchinfer.data.formats.values import WrongValueError, in_words

MOST_INT = 2**31 - 1
MOST_LOGPROBS = 100


def request(body: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the request's prompt in the form that row_prompts.py reads.

    Raises:
        WrongValueError: names the key that is missing or wrong.
    """
    if url == COMPLETIONS:
        return {"prompt": _prompt(body.get("prompt"))}
    if "messages" not in body:
        raise WrongValueError("body.messages is missing")
    names = ["messages", "chat_template_kwargs"]
    for place, tool in enumerate(tools_of(body)):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise WrongValueError(f'body.tools[{place}] is not an object of the type "function" with a function')
        text_of(tool["function"], "name", f"body.tools[{place}].function.")
    if may_call(body):
        names.append("tools")
    return {name: body[name] for name in names if name in body}


def sampling(body: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the keys of [sampling] that a body sets. Only keys with other names in OpenAI's API are checked here.

    A value of None removes the job's value.
    """
    found = same_keys(body)
    if "max_completion_tokens" in body:
        most = integer_of(body, "max_completion_tokens", MOST_INT)
        if found.setdefault("max_tokens", most) != most:
            raise WrongValueError("body.max_tokens and body.max_completion_tokens differ; leave one out")
    logprobs = _logprobs(body, url)
    if "logprobs" in body:
        found["logprobs"] = logprobs
    given = {name: {kind: body[name]} for name, kind in GUIDED.items() if name in body}
    if "response_format" in body:
        form = body["response_format"]
        holder = form.get("json_schema") if isinstance(form, dict) else None
        given["response_format"] = structured(form, "response_format", "json_schema.schema", holder)
    set_structured(found, given)
    return found


def tools_of(body: dict[str, Any]) -> list[Any]:
    tools = body.get("tools", [])
    return tools if isinstance(tools, list) else [tools]


def may_call(body: dict[str, Any]) -> bool:
    """Return whether the prompt has the body's tools.

    Raises:
        WrongValueError: the body requires a call, which cannot be guaranteed.
    """
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise WrongValueError(f'body.tool_choice is {shown(choice)}, but only "auto" and "none" are supported')
    return bool(body.get("tools")) and choice == "auto"


def same_keys(body: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a body whose keys have the same name in [sampling]."""
    return {name: body[name] for name in body if name in SAMPLING}


def structured(form: Any, name: str, where: str, holder: Any) -> dict[str, Any]:
    """Return a format as [sampling] structured_outputs; {} for plain text.

    Args:
        form: an object of the type text, json_object or json_schema.
        where: the schema's place in the body, for the error sentence.
        holder: the object whose key `schema` is the schema.

    Raises:
        WrongValueError: the format is something else.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    schema = holder.get("schema") if kind == "json_schema" and isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise WrongValueError(f'body.{name} is not of the type "text" or "json_object", nor "json_schema" with {where}')
    return {"json": schema}


def set_structured(found: dict[str, Any], given: dict[str, dict[str, Any]]) -> None:
    """Set structured_outputs to the one format that a body gives.

    Args:
        found: keys of [sampling] so far.
        given: formats by the body's key; an empty format is plain text.

    Raises:
        WrongValueError: the body gives two formats, or the format is not supported.
    """
    names = [*given, *(name for name in ("structured_outputs",) if name in found)]
    if len(names) > 1:
        raise WrongValueError(f"body.{names[0]} and body.{names[1]} are both set; leave one out")
    for name, form in given.items():
        if form:
            _refuse_unusable(name, form)
        found["structured_outputs"] = form or None


def _refuse_unusable(name: str, form: dict[str, Any]) -> None:
    try:
        SamplingConfig.model_validate({"max_tokens": 1, "structured_outputs": form})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise WrongValueError(f"body.{name}: {problem}") from None


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and type(prompt[0]) is not int:
        (prompt,) = prompt
    if prompt is None:
        raise WrongValueError("body.prompt is missing")
    if not isinstance(prompt, str | list):
        raise WrongValueError(f"body.prompt is {in_words(prompt)}, not text or a list of token ids")
    if not prompt:
        raise WrongValueError("body.prompt is empty")
    if isinstance(prompt, list):
        if type(prompt[0]) is not int:
            raise WrongValueError(f"body.prompt is a list of {len(prompt)} prompts; write a line for each")
        for item in prompt:
            if type(item) is not int or not 0 <= item <= MOST_INT:
                raise WrongValueError(f"body.prompt holds {shown(item)}, which is no token id")
    return prompt


def _logprobs(body: dict[str, Any], url: str) -> int | None:
    """Return the number of alternatives for each token; None if no log-probabilities are asked for."""
    if url == COMPLETIONS:
        return integer_of(body, "logprobs", MOST_LOGPROBS) if "logprobs" in body else None
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise WrongValueError(f"body.logprobs is {shown(wanted)}, not true or false")
    num_top = integer_of(body, "top_logprobs", MOST_LOGPROBS) if "top_logprobs" in body else 0
    if num_top and not wanted:
        raise WrongValueError("body.top_logprobs is set, but body.logprobs is not true")
    return num_top if wanted else None
