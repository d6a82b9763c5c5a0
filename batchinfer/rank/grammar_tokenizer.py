"""The tokenizer for grammars, in which no text encodes to a control token.

llguidance encodes text about which a grammar leaves no choice. If that text spells an added token, the encoder would
return that control token, which no grammar of texts accepts. Here such tokens have a mark in their names, so that no
text spells them; their ids stay.
"""

import json
from typing import Any

from batchinfer.config.structured_outputs.lark_text import lark_tokens

MARK = "\U000f0ba7\U000f1c3d"  # characters for private use


def without_spelt_tokens(tokenizer_json: str) -> tuple[str, frozenset[str]]:
    """Mark the names of the added tokens that llguidance treats as control tokens.

    Returns:
        tokenizer.json, and the names that have a mark in it.
    """
    tokenizer = json.loads(tokenizer_json)
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    merged = {"".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model.get("merges", ())}
    marked = {token["content"]: _marked(token["content"]) for token in added if _is_control(token)}
    marked = {name: marked[name] for name in marked.keys() - merged}
    for token in added:
        if token["content"] in marked:
            token |= {"content": marked[token["content"]], "special": True}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {marked.get(name, name): number for name, number in vocab.items()}
    else:
        model["vocab"] = [[marked.get(name, name), score] for name, score in vocab]
    if model.get("unk_token") in marked:
        model["unk_token"] = marked[model["unk_token"]]
    return json.dumps(tokenizer, ensure_ascii=False), frozenset(marked)


def with_marked_names(lark: str, names: frozenset[str]) -> str:
    """Return a grammar with a mark in these names of tokens."""
    pieces, end = [], 0
    for token in lark_tokens(lark):
        if token.kind == "special" and token.text in names:
            pieces += [lark[end : token.start], _marked(token.text)]
            end = token.end
    return "".join(pieces) + lark[end:]


def _is_control(token: dict[str, Any]) -> bool:
    name = token["content"]
    return bool(token["special"]) or (name.startswith("<") and name.endswith(">"))


def _marked(name: str) -> str:
    return name[:1] + MARK + name[1:]
