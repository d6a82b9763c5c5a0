"""DeepSeek V4's answers are read as DeepSeek's own parser reads them, or more strictly."""

import json

from batchinfer.finish.answers import AnswerReader
from support.v4_answers import DIGESTS, answers, digest

# Where DeepSeek's parser drops, mends or passes on what is not in the form: what is read here; None: reported as broken
OTHERWISE = {
    "no JSON": None,  # passed on as it is
    "cut off": None,  # the part of the argument is taken for the whole
    "a parameter twice": None,  # both, under one name
    "an empty block": None,  # nothing
    "a mark in prose": None,  # dropped with all behind it
    "a call outside a block": None,  # read
    "an object in place of parameters": [("f", '{"a": 1}')],  # no arguments
    "a second block": [("f", '{"a": "b"}'), ("g", "{}")],  # the first block's calls alone
    "text behind the calls": [("f", "{}")],  # dropped, while it is content here
    "a mark in the thinking": [],  # the answer is dropped with it
    "a second end of thinking": [],  # dropped from the text, which is left here as it is
    "empty lines before the text": [],  # dropped
}


def test_100_answers_are_read_as_deepseek_recipe_reads_them_or_more_strictly():
    expected = json.loads(DIGESTS.read_text())
    assert len(expected) == 100
    equal = 0
    for name, text in answers().items():
        answer = AnswerReader(["deepseek_v32"]).read(text)
        calls = None if answer.calls is None else [(call.name, call.arguments) for call in answer.calls]
        if name in OTHERWISE:
            assert calls == OTHERWISE[name], name
            continue
        reasoning, mark, content = answer.content.partition("</think>")
        assert mark or not content
        assert calls is not None, name
        assert digest(reasoning, content, calls) == expected[name], name
        equal += 1
    assert equal == 100 - len(OTHERWISE)
