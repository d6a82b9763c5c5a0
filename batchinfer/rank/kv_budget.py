"""The number of KV pages of a rank: on a CPU by the free memory, on a GPU by the memory that the largest steps leave.

all of the GPU   | weights, libraries | KV pages           | largest step | reserve |
"""

# T tokens, B requests

from dataclasses import dataclass

import numpy as np
import torch

from batchinfer.config import PAGE_TOKENS, ClusterConfig, JobConfig
from batchinfer.config.rank_layout import RankPlace
from batchinfer.host_info import free_memory_bytes
from batchinfer.kv.pages import pages_for
from batchinfer.model.fused.screened_head import ScreenedHead
from batchinfer.model.sampling import SamplingRows, sample
from batchinfer.model.step import PrefillSpan, StepInput
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_bytes import rank_bytes
from batchinfer.model.weight_mode import KEPT_SHARE, MOST_KEPT, computes_prompts_alone, streamed_states
from batchinfer.protocol.messages import Start
from batchinfer.rank.device import ranks_per_gpu
from batchinfer.records import ConfigError
from batchinfer.sanitize import size_text

# Share of the GPU's memory for later needs: captured graphs, buffers of libraries, gaps between blocks of memory, and
# steps in which this rank's experts get more rows than in the measured steps.
RESERVE_SHARE = 0.08
MEMORY_SHARE = 0.5  # largest share of the memory free after loading that KV pages may take
_ALTERNATIVES = 20  # alternatives that rows report with a token
_STRIDE = 7919  # between the tokens of the steps, so that they go to many experts


@dataclass(frozen=True, slots=True)
class KvBudget:
    """KV memory of one rank."""

    num_pages: int
    num_slots: int  # of requests' states, those kept for shared prefixes among them; 0: requests have none
    transfer_bytes: int  # largest number of bytes on their way to other ranks


def kv_budget(job: JobConfig, model: Transformer, place: RankPlace, start: Start, num_local_ranks: int) -> KvBudget:
    """Return the page budget by the free memory, once all ranks of the host have loaded; all ranks of a group call it.

    Args:
        num_local_ranks: ranks that share this host's memory.

    Raises:
        ConfigError: the largest request does not fit, or this host's memory cannot hold the pages.
    """
    cluster, on_cpu = job.cluster, model.device.type == "cpu"
    page_bytes = PAGE_TOKENS * model.ops.page_format(model.dtype).bytes_per_token(model.config)
    if computes_prompts_alone(job, model.config):
        page_bytes //= model.config.num_hidden_layers
    # KV on its way takes as much as the decode ranks' pages at most
    num_shares = num_local_ranks + (cluster.num_decode_ranks if cluster.mode == "disaggregated" else 0)
    # mapped weights count as free memory, but must not be displaced by pages; the host's ranks share some of them
    screen_bytes = ScreenedHead.num_bytes(model) if place.runs_decode else 0
    free_bytes = max(0, free_memory_bytes() - num_local_ranks * (model.weights.mapped_bytes + screen_bytes))
    host_share = int(free_bytes * MEMORY_SHARE) // num_shares
    state_bytes = model.config.attention.state_bytes(model.dtype.itemsize)
    num_slots = 0
    if state_bytes:
        num_slots = cluster.decode_requests
        if place.runs_prefill:
            num_slots += min(MOST_KEPT, int(host_share * KEPT_SHARE) // state_bytes)
    useful_tokens = start.most_tokens
    if model.stream is not None:
        host_share = model.stream.split.kv_bytes
        num_slots = streamed_states(job, model.config, host_share, start.largest_tokens)
    elif on_cpu and cluster.memory_bytes is not None:
        held = rank_bytes(model.config, job.model.dtype, num_experts=experts_held(model)) + screen_bytes
        host_share = min(host_share, max(0, cluster.memory_bytes - held))
    if cluster.page_bytes:
        num_bytes = cluster.page_bytes
    else:
        # no more than two full decode batches of the largest request, which leaves room for shared prefixes
        largest = pages_for(start.largest_tokens) * PAGE_TOKENS  # requests share no page that they write
        useful_tokens = min(useful_tokens, 2 * cluster.running_requests * largest)
        scores = any(item is not None for item in (job.input.choices, job.input.sampling, job.sampling.prompt_logprobs))
        num_bytes = (
            max(0, host_share - num_slots * state_bytes)
            if on_cpu
            else measured_budget(
                model,
                cluster,
                place,
                start.largest_tokens,
                scores=scores,
                num_sharing=ranks_per_gpu(cluster.exchange, num_local_ranks),
            )
        )
        if model.stream is not None:
            num_bytes = min(num_bytes, host_share)
    num_pages = min(num_bytes // page_bytes, pages_for(useful_tokens))
    pages_of_host = (num_pages * page_bytes + num_slots * state_bytes) * num_local_ranks
    if on_cpu and pages_of_host > free_bytes:
        # pages take memory when they are used: the kernel would end this process in the middle of the job
        raise ConfigError(
            f"KV pages of this host's ranks ({size_text(pages_of_host)}) do not fit into its free memory "
            f"({size_text(free_bytes)}); lower cluster.page_bytes or free memory"
        )
    if num_pages * PAGE_TOKENS < start.largest_tokens:
        raise ConfigError(
            f"the largest request needs {start.largest_tokens:,} tokens of KV, but memory for KV pages holds "
            f"{num_pages * PAGE_TOKENS:,}; lower max_tokens, use a smaller dtype or free memory"
        )
    of_decode_rank = num_pages * page_bytes + cluster.decode_requests * state_bytes
    transfer_bytes = of_decode_rank * cluster.num_decode_ranks // cluster.num_prefill_ranks
    # transfers are in the host's memory, which may be smaller than the GPU's
    return KvBudget(num_pages, num_slots, transfer_bytes if on_cpu else min(transfer_bytes, host_share))


def experts_held(model: Transformer) -> int:
    """Return the routed experts that a rank holds of each MoE layer, 0 without any."""
    return max((len(ids) for ids in model.weights.expert_ids), default=0)


def measured_budget(
    model: Transformer,
    cluster: ClusterConfig,
    place: RankPlace,
    largest_tokens: int,
    *,
    scores: bool = False,
    num_sharing: int = 1,
) -> int:
    """Run the largest steps once on the model's GPU; return the bytes that are left for KV pages.

    Args:
        largest_tokens: tokens of the largest request, prompt and output.
        scores: whether prompts may be scored.
        num_sharing: ranks that share the GPU, each with an equal part.
    """
    device = model.device
    steps, num_pages = largest_steps(
        cluster.prefill_tokens, cluster.decode_requests, largest_tokens, model.config.vocab_size, scores=scores
    )
    pages = model.new_pages(num_pages)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for step, runs in zip(steps, (place.runs_prefill, place.runs_decode), strict=True):
        if runs:
            logits = model.forward(step, pages).logits
            sample(logits, _drawn_rows(len(logits)), np.zeros(len(logits), dtype=np.int64), model.logit_ops)
    torch.cuda.synchronize(device)
    working = torch.cuda.max_memory_allocated(device) - before
    del pages
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if num_sharing > 1:  # others may hold less than their part yet
        total //= num_sharing
        free = min(free, total - torch.cuda.memory_reserved(device))
    return bytes_for_pages(total=total, free=free, working=working)


def bytes_for_pages(*, total: int, free: int, working: int) -> int:
    """Return the bytes for KV pages of a GPU.

    Args:
        total: bytes of the GPU.
        free: free bytes while no step runs.
        working: bytes that the largest step takes.
    """
    return max(0, free - working - int(total * RESERVE_SHARE))


def largest_steps(
    prefill_tokens: int, decode_requests: int, largest_tokens: int, vocab_size: int, *, scores: bool = False
) -> tuple[tuple[StepInput, StepInput], int]:
    """Return the largest prefill step and the largest decode step of a rank, and the number of pages for them.

    Prefill runs the last tokens of the longest possible prompt, with logits for as many rows as short prompts could
    need, and scores of the others if `scores`. Decode runs requests of the longest length, and one of a single token,
    which attends differently with sparse attention. They attend to garbage: the pages of their own tokens, repeated.
    """
    num_pages = pages_for(max(prefill_tokens, decode_requests))
    context = max(largest_tokens, prefill_tokens)
    page_ids = torch.arange(pages_for(context)) % num_pages
    num_scored = max(0, prefill_tokens - decode_requests)
    sampled = torch.arange(num_scored, prefill_tokens)
    prefill = StepInput(
        tokens=_tokens(prefill_tokens, vocab_size),
        positions=torch.arange(context - prefill_tokens, context),
        slots=torch.arange(prefill_tokens),
        logit_rows=torch.cat([sampled, torch.arange(num_scored)]) if scores else sampled,
        prefill=(PrefillSpan(0, prefill_tokens, context, page_ids),),
        scored=_tokens(num_scored, vocab_size) if scores else None,
        num_alternatives=_ALTERNATIVES if scores else 0,
    )
    kv_tokens = torch.full((decode_requests,), largest_tokens)
    kv_tokens[1:2] = 1
    decode = StepInput(
        tokens=_tokens(decode_requests, vocab_size),
        positions=kv_tokens - 1,
        slots=torch.arange(decode_requests),
        logit_rows=torch.arange(decode_requests),
        page_table=(torch.arange(pages_for(largest_tokens)) % num_pages).repeat(decode_requests, 1),
        kv_tokens=kv_tokens,
    )
    return (prefill, decode), num_pages


def _drawn_rows(count: int) -> SamplingRows:
    """Return rows that are drawn after every filter, which takes several times the memory of their logits."""
    return SamplingRows(
        temperature=np.ones(count),
        top_k=np.full(count, 1000),
        top_p=np.full(count, 0.9),
        min_p=np.full(count, 0.01),
        key=np.zeros(count, dtype=np.uint64),
        num_logprobs=np.full(count, _ALTERNATIVES),
    )


def _tokens(count: int, vocab_size: int) -> torch.Tensor:
    return torch.arange(count) * _STRIDE % vocab_size
