"""The check of `doctor --model`: whether a model folder runs on this machine, in which dtypes, with how much memory.

The folder is checked as a job checks it: config.json, names and shapes of all tensors, tokenizer and chat template. No
weight is read. Memory is computed for one rank on the host's processor, or on its first GPU.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from batchinfer.config import PAGE_TOKENS, VALUE_BYTES, ClusterConfig, JobConfig
from batchinfer.data.encoders import Encoders
from batchinfer.data.tokenizer import chat_template_names, has_chat_template
from batchinfer.host_info import free_memory_bytes
from batchinfer.kv.pages import pages_for
from batchinfer.launch.host_memory import measured_forecast
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.memory_split import MemorySplit
from batchinfer.model.ops import Ops
from batchinfer.model.packed_folder import PackedFolder, read_packed
from batchinfer.model.page_format import PageFormat
from batchinfer.model.stream_forecast import JobTokens
from batchinfer.model.tensor_names import check_tensors
from batchinfer.model.weight_bytes import rank_bytes, weight_bytes
from batchinfer.model.weight_mode import split_for
from batchinfer.plan.first_dtype import choose_dtype, this_machine
from batchinfer.rank.kv_budget import MEMORY_SHARE, RESERVE_SHARE
from batchinfer.rank.load import BITS, DTYPES
from batchinfer.records import BatchinferError, ConfigError
from batchinfer.sanitize import size_text

REQUEST_TOKENS = 4096  # prompt and output of the request whose KV is counted; less where the model's window is less


@dataclass(frozen=True, slots=True)
class SweepSpeeds:
    """Speeds of a model whose weights are streamed, half of each request prompt and half of it answer.

    seconds: of a sweep that gives every running request a token.
    prompt_tokens_per_s, output_tokens_per_s: of products alone.
    """

    disk_bytes_per_s: float
    seconds: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DtypeFit:
    """A dtype of a model on this machine.

    reason: why no rank here can run the model in this dtype; None: one can.
    ranks_needed: the least number of ranks, on machines like this one, whose shares of the experts fit; None where one
        suffices or experts are not what is too large.
    requests_at_once: requests of `request_tokens` that fit into KV memory, at most as many as a rank decodes together.
    sweep_bytes: of a converted folder that does not fit: weights that are read from its disk for each sweep; else 0.
    sweep: then, speeds as measured here; else None.
    """

    reason: str | None
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int  # of a request, besides its KV tokens; 0: none
    kv_tokens: int
    requests_at_once: int
    ranks_needed: int | None
    sweep_bytes: int = 0
    sweep: SweepSpeeds | None = None


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A model folder that can be read, on this machine. `dtypes` has every dtype of a job.

    has_chat_template: whether there is a template for chats without tools.
    chat_templates: the names of all templates.
    """

    model: str
    model_type: str
    layers: int
    routed_experts: int
    window_tokens: int
    has_chat_template: bool
    chat_templates: tuple[str, ...]
    unknown_keys: tuple[str, ...]
    device: str
    free_bytes: int
    request_tokens: int
    dtypes: dict[str, DtypeFit]
    dtype: str
    dtype_reason: str

    @property
    def runs(self) -> bool:
        """Whether the model runs here in one dtype at least."""
        return any(fit.reason is None for fit in self.dtypes.values())

    def as_json(self) -> dict[str, Any]:
        """Return the check as an object for --json."""
        reason = None if self.runs else "no dtype runs on this machine"
        return {"runs": self.runs, "reason": reason, **asdict(self)}


def check_model(folder: Path) -> ModelCheck:
    """Check a model folder on this machine.

    Raises:
        ModelError: the folder cannot be used at all, with the reason.
    """
    config, packed = load_model_config(folder), read_packed(folder)
    if packed is None:
        check_tensors(read_headers(folder, config.carrier), config)
    has_template = _check_tokenizer(folder, config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        free, for_kv = free_memory_bytes(), MEMORY_SHARE
    else:
        free, total = torch.cuda.mem_get_info(device)
        free, for_kv = free - int(total * RESERVE_SHARE), 1.0
    request_tokens = min(REQUEST_TOKENS, config.max_position_embeddings)
    dtypes = {}
    for dtype in VALUE_BYTES:
        needed = rank_bytes(config, dtype)
        cannot_run = _reason(config.check_dtype if packed is None else packed.check, dtype)
        cannot_run = cannot_run or _reason(_check_kernels, dtype, device)
        reason, ranks, split = cannot_run, None, None
        if cannot_run is None and needed > free and packed is not None and not packed.for_gpus and device.type == "cpu":
            split = _split(folder, dtype, config, packed, free, request_tokens)
        if cannot_run is None and needed > free and split is None:
            reason = f"one rank needs {size_text(needed)}, but {size_text(free)} is free"
            ranks = _ranks_needed(config, dtype, free)
        kv_bytes = PageFormat("float32" if dtype == "float32" else "bfloat16").bytes_per_token(config)
        bytes_for_kv = int(max(0, free - needed) * for_kv) if split is None else split.kv_bytes
        most = ClusterConfig(weights="resident" if split is None else "stream").running_requests
        state_bytes = config.attention.state_bytes(4 if dtype == "float32" else 2)
        request_bytes = state_bytes + pages_for(request_tokens) * PAGE_TOKENS * kv_bytes
        num_states = most if split is None else min(most, bytes_for_kv // request_bytes)
        num_pages = max(0, bytes_for_kv - num_states * state_bytes) // (kv_bytes * PAGE_TOKENS)
        at_once = min(most, num_pages // pages_for(request_tokens)) if reason is None else 0
        dtypes[dtype] = DtypeFit(
            reason=reason,
            weight_bytes=weight_bytes(config, dtype),
            kv_bytes_per_token=kv_bytes,
            state_bytes=state_bytes,
            kv_tokens=num_pages * PAGE_TOKENS if reason is None else 0,
            requests_at_once=at_once,
            ranks_needed=ranks,
            sweep_bytes=0 if split is None else split.sweep_bytes,
            sweep=None if split is None else _sweep_speeds(folder, dtype, split, max(1, at_once), request_tokens),
        )
    dtype, why = choose_dtype(folder, replace(this_machine(), free_bytes=free))
    if dtypes[dtype].reason is not None and (running := [name for name, fit in dtypes.items() if fit.reason is None]):
        dtype, why = running[0], "the widest that runs here"
    return ModelCheck(
        model=str(folder),
        model_type=config.family,
        layers=config.num_hidden_layers,
        routed_experts=config.n_routed_experts,
        window_tokens=config.max_position_embeddings,
        has_chat_template=has_template,
        chat_templates=chat_template_names(folder),
        unknown_keys=config.unknown_keys,
        device=device.type,
        free_bytes=free,
        request_tokens=request_tokens,
        dtypes=dtypes,
        dtype=dtype,
        dtype_reason=why,
    )


def model_text(check: ModelCheck) -> str:
    """Return the check in sentences."""
    experts = f"{check.routed_experts} routed experts" if check.routed_experts else "no experts"
    where = "on this host" if check.device == "cpu" else "on the first GPU"
    lines = [
        f"{check.model} {'runs' if check.runs else 'does not run'} here.",
        f"It is a model of type {check.model_type} with {check.layers} layers, {experts}, a window of "
        f"{check.window_tokens:,} tokens, and {_template_sentence(check)}.",
        f"{size_text(check.free_bytes)} is free {where}; "
        f"requests are counted with {check.request_tokens:,} tokens each.",
        "",
        *(f"  {name:<9} {_sentence(fit, check.device)}" for name, fit in check.dtypes.items()),
    ]
    if check.runs:
        lines += ["", f'Use model.dtype = "{check.dtype}": {check.dtype_reason}.']
    if check.unknown_keys:
        lines += ["", f"Keys of config.json that are not known and not used: {', '.join(check.unknown_keys)}."]
    return "\n".join(lines)


def _template_sentence(check: ModelCheck) -> str:
    if check.has_chat_template:
        return "a chat template"
    if not check.chat_templates:
        return "no chat template, so it takes prompts but no messages"
    names, with_tools = ", ".join(check.chat_templates), "tool_use" in check.chat_templates
    return (
        f"chat templates called {names} but none called default, so it takes prompts and "
        f"{'messages only with tools' if with_tools else 'no messages'}; "
        "to take all messages, write the text of the template to use to chat_template.jinja"
    )


def _sentence(fit: DtypeFit, device: str) -> str:
    sizes = f"weights {size_text(fit.weight_bytes)}, KV {fit.kv_bytes_per_token:,} bytes per token"
    if fit.state_bytes:
        sizes += f" and {size_text(fit.state_bytes)} per request"
    if fit.sweep is not None:
        sweep = fit.sweep
        sizes += (
            f", of which {size_text(fit.sweep_bytes)} are read from disk in each sweep (cluster.weights), "
            f"{sweep.seconds:,.1f} s at {size_text(round(sweep.disk_bytes_per_s))}/s: "
            f"{fit.requests_at_once / sweep.seconds:,.3g} output tokens/s, where products alone would give "
            f"{sweep.output_tokens_per_s:,.3g}, and {sweep.prompt_tokens_per_s:,.3g} prompt tokens/s"
        )
    if fit.reason is None:
        return f"runs: {sizes}, memory for {fit.kv_tokens:,} tokens, {fit.requests_at_once} requests at once"
    spread = ""
    if fit.ranks_needed is not None:
        spread = f"; it fits on {fit.ranks_needed} {'hosts' if device == 'cpu' else 'GPUs'} like this one"
    return f"does not run: {fit.reason} ({sizes}){spread}"


def _check_tokenizer(folder: Path, config: ModelConfig) -> bool:
    """Check tokenizer and chat template with trial rows, as a job does; return whether there is a template.

    Raises:
        ModelError: a file is missing or not valid, or the trial rows cannot be encoded.
    """
    source = "user" if has_chat_template(folder) else "prompt"
    with Encoders(_trial_job(folder, source), window=config.max_position_embeddings) as encoders:
        return encoders.has_chat_template


def _trial_job(folder: Path, source: str, *, max_tokens: int = 1, **parts: dict[str, Any]) -> JobConfig:
    """Return a job over the model; `source` is the key of the input column."""
    job: dict[str, Any] = {
        "input": {"files": ["rows.parquet"], source: "text"},
        "output": {"dir": "run"},
        "model": {"path": str(folder), **parts.pop("model", {})},
        "sampling": {"max_tokens": max_tokens},
    }
    return JobConfig.model_validate(job | parts)


def _split(
    folder: Path, dtype: str, config: ModelConfig, packed: PackedFolder, free: int, request_tokens: int
) -> MemorySplit | None:
    """Return the memory of a rank that streams the weights of a converted folder; None if it does not suffice."""
    parts = {"model": {"dtype": dtype}, "cluster": {"weights": "stream"}}
    job = _trial_job(folder, "prompt", max_tokens=REQUEST_TOKENS, **parts)
    try:
        return split_for(job, config, packed, free_bytes=free, largest_tokens=request_tokens)
    except ConfigError:
        return None


def _sweep_speeds(
    folder: Path, dtype: str, split: MemorySplit, at_once: int, request_tokens: int
) -> SweepSpeeds | None:
    """Measure disk and products of a folder whose weights are streamed; None if that would take longer than its job."""
    half = max(1, request_tokens // 2)
    parts: dict[str, Any] = {"model": {"dtype": dtype}, "cluster": {"weights": "stream"}}
    job = _trial_job(folder, "prompt", max_tokens=max(2, half), **parts)
    of_halves = at_once * half
    tokens = JobTokens(at_once, of_halves, of_halves, of_halves, half, at_once * request_tokens)
    found = measured_forecast(job, split, tokens)
    if found.speeds is None:
        return None
    return SweepSpeeds(found.disk_bytes_per_s, found.answer_sweep_s, *astuple(found.speeds))


def _check_kernels(dtype: str, device: torch.device) -> None:
    Ops.select("auto", DTYPES[dtype], device=device, **BITS.get(dtype, {})).expert_format(
        torch.bfloat16, device
    )  # packs


def _reason(check: Any, *arguments: Any) -> str | None:
    """Return the error sentence of a check, None if it finds nothing."""
    try:
        check(*arguments)
    except (BatchinferError, RuntimeError) as error:
        return str(error)
    return None


def _ranks_needed(config: ModelConfig, dtype: str, free: int) -> int | None:
    """Return the least number of ranks that share the experts evenly and fit into `free` bytes each."""
    num_experts = config.n_routed_experts
    return next(
        (
            count
            for count in range(2, num_experts + 1)
            if num_experts % count == 0 and rank_bytes(config, dtype, num_experts=num_experts // count) <= free
        ),
        None,
    )
