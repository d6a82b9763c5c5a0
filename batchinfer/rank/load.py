"""Loading of a rank: its share of the model, its KV pages, and its view of the KV store."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from batchinfer.config import PAGE_TOKENS, VALUE_BYTES, JobConfig
from batchinfer.config.rank_layout import RankPlace
from batchinfer.data.bucket import Bucket
from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.host_info import free_memory_bytes, matrix_library_mode, processor_kind
from batchinfer.kv.memory import KvMemory
from batchinfer.kv.pages import pages_for
from batchinfer.kv_store.blocks import KvIdentity
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.second_tier import ATTEMPTS as TIER_ATTEMPTS
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.device_memory import device_split_for, host_bytes_for
from batchinfer.model.layer_pieces import layers_of_rank
from batchinfer.model.memory_split import MemorySplit
from batchinfer.model.ops import Ops
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.page_format import PageFormat, block_tokens, check_kv
from batchinfer.model.streamed_weights import DeviceMemory
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_mode import computes_prompts_alone, split_for, streams_to_device
from batchinfer.model_code import model_code
from batchinfer.ownership import group_id
from batchinfer.parallel.mesh import Mesh
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.protocol.messages import ExpertSlots, Start
from batchinfer.rank.bucket_transfer import BucketTransfers
from batchinfer.rank.context import RankContext
from batchinfer.rank.drafter import Drafter
from batchinfer.rank.kv_budget import RESERVE_SHARE, KvBudget
from batchinfer.rank.stored_prefixes import StoredPrefixes
from batchinfer.rank.stored_states import StoredStates
from batchinfer.rank.worker import RankWorker
from batchinfer.records import ConfigError


class Bits(TypedDict, total=False):
    """Arguments of Ops for weights in fewer bits than rows."""

    eight_bit: bool
    four_bit: bool
    fp4_experts: bool


DTYPES = {name: torch.float32 if name == "float32" else torch.bfloat16 for name in VALUE_BYTES}
BITS: dict[str, Bits] = {
    "fp8": {"eight_bit": True},
    "int4": {"eight_bit": True, "four_bit": True},
    "fp4": {"eight_bit": True, "fp4_experts": True},
}


def load_model(
    job: JobConfig,
    mesh: Mesh,
    place: RankPlace,
    slots: ExpertSlots | None,
    device: torch.device,
    *,
    mtp: bool = False,
    most_tokens: int = 0,
    largest_tokens: int = 0,
    num_local_ranks: int = 1,
    before_weights: Callable[[], None] | None = None,
    on_read: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Load this rank's share of the model onto its device: all weights but the routed experts in other ranks' slots.

    Args:
        place: the rank's place; its role gives the largest number of rows that it sends at once.
        slots: the expert of each slot; None: in order.
        mtp: load the layer for multi-token prediction, too; only for a rank that holds all experts.
        most_tokens, largest_tokens, num_local_ranks: see Join; they split memory if weights are streamed.
        before_weights: called once backend, dtype and exchange are known to run here, before weights are read.
        on_read: called with the bytes of weights that were read so far, and with all bytes to read.

    Raises:
        ModelError: the weights do not fit the config or are damaged, or the backend cannot run here.
        ConfigError: the experts do not spread evenly over the ranks, or the exchange cannot run here.
    """
    folder, backend, dtype = Path(job.model.path), job.cluster.backend, DTYPES[job.model.dtype]
    bits = BITS.get(job.model.dtype, {})
    config = load_model_config(folder)
    check_kv(job, config)
    config.check_dtype(job.model.dtype)
    if not config.attention.cuts_anywhere and device.type != "cpu":
        raise ConfigError(f"{config.family} models run on CPUs alone; use ranks without a GPU")
    _check_ops(job, device)
    dispatchers = expert_ids = None
    if mesh.size > 1:
        placements = first_placements(job, config, slots, mesh)
        expert_ids = [placement.experts_of_rank(mesh.rank) for placement in placements]
        dispatchers = mesh.dispatchers(
            placements,
            _row_format(job, mesh, device),
            max_tokens=place.most_tokens(job.cluster),
            hidden=config.hidden_size,
            topk=config.num_experts_per_tok,
        )
    if before_weights is not None:
        before_weights()
    memory: MemorySplit | DeviceMemory | None = None
    if job.cluster.weights == "stream":
        known: dict[str, Any] = {}
        if most_tokens:
            known = {"most_tokens": most_tokens, "largest_tokens": largest_tokens}
        packed = read_packed(folder)
        if streams_to_device(job):
            device_bytes, host_bytes = bytes_for_weights(job, device)
            memory = partial(device_split_for, job, config, device_bytes=device_bytes, host_bytes=host_bytes, **known)
        else:
            assert packed is not None, "checked before ranks start"
            free_bytes = free_memory_bytes()
            mesh.agree([0])  # before other ranks of this host take their memory
            layers = layers_of_rank(packed, config, expert_ids)
            sizes = [layer.num_bytes for layer in layers]
            of_host = {"free_bytes": free_bytes, "num_local_ranks": num_local_ranks}
            memory = split_for(job, config, packed, layer_bytes=sizes, **of_host, **known)
    return Transformer.load(
        folder,
        dtype=dtype,
        dispatchers=dispatchers,
        expert_ids=expert_ids,
        device=device,
        backend=backend,
        mtp=mtp,
        on_read=on_read,
        fp8_pages=PageFormat.of(job).is_fp8,
        memory=memory,
        **bits,
    )


def bytes_for_weights(job: JobConfig, device: torch.device) -> tuple[int, int]:
    """Return the bytes of the device and of the host for a rank that streams its weights to the device.

    Raises:
        ConfigError: cluster.memory_bytes is more than is free.
    """
    host_bytes = host_bytes_for(job, free_memory_bytes())
    if device.type != "cuda":  # Triton's interpreter: a part of the host's memory is in the place of a GPU's
        return host_bytes // 2, host_bytes // 2
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * RESERVE_SHARE), host_bytes


def first_placements(job: JobConfig, config: ModelConfig, slots: ExpertSlots | None, mesh: Mesh) -> list[Placement]:
    """Return the placement of each MoE layer's experts at the start of a job.

    Args:
        slots: the expert of each slot; None: in order.
    """
    if config.n_routed_experts == 0:
        return []
    if slots is None:
        placement = Placement.in_order(config.n_routed_experts, mesh.size, job.cluster.redundant_experts)
        return [placement] * config.num_moe_layers
    return _placements(slots, config.n_routed_experts, mesh)


def _check_ops(job: JobConfig, device: torch.device) -> None:
    """Raise if the backend cannot run on this device, or not in 8 or 4 bits."""
    backend, dtype = job.cluster.backend, job.model.dtype
    ops = Ops.select(backend, DTYPES[dtype], device=device, **BITS.get(dtype, {}))
    try:
        ops.expert_format(torch.bfloat16, device)  # packs a value
    except RuntimeError as error:
        raise ConfigError(f"model.dtype is {dtype!r}, but backend {backend!r} cannot run it here: {error}") from error


def _row_format(job: JobConfig, mesh: Mesh, device: torch.device) -> RowFormat:
    """Return the format in which rows travel to the experts: FP8 if all ranks hold FP8 experts, else the model's dtype.

    Rounding to FP8 before or after the transfer gives the same bits, on one rank and on many. Weights in integers of 8
    and 4 bits round rows differently, so their rows travel in bfloat16.
    """
    dtype = job.model.dtype
    if dtype not in BITS:
        return RowFormat("float32" if dtype == "float32" else "bfloat16")
    ops = Ops.select(job.cluster.backend, DTYPES[dtype], device=device, **BITS[dtype])
    all_hold_fp8 = all(holds for (holds,) in mesh.agree([ops.holds_fp8(device)]))
    return RowFormat("fp8" if all_hold_fp8 else "bfloat16")


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank that has loaded its model, which it keeps from one job to the next."""

    place: RankPlace
    mesh: Mesh
    model: Transformer
    tokenizer: PromptTokenizer
    slots: ExpertSlots | None  # the expert of each slot at the start of every job; None: experts in order
    can_draft: bool  # with the model's layer for multi-token prediction

    @property
    def placement(self) -> int:
        """Number of the experts' placement at the start of every job."""
        return 0 if self.slots is None else self.slots.placement


def make_worker(
    job: JobConfig, rank: LoadedRank, start: Start, budget: KvBudget, transfers: Path | BucketTransfers | None
) -> RankWorker:
    """Allocate the KV pages and build this rank's worker.

    Args:
        transfers: where this rank puts KV for other hosts; None: all ranks are on one host.

    Raises:
        ConfigError: there is no memory for the pages.
    """
    cluster, model, mesh = job.cluster, rank.model, rank.mesh
    context = RankContext(
        model,
        rank.tokenizer,
        num_pages=budget.num_pages,
        num_slots=budget.num_slots,
        prefill_tokens=cluster.prefill_tokens,
        decode_requests=cluster.decode_requests,
        place=rank.place,
        mesh=mesh,
        transfer_bytes=budget.transfer_bytes,
        transfers=transfers,
        graphs_off=cluster.graphs == "off",
        # without experts no rows travel that computing could hide
        overlap=cluster.overlap if mesh.size > 1 and model.num_moe_layers > 0 and model.stream is None else False,
        traced=start.traced,
        reasoning=job.output.reasoning,
        continues=bool(job.input.continue_final_message),
        prompts_alone=(alone := computes_prompts_alone(job, model.config)),
        # if all requests run at once, spreading their beginnings gains nothing
        spreads_prompts=model.stream is not None
        and not alone
        and budget.num_pages < pages_for(start.most_tokens // cluster.num_ranks),
        placement=rank.placement,
    )

    def place_experts(slots: ExpertSlots) -> None:
        placements = _placements(slots, model.config.n_routed_experts, mesh)
        model.place_experts(Path(job.model.path), placements, mesh.rank)

    def open_prefixes(memory: KvMemory) -> StoredPrefixes:
        return _open_prefixes(job, model, memory, start)

    return RankWorker(
        context,
        place_experts=place_experts,
        open_prefixes=None if job.kv.dir is None else open_prefixes,
        drafter=Drafter.of(context) if rank.can_draft and cluster.drafts_tokens else None,
    )


def _open_prefixes(job: JobConfig, model: Transformer, memory: KvMemory, start: Start) -> StoredPrefixes:
    """Open the job's KV store for this rank."""
    form, tokens = model.ops.page_format(model.dtype), block_tokens(job, model.config)
    of_layers = isinstance(memory.pages, torch.Tensor)
    identity = KvIdentity(
        model=job.model.path,
        weights=start.model_digests["model.weights"],
        config=start.model_digests["model.config"],
        dtype=form.dtype,
        numerics=f"{_numerics(model)}, model code {model_code()}",
        salt=job.kv.salt,
        block_tokens=tokens,
        num_layers=model.config.num_hidden_layers,
        latent_dim=form.row_width(model.config),
        own_bytes=0 if of_layers else tokens // PAGE_TOKENS * memory.page_bytes,
    )
    store, wait_s = _open_store(job, identity, start), job.cluster.collective_seconds / 4
    if of_layers:
        return StoredPrefixes(store, memory, persist=job.kv.persist, reuse=job.kv.reuse, wait_s=wait_s)
    states = _open_store(job, identity.of_states(memory.stored_bytes), start)
    return StoredStates(store, states, memory, persist=job.kv.persist, reuse=job.kv.reuse, wait_s=wait_s)


def _open_store(job: JobConfig, identity: KvIdentity, start: Start) -> DiskStore:
    assert job.kv.dir is not None
    return DiskStore(
        Path(job.kv.dir),
        identity,
        max_bytes=job.kv.max_bytes,
        gid=group_id(job.kv.shared_group, "kv.shared_group"),
        bucket=None if job.kv.second_tier is None else Bucket(job.kv.second_tier, job.s3, attempts=TIER_ATTEMPTS),
        run=start.run_id,
    )


def _numerics(model: Transformer) -> str:
    """Return the name of the arithmetic behind a latent's bits: C++ sources, or processor, library and kernels."""
    if model.device.type == "cuda":
        gpu = f"{torch.cuda.get_device_name(model.device)}, CUDA {torch.version.cuda}"
        return f"{gpu}, torch {torch.__version__}, {model.kernels}"
    if model.ops.has_fixed_sums:
        return model.kernels
    instructions = torch.backends.cpu.get_cpu_capability()
    mode = f", MKL_CBWR={matrix_library_mode()}" if matrix_library_mode() else ""
    return f"{processor_kind()} {instructions}, torch {torch.__version__}{mode}, {model.kernels}"


def _placements(slots: ExpertSlots, num_experts: int, mesh: Mesh) -> list[Placement]:
    return Placement.of_layers(slots.expert_of_slot, slots.share_of_slot, num_experts, mesh.size)
