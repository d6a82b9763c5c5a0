"""Answers in harmony, gpt-oss's format: messages in channels, taken apart token by token."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.finish.answers import AnswerReader
from batchinfer.finish.offered_tools import OfferedTools
from batchinfer.rank.logit_rules import RuleMaker
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.thinking import HarmonyThinking, HarmonyTokens
from batchinfer.records import Request, RequestKey, RequestTimes
from support.changed_logits import apply_rules
from support.paths import RANDOM_MODEL

MARKS = ("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|end|>"}'
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmony")
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(RANDOM_MODEL / file, folder)
    found = json.loads((folder / "tokenizer.json").read_text())
    first = 1 + max([*found["model"]["vocab"].values(), *(token["id"] for token in found["added_tokens"])])
    flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
    found["added_tokens"] += [{"id": first + place, "content": mark, **flags} for place, mark in enumerate(MARKS)]
    (folder / "tokenizer.json").write_text(json.dumps(found))
    ends = {"eos_token_id": [first, first + len(MARKS) - 1]}  # <|return|> and <|call|>
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return load_tokenizer(folder)


def completed(tokenizer, text, prompt="<|start|>user<|message|>x<|end|><|start|>assistant", **sampling):
    """The finished request of a model that writes this text."""
    tokens = tokenizer.encode_piece(text)
    asked = SamplingConfig(**{"max_tokens": len(tokens), **sampling}).to_sampling()
    request = Request(RequestKey(0, 0, 0), 0, tokenizer.encode_piece(prompt), asked, 0)
    marks = HarmonyTokens.of(tokenizer)
    assert marks is not None
    thinking = HarmonyThinking(marks, request.token_ids)
    rules = RuleMaker(tokenizer, tokenizer.vocab_size).make(request, thinking)
    stream = tokenizer.stream() if asked.stop else None
    sequence = Sequence(request, [0], 1, RequestTimes(), stream, rules, thinking, separates_reasoning=True)
    for token in tokens:
        if sequence.finish_reason is None:
            sequence.accept(token, tokenizer.eos_token_ids)
    return sequence.completion(tokenizer)


@pytest.mark.parametrize(
    ("written", "reasoning", "text"),
    [
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Four.<|return|>", "Hm.", "Four."),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant{ANALYSIS}So.<|end|>{FINAL}Four.<|return|>", "Hm.\nSo.", "Four."),
        ("<|channel|>final<|message|>Four.<|return|>", "", "Four."),
        (f"{ANALYSIS}Hm.<|end|>{CALL}<|call|>", "Hm.", CALL),
        (f"{ANALYSIS}Hm.<|end|>{PREAMBLE}<|end|>{CALL}<|call|>", "Hm.", f"I look.<|end|>{CALL}"),
        # unfinished, or not in the format: nothing is lost
        (f"{ANALYSIS}Hm", "Hm", ""),
        (f"{ANALYSIS}Hm.<|end|>{FINAL}Fo", "Hm.", "Fo"),
        (f"{ANALYSIS}Hm.{FINAL}Four.", "Hm.", "Four."),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant", "Hm.", "<|start|>assistant"),
        (f"{ANALYSIS}Hm. <|channel|> is a mark<|end|>{FINAL}Four.", "Hm. <|channel|> is a mark", "Four."),
        ("Four.", None, "Four."),
        ("", None, ""),
    ],
)
def test_analysis_is_the_reasoning_and_final_the_text(tokenizer, written, reasoning, text):
    done = completed(tokenizer, written, **({} if written else {"max_tokens": 1}))
    assert (done.reasoning, done.text) == (reasoning, text)


@pytest.mark.parametrize(
    ("prompt", "written", "reasoning", "text"),
    [
        ("no marks", "Four.", None, "Four."),
        (f"<|start|>assistant{ANALYSIS}I", f" see.<|end|>{FINAL}Four.", "see.", "Four."),
        (FINAL, "Four.", None, "Four."),
    ],
)
def test_a_prompt_may_begin_the_answer(tokenizer, prompt, written, reasoning, text):
    done = completed(tokenizer, written, prompt)
    assert (done.reasoning, done.text) == (reasoning, text)


def test_stop_strings_are_of_the_final_message_alone(tokenizer):
    done = completed(tokenizer, f"{ANALYSIS}final or not.<|end|>{FINAL}It is final or not.<|return|>", stop=["final"])
    assert (done.reasoning, done.text, done.stop_reason) == ("final or not.", "It is ", "final")


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_a_budget_ends_the_analysis_and_begins_the_final_message(tokenizer, budget):
    marks = HarmonyTokens.of(tokenizer)
    asked = SamplingConfig(max_tokens=99, thinking_budget=budget).to_sampling()
    request = Request(RequestKey(0, 0, 0), 0, tokenizer.encode_piece("<|start|>assistant"), asked, 0)
    thinking = HarmonyThinking(marks, request.token_ids)
    rules = RuleMaker(tokenizer, tokenizer.vocab_size).make(request, thinking)
    wanted = tokenizer.encode_piece(f"{ANALYSIS}a b c d e f g h i j k l m n o p q r s t")
    written: list[int] = []
    while thinking.is_open:
        logits = torch.zeros(tokenizer.vocab_size)
        logits[wanted[len(written)]] = 1.0
        apply_rules(rules, logits)
        written.append(int(logits.argmax()))
        thinking.accept(written[-1])
        rules.accept(written[-1])
    text = tokenizer.decode(written, with_special=True)
    assert text.endswith("<|channel|>final<|message|>")
    assert thinking.num_tokens == len(written)
    assert len(written) <= budget + len(marks.to_answer) + len(tokenizer.encode_piece(ANALYSIS))
    assert len(thinking.split(written)[0]) <= budget


@pytest.mark.parametrize("reasoning", ["none", "auto"])
def test_calls_are_found_with_the_channels_and_without(tokenizer, reasoning):
    written = f"{ANALYSIS}Or to=functions.g?<|end|>{PREAMBLE}<|end|>{CALL}"
    text = written if reasoning == "none" else completed(tokenizer, written).text
    found = AnswerReader(["harmony"]).read(text)
    assert OfferedTools().calls(found) == [{"name": "f", "arguments": '{"a": "<|end|>"}'}]
