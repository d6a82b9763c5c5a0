"""Encoding of rows' prompts, and of choices that follow prompts, by the model's tokenizer in a worker process."""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.data.chat import NO_DATE, ChatError
from batchinfer.data.columns import ENCODED, python_values
from batchinfer.data.effort import EFFORT_VARIABLES, effort_variables
from batchinfer.data.prompt_tokenizer import PromptTokenizer, has_tools
from batchinfer.data.row_prompts import Chat, Prompt, RowPrompts
from batchinfer.data.row_values import DATE, RowError
from batchinfer.data.text_encoder import ids_to_bytes
from batchinfer.records import ModelError
from batchinfer.sanitize import clip

# (ids as bytes of uint32 or the error sentence, whether the text has control tokens) of each text or chat
IdsAndControl = Iterator[tuple[bytes | str, bool]]
EncodeTexts = Callable[[list[Any]], IdsAndControl]

# chats of which a sound template can render one, for any set of roles
_TRIAL_CHATS = [
    [{"role": role, "content": "Hello there, 12 times."} for role in roles]
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"])
]
_NO_TEMPLATE = "the model folder has no chat template, which messages need"


class RowEncoder:
    """Encodes the prompts of a job's rows.

    Args:
        most_tokens: a text that must have more tokens is refused without encoding it.
        control: input.control_tokens.

    Raises:
        ModelError: the job has chats, but the model folder no usable chat template.
    """

    def __init__(self, tokenizer: PromptTokenizer, prompts: RowPrompts, most_tokens: int, control: str) -> None:
        self._tokenizer, self._prompts = tokenizer, prompts
        self._most_tokens = most_tokens
        self._control = control
        # raises before the first row if a template is bad or missing
        if prompts.makes_chats:
            tokenizer.chat_template(prompts.may_have_tools)
        for with_tools in (False, True):
            if prompts.may_make_chats and tokenizer.template_text(with_tools) is not None:
                tokenizer.chat_template(with_tools)

    def try_out(self) -> None:
        """Encode trial rows, so that a tokenizer or template that crashes does so before the first row.

        Raises:
            ModelError: each chat needs a date, which neither job nor rows give.
        """
        is_chat = self._prompts.may_make_chats and self._tokenizer.templates
        prompts = [self._ready(self._prompts.chat(chat)) if is_chat else chat[0]["content"] for chat in _TRIAL_CHATS]
        errors = self._encoded(prompts, self._prompt_ids)["error"].to_pylist()
        if NO_DATE in errors and None not in errors and self._prompts.makes_chats and not self._prompts.have_variables:
            raise ModelError(NO_DATE)

    def lacks_date(self) -> bool:
        """Return whether the template writes the date if it is given one, and the job gives its chats none."""
        if not self._prompts.may_lack_date or not self._tokenizer.templates:
            return False
        chats = [self._ready(self._prompts.chat(chat)) for chat in _TRIAL_CHATS]
        return any(self._writes_date(chat) for chat in chats if isinstance(chat, Chat))

    def _writes_date(self, chat: Chat) -> bool:
        template = self._tokenizer.chat_template(has_tools(chat.variables))
        if DATE not in template.names:
            return False
        with_date = {**chat.variables, DATE: datetime.now().strftime}
        try:
            return template.render(chat.messages, chat.variables) != template.render(chat.messages, with_date)
        except ChatError:
            return False

    def encode(self, column: pa.Array) -> pa.RecordBatch:
        """Encode the prompts of a column, or of a struct of columns (see RowPrompts.of), as columns.ENCODED."""
        prompts = [self._ready(prompt) if isinstance(prompt, Chat) else prompt for prompt in self._prompts.of(column)]
        return self._encoded(prompts, self._prompt_ids)

    def encode_choices(self, column: pa.Array) -> pa.RecordBatch:
        """Encode texts that follow a prompt, without the tokenizer's special tokens, as columns.ENCODED."""
        texts = [
            RowError("it is not valid UTF-8") if isinstance(text, UnicodeDecodeError) else text
            for text in python_values(column)
        ]
        return self._encoded(texts, self._choice_ids)

    def _ready(self, prompt: Chat) -> Prompt:
        """Return a chat as its template takes it, or an error if there is no template for the chat or its effort."""
        try:
            template = self._tokenizer.chat_template(has_tools(prompt.variables))
        except ModelError as error:
            return RowError(str(error) if self._tokenizer.templates else _NO_TEMPLATE)
        variables = {} if prompt.effort is None else effort_variables(prompt.effort, template.names)
        if prompt.effort is not None and not variables:
            return RowError(
                f"body.reasoning.effort is {prompt.effort!r}, but the model's chat template reads none of "
                f"{', '.join(EFFORT_VARIABLES)}; leave it out"
            )
        messages = template.with_ids(template.with_arguments(prompt.messages))
        return Chat(messages, {**prompt.variables, **variables})

    def _encoded(self, prompts: Sequence[Prompt], encode: EncodeTexts) -> pa.RecordBatch:
        errors = [str(prompt) if isinstance(prompt, RowError) else None for prompt in prompts]
        lists = [b""] * len(prompts)
        holds = np.zeros(len(prompts), dtype=bool)
        good = [row for row, error in enumerate(errors) if error is None]
        for row, (ids, has_control) in zip(good, encode([prompts[row] for row in good]), strict=True):
            holds[row] = has_control
            if isinstance(ids, str):
                errors[row] = ids
            else:
                lists[row] = ids
        offsets = np.zeros(len(prompts) + 1, dtype=np.int32)
        flat = np.frombuffer(b"".join(lists), dtype=np.uint32)
        np.cumsum([len(ids) // flat.itemsize for ids in lists], out=offsets[1:])
        token_ids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
        sentences = pa.array([None if error is None else clip(error) for error in errors], pa.string())
        return pa.RecordBatch.from_arrays([token_ids, sentences, pa.array(holds)], schema=ENCODED)

    def _prompt_ids(self, prompts: list[Any]) -> IdsAndControl:
        found: list[tuple[bytes | str, bool]] = [(b"", False)] * len(prompts)
        for kind, encode in ((Chat, self._chat_ids), (str, self._text_ids), (list, _ready_ids)):
            places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, kind)]
            if places:
                for place, answer in zip(places, encode([prompts[place] for place in places]), strict=True):
                    found[place] = answer
        return iter(found)

    def _chat_ids(self, chats: list[Chat]) -> IdsAndControl:
        found = self._tokenizer.chat_ids(
            [chat.messages for chat in chats],
            self._most_tokens,
            self._control,
            variables=[chat.variables for chat in chats],
            continues=self._prompts.continues,
        )
        return self._with_control([[chat.messages, chat.variables] for chat in chats], found)

    def _text_ids(self, texts: list[str]) -> IdsAndControl:
        return self._with_control(texts, self._tokenizer.prompt_ids(texts, self._most_tokens, self._control))

    def _choice_ids(self, texts: list[str]) -> IdsAndControl:
        found = self._tokenizer.prompt_ids(texts, self._most_tokens, self._control, special=False)
        return self._with_control(texts, found)

    def _with_control(self, texts: list[Any], found: list[bytes | str]) -> IdsAndControl:
        return zip(found, self._tokenizer.control.are_in(texts), strict=True)


def _ready_ids(prompts: list[list[int]]) -> IdsAndControl:
    return ((ids_to_bytes(ids), False) for ids in prompts)
