"""Forms in which models write tool calls, and detection of a model's form by its template and tokens."""

from collections.abc import Callable

# for each form of calls, a text that the chat template writes and that is a token of the tokenizer
_MARKS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v32": "｜DSML｜",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "glm": "<arg_key>",
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
}


def forms_of_model(template: str | None, has_token: Callable[[str], bool]) -> list[str]:
    """Return the forms with marks that the chat template writes, else the forms with marks that are tokens.

    The template takes precedence, because tokenizers of a family keep the tokens of the family's earlier forms.
    """
    shown = [form for form, mark in _MARKS.items() if mark in (template or "")]
    found = shown or [form for form, mark in _MARKS.items() if has_token(mark)]
    # GLM's calls are between the same marks as those of Hermes
    return [form for form in found if form != "hermes" or "glm" not in found]
