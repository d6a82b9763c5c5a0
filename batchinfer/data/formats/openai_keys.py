"""Keys of OpenAI's requests: supported keys, keys without effect, and remedies for the others."""

from typing import Any

from batchinfer.config import SamplingConfig
from batchinfer.config.exact_json import to_json
from batchinfer.data.formats.values import WrongValueError, in_words

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}  # vLLM's former names
# keys of [sampling], vLLM's among them, that a body has by the same name and with the same meaning
SAMPLING = SamplingConfig.model_fields.keys() - {"logprobs"}

_MOST_SHOWN = 80  # characters of a value in a sentence
_OF_CHATS = {"messages", "response_format", *GUIDED, "logprobs", "top_logprobs", "max_completion_tokens"}
_OF_TEMPLATES = {"tools", "tool_choice", "chat_template_kwargs"}
_OF_RESPONSES = {"input", "instructions", "max_output_tokens", "reasoning", "text", "include", "top_logprobs"}
# the model's name, and keys that change no answer
_ALWAYS = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction", "priority", "request_id", "cache_salt",
}  # fmt: skip
_KNOWN = {
    CHAT: SAMPLING | _OF_CHATS | _OF_TEMPLATES,
    COMPLETIONS: SAMPLING | {"prompt", "response_format", *GUIDED, "logprobs"},
    RESPONSES: SAMPLING - {"n", "max_tokens"} | _OF_RESPONSES | _OF_TEMPLATES,
}
# keys with a single supported value
_ONLY = {
    "stream": False, "echo": False, "parallel_tool_calls": True, "modalities": ["text"], "use_beam_search": False,
    "skip_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False, "background": False,
    "truncation": "disabled", "best_of": 1, "suffix": "", "verbosity": "medium", "length_penalty": 1,
    "early_stopping": False, "spaces_between_special_tokens": True, "include_reasoning": True,
    "return_token_ids": False, "return_tokens_as_token_ids": False,
}  # fmt: skip

_LEAVE_OUT = "leave it out"
_OWN_VARIABLE = "the chat template's own variable in body.chat_template_kwargs, such as enable_thinking or thinking"
_STRUCTURED = {
    "regex": "set body.structured_outputs.regex instead",
    "ebnf": "set body.structured_outputs.grammar instead",
    "grammar": "set body.structured_outputs.grammar instead",
    "json_schema": "set body.structured_outputs.json instead",
}
_OF_ANY = {**_STRUCTURED, "extra_body": "write its keys into body itself"}
_MAX_TOKENS = dict.fromkeys(("max_output_tokens", "max_new_tokens"), "set body.max_tokens instead")
_INPUT = f"{_LEAVE_OUT}, or set url to {RESPONSES}"
_OF_CHAT_TEMPLATES = {
    "enable_thinking": "set body.chat_template_kwargs.enable_thinking instead",
    "documents": "set body.chat_template_kwargs.documents instead",
    "chat_template": "write the template into the model's folder",
    "functions": "set body.tools instead",
    "function_call": "set body.tool_choice instead",
}
_INSTEAD = {
    CHAT: {
        **_OF_ANY,
        **_MAX_TOKENS,
        **_OF_CHAT_TEMPLATES,
        "thinking": f"set {_OWN_VARIABLE}",
        "reasoning": f"set {_OWN_VARIABLE}",
        "reasoning_effort": f"{_LEAVE_OUT}, or set body.chat_template_kwargs.reasoning_effort",
        "instructions": "write them as a message of the role system",
        "text": "set body.response_format instead",
        "prompt": f"{_LEAVE_OUT}, or set url to {COMPLETIONS}",
        "input": _INPUT,
    },
    COMPLETIONS: {**_OF_ANY, **_MAX_TOKENS, "messages": f"{_LEAVE_OUT}, or set url to {CHAT}", "input": _INPUT},
    RESPONSES: {
        **_OF_ANY,
        **_OF_CHAT_TEMPLATES,
        **{name: f"set body.structured_outputs.{kind} instead" for name, kind in GUIDED.items()},
        **dict.fromkeys(
            ("max_tokens", "max_new_tokens", "max_completion_tokens"), "set body.max_output_tokens instead"
        ),
        **dict.fromkeys(("previous_response_id", "conversation"), "write the earlier turns into body.input"),
        "thinking": f"set body.reasoning.effort, or {_OWN_VARIABLE}",
        "reasoning_effort": "set body.reasoning.effort instead",
        "n": "write a line for each answer",
        "logprobs": 'set body.include = ["message.output_text.logprobs"] and body.top_logprobs instead',
        "response_format": "set body.text.format instead",
        "prompt": "write its text as body.instructions and body.input",
        "messages": f"{_LEAVE_OUT}, or set url to {CHAT}",
    },
}


def check_keys(body: dict[str, Any], url: str) -> None:
    """Refuse unsupported keys that would change an answer.

    Raises:
        WrongValueError: names the first such key and the remedy.
    """
    known = _KNOWN[url] | _ALWAYS
    for name, value in body.items():
        if name in _ONLY:
            check_only(value, _ONLY[name], name)
        elif name not in known:
            raise WrongValueError(f"body.{name} is not supported for {url}; {_INSTEAD[url].get(name, _LEAVE_OUT)}")


def check_only(value: Any, only: Any, name: str) -> None:
    """Refuse every value of a key except `only`.

    Raises:
        WrongValueError: names the key and the supported value.
    """
    if value != only:
        raise WrongValueError(f"body.{name} is {shown(value)}, but only {shown(only)} is supported")


def check_object(value: Any, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Check an object's keys and return its values that are not null.

    Args:
        keys: supported keys, each with its only value, or None for any value.

    Raises:
        WrongValueError: names the key that is not supported.
    """
    if not isinstance(value, dict):
        raise WrongValueError(f"body.{name} is {in_words(value)}, not an object")
    found = {key: item for key, item in value.items() if item is not None}
    for key, item in found.items():
        if key not in keys:
            raise WrongValueError(f"body.{name}.{key} is not supported; {_LEAVE_OUT}")
        if keys[key] is not None:
            check_only(item, keys[key], f"{name}.{key}")
    return found


def text_of(values: dict[str, Any], name: str, where: str = "") -> str:
    """Return the text of a key that must have one.

    Raises:
        WrongValueError: the text is missing or empty, or the value is no text.
    """
    value = values.get(name)
    if value is None:
        raise WrongValueError(f"{where}{name} is missing")
    if not isinstance(value, str):
        raise WrongValueError(f"{where}{name} is {in_words(value)}, not text")
    if not value:
        raise WrongValueError(f"{where}{name} is empty")
    return value


def integer_of(body: dict[str, Any], name: str, most: int, least: int = 0) -> int:
    """Return the integer of a key.

    Raises:
        WrongValueError: the value is no integer from `least` to `most`.
    """
    value = body[name]
    if type(value) is not int or not least <= value <= most:
        raise WrongValueError(f"body.{name} is {shown(value)}, not an integer from {least} to {most}")
    return value


def shown(value: Any) -> str:
    """Return a value as JSON for a sentence, cut if it is long."""
    text = to_json(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
