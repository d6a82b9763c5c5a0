"""transformers' `generate` over batches of prompts of similar length, as a child process of peers.py.

    python tests/bench/peer_transformers.py MODEL

A batch runs until its longest answer is done; what that adds to the others is cut off.
"""

from __future__ import annotations

import os
import sys

import torch
import transformers
from peer_server import Requests, Run, serve

PAD = 2  # masked, so any token would do


def load(folder: str) -> tuple[str, Run]:
    """The model, and what runs a workload in batches, longest prompts first."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run_batch(batch: Requests) -> list[int]:
        longest = max(len(prompt) for prompt, _ in batch)
        ids_BT = torch.full((len(batch), longest), PAD)  # B requests, T prompt tokens, padded on the left
        mask_BT = torch.zeros_like(ids_BT)
        for row, (prompt, _) in enumerate(batch):
            ids_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, longest - len(prompt) :] = 1
        num_new = max(num_output for _, num_output in batch)
        done = model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        return [len(row[longest : longest + num_output]) for row, (_, num_output) in zip(done, batch, strict=True)]

    def run(requests: Requests, batch: int) -> list[int]:
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number][0]))
        num_outputs = [0] * len(requests)
        with torch.inference_mode():
            for start in range(0, len(order), batch):
                numbers = order[start : start + batch]
                for number, count in zip(numbers, run_batch([requests[n] for n in numbers]), strict=True):
                    num_outputs[number] = count
        return num_outputs

    return f"transformers {transformers.__version__}, torch {torch.__version__}", run


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1]))
