"""Texts scored by a published model in each dtype, beside transformers in float32.

    python tests/bench/published_model.py [--texts 48] [--dtype float32 bfloat16 fp8] [--model DIR]

The texts are of Python's own documentation. Their first characters are the prompt and the rest is the choice that is
scored. Printed are the perplexity (e to the mean loss of a token), how far a text's mean log-probability of a token is
from transformers' at most and on average, and seconds of the whole command, with its start.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from support.jobs import start, write_job  # noqa: E402
from support.published_model import write_published_model  # noqa: E402

PROMPT_CHARS, CHARS = 200, 1_200


def reference_logprobs(model: Path, texts: list[str]) -> list[float]:
    """Return the sum of each text's log-probabilities behind its prompt, by transformers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sums = []
    for text in texts:
        prompt = tokenizer.encode(text[:PROMPT_CHARS])
        ids = torch.tensor([*prompt, *tokenizer.encode(text[PROMPT_CHARS:], add_special_tokens=False)])
        with torch.inference_mode():
            logprobs = reference(ids[None]).logits[0].log_softmax(-1, dtype=torch.float64)
        sums.append(logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).sum().item())
    return sums


def scores(folder: Path, model: Path, dtype: str) -> tuple[list[float], list[int], float]:
    """Return the same sums by batchinfer, the number of scored tokens of each text, and seconds."""
    job = write_job(
        folder,
        name=f"{dtype}.toml",
        input={"files": ["texts.parquet"], "prompt": "prompt", "choices": "choices"},
        output={"dir": dtype},
        model={"path": str(model), "dtype": dtype},
        sampling={"max_tokens": 0},
    )
    started = time.monotonic()
    running = start("run", job)
    _, err = running.communicate()
    if running.returncode:
        sys.exit(err)
    took_s = time.monotonic() - started
    rows = pq.read_table(folder / dtype / "outputs").sort_by("id").to_pylist()
    return [row["choice_logprobs"][0] for row in rows], [row["choice_num_tokens"][0] for row in rows], took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "fp8"])
    parser.add_argument("--model", type=Path, help="a folder that was made before")
    options = parser.parse_args()
    texts = [topics[name][:CHARS] for name in sorted(topics) if len(topics[name]) >= CHARS][: options.texts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or write_published_model(folder / "published")
        columns = {
            "id": list(range(len(texts))),
            "prompt": [text[:PROMPT_CHARS] for text in texts],
            "choices": [[text[PROMPT_CHARS:]] for text in texts],
        }
        pq.write_table(pa.table(columns), folder / "texts.parquet")
        expected = reference_logprobs(model, texts)
        for dtype in options.dtype:
            found, counts, took_s = scores(folder, model, dtype)
            apart = [abs(one - other) / count for one, other, count in zip(found, expected, counts, strict=True)]
            print(
                f"{dtype:10} {sum(counts):,} tokens: perplexity {math.exp(-sum(found) / sum(counts)):.4f} "
                f"(transformers {math.exp(-sum(expected) / sum(counts)):.4f}), a text's mean apart by "
                f"{sum(apart) / len(apart):.1e}, at most {max(apart):.1e}; {took_s:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
