"""Make the sample data: prompts in four Parquet shards, and a tiny model with random weights to run them on.

    python sample_data/make_sample_data.py

rewrites sample_data/prompts and sample_data/model; the same seed gives the same data. The model has the architecture of
DeepSeek-V3 in small (its answers are noise), so that a whole job runs on a laptop in a minute.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from sample_texts import PREAMBLE, TASKS, user_text
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
SEED = 20
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
VOCAB_SIZE = 1024
WINDOW = 2048
SHARD_ROWS = (130, 96, 64, 34)  # and rows per row group:
GROUP_ROWS = (32, 48, 64, 16)
NUM_DUPLICATES = 12

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

MODEL_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": WINDOW,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
}

Message = dict[str, str | None]


def main() -> None:
    rows = make_rows(random.Random(SEED))
    write_prompts(rows)
    write_tokenizer(rows)
    write_model()


# ---- prompts


def make_rows(rng: random.Random) -> list[dict]:
    """Rows of all tasks in mixed order, with duplicates and a few bad rows strewn in."""
    bad = bad_conversations()
    num_good = sum(SHARD_ROWS) - NUM_DUPLICATES - len(bad)
    names = list(TASKS)
    good = [(names[place % len(names)], conversation(names[place % len(names)], rng)) for place in range(num_good)]
    rows = [*good, *rng.sample(good, NUM_DUPLICATES)]
    rng.shuffle(rows)
    for task, messages in bad:
        rows.insert(rng.randrange(len(rows)), (task, messages))
    table = [
        {"id": f"row-{place:04d}", "messages": messages, "task": task} for place, (task, messages) in enumerate(rows)
    ]
    table[41]["id"] = table[17]["id"]  # ids may repeat
    table[200]["id"] = None  # and may be missing
    return table


def conversation(task: str, rng: random.Random) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": f"{PREAMBLE}\n\n{TASKS[task]}"}]
    if rng.random() < 0.15:
        # a second turn: the first answer is part of the prompt
        messages.append({"role": "user", "content": user_text(task, rng)})
        messages.append(
            {"role": "assistant", "content": rng.choice(("Noted.", "Understood, go on.", "That is clear."))}
        )
    messages.append({"role": "user", "content": user_text(task, rng)})
    return messages


def bad_conversations() -> list[tuple[str, list[Message] | None]]:
    """Rows that must become error rows."""
    return [
        ("triage", None),
        ("recipe", []),
        ("ledger", [{"role": None, "content": "Who is speaking?"}]),
        ("route", [{"role": "user", "content": None}]),
        ("triage", [{"role": "narrator", "content": "A role that the chat template refuses."}]),
        ("recipe", [{"role": "user", "content": "stir, taste, wait a little, " * 600}]),  # longer than the window
    ]


def write_prompts(rows: list[dict]) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema([("id", pa.string()), ("messages", pa.list_(message)), ("task", pa.string())])
    (HERE / "prompts").mkdir(exist_ok=True)
    first = 0
    for shard, (num_rows, group_rows) in enumerate(zip(SHARD_ROWS, GROUP_ROWS, strict=True)):
        table = pa.Table.from_pylist(rows[first : first + num_rows], schema)
        target = HERE / "prompts" / f"part-{shard:05d}.parquet"
        pq.write_table(table, target, row_group_size=group_rows, compression="zstd")
        first += num_rows


# ---- model


def write_tokenizer(rows: list[dict]) -> None:
    """A byte-level BPE trained on the prompts; the file adds the begin token to raw prompts by itself."""
    texts = [message["content"] or "" for row in rows for message in row["messages"] or []]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
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
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the prompts are too uniform for a vocabulary of this size"
    (HERE / "model").mkdir(exist_ok=True)
    tokenizer.save(str(HERE / "model" / "tokenizer.json"))
    write_json(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": WINDOW,
            "clean_up_tokenization_spaces": False,
            "bos_token": {"__type": "AddedToken", "content": BOS, "special": True},
            "eos_token": {"__type": "AddedToken", "content": EOS, "special": True},
            "pad_token": EOS,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_model() -> None:
    generator = torch.Generator().manual_seed(SEED)
    weights = {name: _random_weight(name, shape, generator) for name, shape in weight_shapes().items()}
    save_file(weights, HERE / "model" / "model.safetensors", metadata={"format": "pt"})
    write_json("config.json", MODEL_CONFIG)
    write_json("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor under its published name; a linear layer is [out, in]."""
    c = MODEL_CONFIG
    hidden, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_a_proj.weight": (c["q_lora_rank"], hidden),
            f"{at}.self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{at}.self_attn.q_b_proj.weight": (heads * (c["qk_nope_head_dim"] + rope), c["q_lora_rank"]),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + rope, hidden),
            f"{at}.self_attn.kv_a_layernorm.weight": (c["kv_lora_rank"],),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * c["v_head_dim"]),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
        if layer < c["first_k_dense_replace"]:
            shapes |= _mlp_shapes(f"{at}.mlp", c["intermediate_size"])
            continue
        shapes[f"{at}.mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            shapes |= _mlp_shapes(f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])
        shapes |= _mlp_shapes(f"{at}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}


def _mlp_shapes(at: str, inner: int) -> dict[str, tuple[int, ...]]:
    hidden = MODEL_CONFIG["hidden_size"]
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Weights large enough that tokens differ in their likelihood and experts in their load."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return (1 + 0.1 * values).to(torch.bfloat16)
    if name.endswith("e_score_correction_bias"):
        return 0.05 * values
    if name == "model.embed_tokens.weight":
        return values.to(torch.bfloat16)
    gain = 3.0 if name == "lm_head.weight" else 1.5
    return (gain * values / shape[-1] ** 0.5).to(torch.bfloat16)


def write_json(name: str, value: dict) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    (HERE / "model" / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
