"""A stand-in for the library deep_ep, which runs on GPUs only: its names and signatures, with threads for ranks.

Signatures are those of DeepEP 2.1.0 (deep_ep/buffers/elastic.py and legacy.py), so that a wrong keyword is a TypeError
here as well. Rows really travel between the ranks. What would be garbage or a hang on a GPU is NaN or an assertion:
results are NaN until the event is waited for or the hook is called, and so is all that no rank has sent. Sizes that the
library's kernels refuse are assertions, too.
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

import torch

from batchinfer_kernels import reference

topk_idx_t = torch.int64

LOW_LATENCY_HIDDEN = {2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192}  # csrc/kernels/legacy/launch.cuh SWITCH_HIDDEN
# deep_ep/buffers/legacy.py get_dispatch_config, and 1: tests have groups of one rank, the product has none
NORMAL_RANKS = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160}
HOST_RANKS = 8


class Call(NamedTuple):
    rank: int
    name: str
    arguments: dict


class World:
    """The meeting point of the ranks: each posts a value per step and takes the values of all."""

    def __init__(self, size):
        self.size = size
        self.calls = []
        self._posts = {}
        self._changed = threading.Condition()

    def names(self, rank=0):
        return [call.name for call in self.calls if call.rank == rank]

    def arguments(self, name, rank=0):
        return [call.arguments for call in self.calls if (call.rank, call.name) == (rank, name)]

    def post(self, step, rank, value):
        with self._changed:
            self._posts.setdefault(step, {})[rank] = value
            self._changed.notify_all()

    def collect(self, step):
        with self._changed:
            posts = self._posts.setdefault(step, {})
            assert self._changed.wait_for(lambda: len(posts) == self.size, timeout=30), f"a rank is missing at {step}"
            return [posts[rank] for rank in range(self.size)]


@dataclass(frozen=True)
class Group:
    """The part of a torch.distributed group that DeepEP's caller uses."""

    world: World
    index: int

    def rank(self):
        return self.index

    def size(self):
        return self.world.size

    def allreduce(self, tensors):
        self.world.calls.append(Call(self.index, "allreduce", {"tensors": tensors}))
        return SimpleNamespace(wait=lambda: None)


def recorded(method):
    """Bind the arguments as Python would, note the call, and make it."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        group = bound.arguments["group"] if method.__name__ == "__init__" else self.group
        name = type(self).__name__ if method.__name__ == "__init__" else method.__name__
        arguments = {key: value for key, value in bound.arguments.items() if key != "self"}
        group.world.calls.append(Call(group.rank(), name, arguments))
        return method(self, **arguments)

    return call


class Arrival:
    """Fills the results in, once: as an event (`current_stream_wait`) or as a hook (call)."""

    def __init__(self, group, fill):
        self._group, self._fill, self.arrived = group, fill, False

    def current_stream_wait(self, release_handle=False):
        self._arrive("current_stream_wait")

    def __call__(self):
        self._arrive("hook")

    def _arrive(self, name):
        self._group.world.calls.append(Call(self._group.rank(), name, {}))
        if not self.arrived:
            self.arrived = True
            self._fill()


@dataclass
class Entry:
    """One (token, k) of some rank, on its way to a slot of this one."""

    slot: int
    source: int
    token: int
    k: int


@dataclass
class Handle:
    entries: list[Entry]
    num_tokens: int
    psum_num_recv_tokens_per_expert: torch.Tensor | None = None
    tokens: list[tuple[int, int] | None] = field(default_factory=list)


def unknown(*shape, dtype=torch.bfloat16):
    return torch.full(shape, torch.nan).to(dtype) if dtype.is_floating_point else torch.full(shape, -7, dtype=dtype)


def gather(sent, places):
    """Rows of all ranks' tensors (or pairs of them) at (rank, token) places."""
    if isinstance(sent[0], tuple):
        return tuple(gather(list(parts), places) for parts in zip(*sent, strict=True))
    rows = [sent[rank][token] for rank, token in places]
    return torch.stack(rows) if rows else sent[0][:0]


def check_rows(x, topk_idx, topk_weights=None):
    values, scales = x if isinstance(x, tuple) else (x, None)
    assert values.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
    assert values.is_contiguous()
    assert scales is None or (scales.dtype == torch.float32 and scales.shape == (len(values), values.shape[1] // 128))
    assert topk_idx.dtype == topk_idx_t
    assert topk_idx.is_contiguous()
    assert len(topk_idx) == len(values)
    if topk_weights is not None:
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        assert topk_weights.shape == topk_idx.shape


def check_normal_row(values, num_ranks):
    """The shared memory of a warp holds a row between hosts, half a row within one."""
    row_bytes, is_one_host = values.shape[1] * values.element_size(), num_ranks <= HOST_RANKS
    assert row_bytes % 32 == 0
    assert row_bytes // 2 + 8 <= 8192 if is_one_host else row_bytes + 8 <= 16384
    assert is_one_host or values.shape[1] % 256 == 0


class _Ranks:
    """The state that all buffers share."""

    group: Group

    def _step(self):
        self._num_steps = getattr(self, "_num_steps", 0) + 1
        return (type(self).__name__, self._num_steps)

    def _entries(self, sent_ids, num_experts):
        """The entries for this rank's slots, by slot."""
        num_local = num_experts // self.group.size()
        first = num_local * self.group.rank()
        found = [
            Entry(slot - first, source, token, k)
            for source, ids in enumerate(sent_ids)
            for token, row in enumerate(ids.tolist())
            for k, slot in enumerate(row)
            if first <= slot < first + num_local
        ]
        return sorted(found, key=lambda entry: entry.slot)

    def _sum_back(self, handle, x, num_tokens):
        """Post partial sums per (source, token), rounded as on the wire; the returned arrival adds up this rank's."""
        step, rank = self._step(), self.group.rank()
        partial = {}
        for place, row in zip(handle.tokens, x.float(), strict=True):
            if place is not None:  # a row between those of two slots
                partial[place] = partial.get(place, 0) + row
        self.group.world.post(step, rank, {place: row.bfloat16() for place, row in partial.items()})
        sums = unknown(num_tokens, x.shape[1])

        def fill():
            total = torch.zeros(sums.shape)
            for parts in self.group.world.collect(step):
                for (source, token), row in parts.items():
                    if source == rank:
                        total[token] += row.float()
            sums.copy_(total)

        return sums, Arrival(self.group, fill)


class ElasticBuffer(_Ranks):
    @recorded
    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        assert hidden % 256 == 0, "Invalid hidden"
        assert num_topk <= 32, "Too many top-k selections"
        self.group, self.num_max_tokens_per_rank = group, num_max_tokens_per_rank

    @recorded
    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        assert do_expand
        assert async_with_compute_stream
        assert num_experts // self.group.size() <= 256
        check_rows(x, topk_idx, topk_weights)
        assert len(topk_idx) <= (num_max_tokens_per_rank or self.num_max_tokens_per_rank)
        step = self._step()
        self.group.world.post(step, self.group.rank(), (x, topk_idx, topk_weights))
        all_x, all_ids, all_weights = zip(*self.group.world.collect(step), strict=True)
        entries = self._entries(all_ids, num_experts)
        random.shuffle(entries)  # rows of a slot come in any order
        entries.sort(key=lambda entry: entry.slot)
        rows = gather(list(all_x), [(entry.source, entry.token) for entry in entries])
        is_pair, num_local = isinstance(rows, tuple), num_experts // self.group.size()
        # each slot's rows begin at a multiple of the alignment
        step, places, ends, start = expert_alignment or 1, [], [], 0
        for slot in range(num_local):
            count = sum(entry.slot == slot for entry in entries)
            places += range(start, start + count)
            ends.append(start + count)
            start += -(-count // step) * step
        received = [unknown(start, part.shape[1], dtype=part.dtype) for part in (rows if is_pair else (rows,))]
        if is_pair and use_tma_aligned_col_major_sf:  # each column of scales starts at a multiple of 4
            by_column = unknown(received[1].shape[1], -(-start // 4) * 4, dtype=received[1].dtype)
            received[1] = by_column[:, :start].t()
        weights, psum = unknown(start, dtype=torch.float32), unknown(num_local, dtype=torch.int32)

        def fill():
            for part, values in zip(received, rows if is_pair else (rows,), strict=True):
                for place, row in zip(places, values, strict=True):
                    part[place] = row
            for place, entry in zip(places, entries, strict=True):
                weights[place] = all_weights[entry.source][entry.token, entry.k]
            psum.copy_(torch.tensor(ends))

        tokens = [None] * start
        for place, entry in zip(places, entries, strict=True):
            tokens[place] = entry.source, entry.token
        handle = Handle(entries, len(topk_idx), psum, tokens)
        return tuple(received) if is_pair else received[0], None, weights, handle, Arrival(self.group, fill)

    @recorded
    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        """Sums WITHOUT weights: topk_weights only travel along (impls/combine_utils.cuh has none)."""
        assert async_with_compute_stream
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        sums, event = self._sum_back(handle, x, handle.num_tokens)
        return sums, None, event


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 1000 * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer(_Ranks):
    @recorded
    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ):
        assert group.size() < HOST_RANKS or group.size() % HOST_RANKS == 0
        self.group, self.low_latency_mode, self._last = group, low_latency_mode, None

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in NORMAL_RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        return 2 * num_max_dispatch_tokens_per_rank * hidden * num_experts

    @recorded
    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        size = self.group.size()
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        is_in_rank = torch.zeros(len(topk_idx), size, dtype=torch.bool)
        is_in_rank.scatter_(1, topk_idx.long() // (num_experts // size), True)
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, Arrival(self.group, lambda: None)

    @recorded
    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert expert_alignment == 1
        assert async_finish
        assert not self.low_latency_mode
        check_rows(x, topk_idx, topk_weights)
        assert num_tokens_per_rank.shape == (self.group.size(),)
        assert is_token_in_rank.shape == (len(topk_idx), self.group.size())
        assert topk_idx.shape[1] <= 32
        assert len(num_tokens_per_expert) // self.group.size() <= 1024
        check_normal_row(x[0] if isinstance(x, tuple) else x, self.group.size())
        num_experts, step = len(num_tokens_per_expert), self._step()
        self.group.world.post(step, self.group.rank(), (x, topk_idx, topk_weights))
        all_x, all_ids, all_weights = zip(*self.group.world.collect(step), strict=True)
        entries = self._entries(all_ids, num_experts)
        tokens = sorted({(entry.source, entry.token) for entry in entries})
        rows = gather(list(all_x), tokens)
        is_pair = isinstance(rows, tuple)
        received = [unknown(*part.shape, dtype=part.dtype) for part in (rows if is_pair else (rows,))]
        ids = unknown(len(tokens), topk_idx.shape[1], dtype=topk_idx_t)
        weights = unknown(len(tokens), topk_idx.shape[1], dtype=torch.float32)

        def fill():
            for part, values in zip(received, rows if is_pair else (rows,), strict=True):
                part.copy_(values)
            ids.fill_(-1)
            for e in entries:  # the weights of other ranks' slots stay NaN: they must not be used
                place = tokens.index((e.source, e.token))
                ids[place, e.k] = e.slot
                weights[place, e.k] = all_weights[e.source][e.token, e.k]

        num_local = num_experts // self.group.size()
        counts = [sum(e.slot == slot for e in entries) for slot in range(num_local)]
        handle = Handle(entries, len(topk_idx), tokens=tokens)
        event = Arrival(self.group, fill)
        return tuple(received) if is_pair else received[0], ids, weights, counts, handle, event

    @recorded
    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        """Sums WITHOUT weights."""
        assert async_finish
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        sums, event = self._sum_back(handle, x, handle.num_tokens)
        return sums, None, event

    @recorded
    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        assert self.low_latency_mode
        assert return_recv_hook
        assert not async_finish
        check_rows(x, topk_idx)
        assert x.shape[1] in LOW_LATENCY_HIDDEN, "Unsupported hidden"
        assert topk_idx.shape[1] <= 11
        assert len(x) <= num_max_dispatch_tokens_per_rank
        sent = reference.quantize_fp8_block(x, (1, 128)) if use_fp8 else x
        num_local, room = num_experts // self.group.size(), self.group.size() * num_max_dispatch_tokens_per_rank
        assert room % 128 == 0, "DeepGEMM's tiles"
        step, hidden = self._step(), x.shape[1]
        self.group.world.post(step, self.group.rank(), (sent, topk_idx))
        values = unknown(num_local, room, hidden, dtype=torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
        scales = unknown(num_local, hidden // 128, room, dtype=torch.float32).transpose(1, 2)
        counts, handle = unknown(num_local, dtype=torch.int32), Handle([], len(x))

        def fill():
            all_sent, all_ids = zip(*self.group.world.collect(step), strict=True)
            handle.entries = self._entries(all_ids, num_experts)
            counts.zero_()
            for e in handle.entries:
                row = int(counts[e.slot])
                if use_fp8:
                    values[e.slot, row] = all_sent[e.source][0][e.token]
                    scales[e.slot, row] = all_sent[e.source][1][e.token]
                else:
                    values[e.slot, row] = all_sent[e.source][e.token]
                counts[e.slot] += 1

        hook = self._start(fill)
        return (values, scales) if use_fp8 else values, counts, handle, None, hook

    @recorded
    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        use_logfmt=False,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
        combine_wait_recv_cost_stats=None,
    ):
        """Sums WITH weights, in the order of k."""
        assert return_recv_hook
        assert not async_finish
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        check_rows(x[0, : len(topk_idx)], topk_idx, topk_weights)
        rank, step, next_row = self.group.rank(), self._step(), {}
        answers = {}
        for e in handle.entries:
            row = next_row[e.slot] = next_row.get(e.slot, -1) + 1
            answers[e.source, e.token, e.k] = x[e.slot, row]
        self.group.world.post(step, rank, answers)
        sums = unknown(len(topk_idx), x.shape[2])

        def fill():
            answers = {key: row for part in self.group.world.collect(step) for key, row in part.items()}
            total = torch.zeros(sums.shape)
            for token, weights in enumerate(topk_weights):
                for k, weight in enumerate(weights):
                    if topk_idx[token, k] >= 0:  # a slot of -1: sent nowhere
                        total[token] += weight * answers[rank, token, k].float()
            sums.copy_(total)

        return sums, None, self._start(fill)

    def _start(self, fill):
        assert self._last is None or self._last.arrived, (
            "the call before has not been received: on a GPU its arrival flags are cleared now and it waits forever"
        )
        self._last = Arrival(self.group, fill)
        return self._last
