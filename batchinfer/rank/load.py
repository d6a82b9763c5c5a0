"""What a rank holds: its share of the model, and KV pages for the memory there is. Called by the rank program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from batchinfer.config import PAGE_TOKENS, JobConfig
from batchinfer.data.tokenizer import PromptTokenizer
from batchinfer.host_info import free_memory_bytes, matrix_library_mode, processor_kind
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.disk import DiskStore
from batchinfer.model.config import load_model_config
from batchinfer.model.fresh_memory import FreshMemory
from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.layout import RankPlace
from batchinfer.parallel.mesh import Mesh
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.protocol.messages import ExpertSlots
from batchinfer.rank.kv_budget import measured_room
from batchinfer.rank.migration import Outbox
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.rank.worker import RankWorker
from batchinfer.records import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.bfloat16}
MEMORY_SHARE = 0.5  # of the memory that is free after loading, at most, goes to KV pages


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rank has to know of the job besides its own place."""

    most_tokens: int  # KV tokens of all requests together; more pages than these need would never be used
    largest_tokens: int  # of the largest request
    num_local_ranks: int  # ranks that share this host's memory
    parcel_folder: Path | None  # for KV between hosts; None: all ranks are on one host
    traced: bool
    model_digests: dict[str, str]  # of weights and config.json, see fingerprint.py


def load_model(
    job: JobConfig,
    mesh: Mesh,
    place: RankPlace,
    slots: ExpertSlots | None,
    device: torch.device,
    memory: FreshMemory | None = None,
    *,
    before_weights: Callable[[], None] | None = None,
) -> Transformer:
    """Load this rank's share onto its device: everything but the routed experts in other ranks' slots.

    Args:
        place: of the rank; what it does says how many rows it may send at once.
        slots: where the experts stand; None: in order.
        memory: for weights, where this rank holds all of them (else None).
        before_weights: called when backend, dtype and exchange are known to run here, and only weights are missing.

    Raises:
        ModelError: the weights do not fit the config or are damaged, or the backend cannot run here.
        ConfigError: the experts do not spread evenly over the ranks, or the exchange cannot run here.
    """
    folder, backend, dtype = Path(job.model.path), job.cluster.backend, DTYPES[job.model.dtype]
    eight_bit = job.model.dtype == "fp8"
    config = load_model_config(folder)
    _check_ops(job, device)
    if mesh.size == 1:
        if before_weights is not None:
            before_weights()
        return Transformer.load(folder, dtype=dtype, eight_bit=eight_bit, device=device, backend=backend, memory=memory)
    if config.n_routed_experts == 0:
        placements = []
    elif slots is None:
        placement = Placement.in_order(config.n_routed_experts, mesh.size, job.cluster.redundant_experts)
        placements = [placement] * config.num_moe_layers
    else:
        placements = _placements(slots, config.n_routed_experts, mesh)
    dispatchers = mesh.dispatchers(
        placements,
        _row_format(job, mesh, device),
        max_tokens=place.most_tokens(job.cluster),
        hidden=config.hidden_size,
        topk=config.num_experts_per_tok,
    )
    if before_weights is not None:
        before_weights()
    return Transformer.load(
        folder,
        dtype=dtype,
        eight_bit=eight_bit,
        dispatchers=dispatchers,
        expert_ids=[placement.experts_of_rank(mesh.rank) for placement in placements],
        device=device,
        backend=backend,
    )


def _check_ops(job: JobConfig, device: torch.device) -> None:
    """Refuse a backend that cannot run on this device, or not in 8 bits."""
    eight_bit = job.model.dtype == "fp8"
    backend = job.cluster.backend
    ops = Ops.select(backend, DTYPES[job.model.dtype], eight_bit=eight_bit, device=device)
    try:
        ops.holds_fp8(device)  # packs a value
    except RuntimeError as error:
        raise ConfigError(f"model.dtype is 'fp8', but backend {backend!r} cannot run it here: {error}") from error


def _row_format(job: JobConfig, mesh: Mesh, device: torch.device) -> RowFormat:
    """How rows travel to the experts: in FP8 where the experts of all ranks are in FP8, else in the model's dtype.

    Rounding to FP8 before the journey or after it gives the same bits, on one rank and on many. Integers of 8 bits are
    rounded otherwise, so rows for these travel in bfloat16.
    """
    if job.model.dtype != "fp8":
        return RowFormat(job.model.dtype)
    ops = Ops.select(job.cluster.backend, DTYPES["fp8"], eight_bit=True, device=device)
    all_hold_fp8 = all(holds for (holds,) in mesh.agree([ops.holds_fp8(device)]))
    return RowFormat("fp8" if all_hold_fp8 else "bfloat16")


def make_worker(
    job: JobConfig, model: Transformer, tokenizer: PromptTokenizer, mesh: Mesh, place: RankPlace, around: Surroundings
) -> RankWorker:
    """Size and allocate the KV pages, once all ranks of the host have loaded.

    Raises:
        ConfigError: the largest request does not fit the page budget.
    """
    cluster = job.cluster
    page_bytes = PAGE_TOKENS * model.config.kv_bytes_per_token(model.dtype.itemsize)
    # parcels under way take as much as the decode ranks' pages at most
    num_shares = around.num_local_ranks + (cluster.num_decode_ranks if cluster.mode == "disaggregated" else 0)
    free_bytes = free_memory_bytes()
    host_share = int(free_bytes * MEMORY_SHARE) // num_shares
    if cluster.page_bytes:
        budget = cluster.page_bytes
    elif model.device.type == "cuda":
        budget = measured_room(
            model,
            prefill_tokens=cluster.prefill_tokens,
            decode_requests=cluster.decode_requests,
            largest_tokens=around.largest_tokens,
            runs_prefill=place.runs_prefill,
            runs_decode=place.runs_decode,
        )
    else:
        budget = host_share
    # unset: no more than two full decode batches of the largest request, which leaves room for shared prefixes
    useful = (
        around.most_tokens
        if cluster.page_bytes
        else min(around.most_tokens, 2 * cluster.decode_requests * around.largest_tokens)
    )
    num_pages = min(budget // page_bytes, -(-useful // PAGE_TOKENS))
    pages_of_host = num_pages * page_bytes * around.num_local_ranks
    if model.device.type == "cpu" and pages_of_host > free_bytes:
        # they take memory when they are used, which would end this process in the middle of the job
        raise ConfigError(
            f"KV pages of this host's ranks ({pages_of_host / 1e9:.1f} GB) do not fit into its free memory "
            f"({free_bytes / 1e9:.1f} GB); lower cluster.page_bytes or free memory"
        )
    if num_pages * PAGE_TOKENS < around.largest_tokens:
        raise ConfigError(
            f"the largest request needs {around.largest_tokens:,} tokens of KV, but memory for KV pages holds "
            f"{num_pages * PAGE_TOKENS:,}; lower max_tokens, use a smaller dtype or free memory"
        )
    outbox = None
    if not place.runs_decode or place.group_size > 1:
        share = num_pages * page_bytes * cluster.num_decode_ranks // cluster.num_prefill_ranks
        if model.device.type != "cpu":
            share = min(share, host_share)  # parcels lie in the host's memory, of which there may be less
        outbox = Outbox(share, None if around.parcel_folder is None else around.parcel_folder / f"rank-{place.rank}")

    def open_store(pages: torch.Tensor) -> StoredPrefixes:
        return _open_store(job, model, pages, around)

    def place_experts(slots: ExpertSlots) -> None:
        placements = _placements(slots, model.config.n_routed_experts, mesh)
        model.place_experts(Path(job.model.path), placements, mesh.rank)

    return RankWorker(
        model,
        tokenizer,
        num_pages=num_pages,
        prefill_tokens=cluster.prefill_tokens,
        decode_requests=cluster.decode_requests,
        place=place,
        mesh=mesh,
        # without experts nothing travels under which the other half could compute
        overlap=cluster.overlap is not False and mesh.size > 1 and model.num_moe_layers > 0,
        outbox=outbox,
        place_experts=place_experts,
        open_store=None if job.kv.dir is None else open_store,
        traced=around.traced,
    )


def _open_store(job: JobConfig, model: Transformer, pages: torch.Tensor, around: Surroundings) -> StoredPrefixes:
    """This rank's view of the job's KV store."""
    assert job.kv.dir is not None
    num_layers, _, _, latent_dim = pages.shape
    identity = KvIdentity(
        model=job.model.path,
        weights=around.model_digests["model.weights"],
        config=around.model_digests["model.config"],
        dtype=str(pages.dtype).removeprefix("torch."),
        numerics=_numerics(model),
        salt=job.kv.salt,
        block_tokens=job.kv.block_tokens,
        num_layers=num_layers,
        latent_dim=latent_dim,
    )
    return StoredPrefixes(
        DiskStore(Path(job.kv.dir), identity, max_bytes=job.kv.max_bytes),
        pages,
        persist=job.kv.persist,
        reuse=job.kv.reuse,
        wait_s=job.cluster.collective_seconds / 4,
    )


def _numerics(model: Transformer) -> str:
    """What decides the bits of a latent beside model and dtype: C++ sources; or processor, library and kernels."""
    if model.device.type == "cuda":
        gpu = f"{torch.cuda.get_device_name(model.device)}, CUDA {torch.version.cuda}"
        return f"{gpu}, torch {torch.__version__}, {model.kernels}"
    if model.has_fixed_sums:
        return model.kernels
    instructions = torch.backends.cpu.get_cpu_capability()
    mode = f", MKL_CBWR={matrix_library_mode()}" if matrix_library_mode() else ""
    return f"{processor_kind()} {instructions}, torch {torch.__version__}{mode}, {model.kernels}"


def _placements(slots: ExpertSlots, num_experts: int, mesh: Mesh) -> list[Placement]:
    return Placement.of_layers(slots.expert_of_slot, slots.share_of_slot, num_experts, mesh.size)
