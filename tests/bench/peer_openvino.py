"""OpenVINO GenAI with continuous batching, as a child process of peers.py, in an environment of its own.

    python tests/bench/peer_openvino.py convert MODEL FOLDER    to OpenVINO's form, weights in 8 bits as by its default
    python tests/bench/peer_openvino.py serve FOLDER NUM_SEQUENCES

Activations are in the type that OpenVINO chooses for the processor, KV in its default of 8 bits. Its prefix cache knows
what was computed before a request came: one request of each common beginning goes first, which is its quickest way.
"""

from __future__ import annotations

import sys

import numpy as np
from peer_server import Requests, Run, groups_of, serve

STEP_TOKENS = 256  # its default; 1,024 and 4,096 are not quicker
KV_GIGABYTES = 4


def convert(model: str, folder: str) -> None:
    """Convert a checkpoint and its tokenizer."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    how = OVWeightQuantizationConfig(bits=8)
    OVModelForCausalLM.from_pretrained(model, export=True, quantization_config=how).save_pretrained(folder)
    texts = convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for name, converted in zip(("tokenizer", "detokenizer"), texts, strict=True):
        openvino.save_model(converted, f"{folder}/openvino_{name}.xml")


def load(folder: str, num_sequences: int) -> tuple[str, Run]:
    """The engine, and what runs one workload: a second one would find the first's prompts in the prefix cache."""
    import openvino
    import openvino_genai

    how = openvino_genai.SchedulerConfig()
    how.max_num_batched_tokens, how.max_num_seqs = STEP_TOKENS, num_sequences
    how.cache_size, how.enable_prefix_caching = KV_GIGABYTES, True
    engine = openvino_genai.ContinuousBatchingPipeline(folder, how, "CPU")

    def answer(requests: Requests) -> list[int]:
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in requests]
        lengths = [
            openvino_genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, ignore_eos=True)
            for _, count in requests
        ]
        return [len(done.m_generation_ids[0]) for done in engine.generate(prompts, lengths)]

    def run(requests: Requests, _batch: int) -> list[int]:
        prompts = [prompt for prompt, _ in requests]
        firsts = [prompts[sequences[0]] for _, sequences in groups_of(prompts) if len(sequences) > 1]
        if firsts:
            answer([(prompt, 1) for prompt in firsts])
        return answer(requests)

    answer([([9] * 8, 2)])  # what it does once, at its first step
    return f"OpenVINO GenAI {openvino_genai.__version__}", run


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:4])
    else:
        serve(lambda: load(sys.argv[2], int(sys.argv[3])))
