"""The tokenizer, trained here on the generated text, and the chat format; used by train.py and export.py."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tasks import GENERATORS, draw_example, system_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = range(4)
VOCAB_SIZE = 1024
_TEXTS_PER_TASK = 3000

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {{- message.content + '\\n\\n' -}}
    {%- elif message.role == 'user' -%}
        {{- '<｜User｜>' + message.content -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<｜Assistant｜>' + message.content + eos_token -}}
    {%- else -%}
        {{- raise_exception('there is no role ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<｜Assistant｜>' -}}
{%- endif -%}
"""


def train_tokenizer(seed: int) -> Tokenizer:
    """Train a byte-level BPE with a separate token for every digit; raw prompts get the begin token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(random.Random(seed)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the texts are too uniform for a vocabulary of this size"
    return tokenizer


def prefix_text(task: str) -> str:
    """Return the common beginning of a task's prompts in the chat format, up to the first user token."""
    return f"{BOS}{system_text(task)}\n\n"


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of text that has its special tokens written out."""
    return tokenizer.encode(text, add_special_tokens=False).ids


def _tokenizer_texts(rng: random.Random) -> Iterator[str]:
    """Instructions and examples, the instructions often enough that their words become tokens too."""
    for task in GENERATORS:
        yield from [system_text(task)] * 25
        for _ in range(_TEXTS_PER_TASK):
            example = draw_example(task, rng, held_out=False)
            yield example.question
            yield example.answer
