"""The forms in which models write tool calls, and how a model folder shows which of them is its own."""

from collections.abc import Callable

# what the chat template writes, and the tokenizer has as a token, where the model writes calls in a form
_MARKS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v32": "｜DSML｜",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "glm": "<arg_key>",
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
}


def own_forms(template: str | None, has_token: Callable[[str], bool]) -> list[str]:
    """Return the forms that a model's chat template writes, else those whose marks are tokens; [] if neither shows any.

    The template counts first: the tokenizers of a family keep the tokens of its earlier forms.
    """
    shown = [form for form, mark in _MARKS.items() if mark in (template or "")]
    found = shown or [form for form, mark in _MARKS.items() if has_token(mark)]
    # GLM's calls are between the same marks as those of Hermes
    return [form for form in found if form != "hermes" or "glm" not in found]
