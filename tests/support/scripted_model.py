"""Tiny models that say scripts: a script lists tokens, and the last token alone decides the next one.

A row changes a script by `logit_bias`: -100 forbids a token, and REROUTED on another one puts it in that place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from batchinfer.model.config import load_model_config
from batchinfer.model.tensor_names import expected_tensors, mtp_tensors

MARKS = ("<s>", "</s>", "<u>", "<a>", "<think>", "</think>")  # added tokens, in the order of their ids
TEMPLATE = "<s>{% for m in messages %}<u>{{ m.content }}{% endfor %}<a><think>"
THINKING = ("<think>", "first ", "step\n\n", "second ", "</think>", "answer\n\n", "more", "</s>")
REROUTED = 60.0
HIDDEN = 256
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that byte-level BPE writes as themselves
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_CHARACTER_OF = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


def write_tokenizer(folder: Path, pieces: Iterable[str | bytes]) -> dict[str | bytes, int]:
    """Write a byte-level tokenizer with MARKS, all single bytes and these pieces; return the ids of marks and pieces.

    Args:
        pieces: texts, or bytes that need not be whole characters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = list(pieces)
    names = dict.fromkeys((*MARKS, *_CHARACTER_OF.values(), *map(_spell, pieces)))
    ids = {name: place for place, name in enumerate(names)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": ids[mark], "content": mark, "special": "think" not in mark, **flags} for mark in MARKS]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "ignore_merges": True, "vocab": ids, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {mark: ids[mark] for mark in MARKS} | {piece: ids[_spell(piece)] for piece in pieces}


def write_scripted_model(folder: Path, *scripts: Sequence[str | bytes]) -> dict[str | bytes, int]:
    """Write a model that goes on with a script wherever a token of it is the last one; return its tokens' ids.

    Its layer for multi-token prediction knows the scripts, too, so that every drafted token is right.

    Args:
        scripts: of MARKS and pieces of text or bytes; no token may be followed by two different ones.
    """
    following: dict[str | bytes, str | bytes] = {}
    for last, coming in (pair for script in scripts for pair in pairwise(script)):
        assert following.setdefault(last, coming) == coming, f"{last!r} is followed by two tokens"
    tokens = dict.fromkeys(token for script in scripts for token in script)
    ids = write_tokenizer(folder, [token for token in tokens if token not in MARKS])
    vocab_size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab_size}))
    config = load_model_config(folder)
    shapes = [*expected_tensors(config), *mtp_tensors(config)]
    # attention and MLP add nothing: the state is the normed embedding of the last token
    tensors = {name: torch.ones(shape) if "norm" in name else torch.zeros(shape) for name, shape in shapes}
    noise = torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(0))
    embedding = tensors["model.embed_tokens.weight"] = torch.nn.functional.normalize(noise, dim=1)
    for last, coming in following.items():
        tensors["lm_head.weight"][ids[coming]] += 8 * embedding[ids[last]]
    tensors["model.layers.1.eh_proj.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return ids


def _spell(piece: str | bytes) -> str:
    """Return a piece of text as byte-level BPE writes it."""
    return "".join(_CHARACTER_OF[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))
