"""Seconds of operations as NVIDIA measured them: tables that the optional package `aiconfigurator-core` ships.

Tables are read in place (Parquet), nothing of them is in this project. Times are interpolated as powers of rows,
lengths and widths.
"""

# M rows of a product, N x K weight

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Engine = Literal["sglang", "trtllm", "vllm"]
Weights = Literal["fp8", "fp4"]
SYSTEMS = {
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
}
PACKAGE = "aiconfigurator_core"
HINT = "pip install 'batchinfer[tables]'"
# experts' loads of the tables: the busiest GPU's time without balancing, and the time of equal loads
UNBALANCED, BALANCED = "power_law_1.01", "balanced"
# a tree of sorted axes ends in the logarithm of seconds
Tree = dict[float, Any]


def systems_folder() -> Path | None:
    """Return the folder of the package's tables; None if it is not installed."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "systems"


@cache
def measured_rates(
    gpu: str, engine: Engine = "sglang", *, is_balanced: bool = True, weights: Weights = "fp8"
) -> "MeasuredRates | None":
    """Return the measurements of a GPU; None if the package is not installed or does not have the GPU."""
    systems = systems_folder()
    if systems is None or gpu not in SYSTEMS:
        return None
    loads = BALANCED if is_balanced else UNBALANCED
    return MeasuredRates(systems / "data" / SYSTEMS[gpu], engine, loads, weights)


@dataclass(frozen=True, eq=False)
class MeasuredRates:
    """The tables of one GPU as one engine's kernels filled them. Returned are seconds; None: no table has the shape."""

    folder: Path
    engine: Engine
    loads: str = BALANCED  # of the experts
    # "fp4" as NVIDIA's R1-FP4-v2: NVFP4 in experts, dense layers and output projections, BF16 in other projections
    weights: Weights = "fp8"

    @property
    def source(self) -> str:
        """The tables by name."""
        return f"aiconfigurator-core, {self.folder.name}, kernels of {self.engine}"

    def weights_dtype(self, *, has_fp4: bool) -> str:
        """Return the dtype of a product with weights in the tables' words.

        Args:
            has_fp4: whether FP4 checkpoints have these weights in FP4.
        """
        return "fp8_block" if self.weights == "fp8" else "nvfp4" if has_fp4 else "bfloat16"

    def product_s(self, rows: float, n: int, k: int, *, dtype: str = "fp8_block") -> float | None:
        """Return the seconds of a product [rows, k] x [k, n]."""
        tree = self._products.get(dtype)
        return None if tree is None else _interpolated(tree, (n, k, rows))

    def experts_s(
        self, rows: float, slots: float, hidden: int, width: int, *, experts: int, topk: int, masked: bool
    ) -> float | None:
        """Return the seconds of one GPU's routed experts, activation included.

        Args:
            rows: mean rows of an expert.
            slots: experts on the GPU.
            masked: as in decode, else as in prefill; only SGLang's kernels are different.
        """
        tree = self._experts(hidden, width, experts, topk, masked)
        return None if tree is None else _interpolated(tree, (slots, rows))

    def decode_attention_s(self, requests: float, kv_tokens: float, heads: int, *, is_fp8: bool) -> float | None:
        """Return the seconds of latent attention in its absorbed form.

        Args:
            kv_tokens: of one request.
        """
        tree = self._latent("generation", heads, is_fp8)
        return None if tree is None else _interpolated(tree, (kv_tokens, requests))

    def prefill_attention_s(self, prompt_tokens: float, heads: int) -> float | None:
        """Return the seconds of latent attention in its plain form of one prompt."""
        tree = self._latent("context", heads, False)
        return None if tree is None else _interpolated(tree, (prompt_tokens, 1.0))

    def absorb_s(self, rows: float, heads: int) -> tuple[float, float] | None:
        """Return the seconds of the products per head that absorb queries, and that expand values."""
        trees = [self._absorb(name, heads) for name in ("mla_gen_pre", "mla_gen_post")]
        if trees[0] is None or trees[1] is None:
            return None
        return _interpolated(trees[0], (rows,)), _interpolated(trees[1], (rows,))

    def exchange_s(
        self, tokens: float, hidden: int, topk: int, experts: int, ep_size: int
    ) -> tuple[float, float] | None:
        """Return the seconds of dispatch and combine of decode.

        In a rack of NVLink: NVIDIA's all-to-all. Elsewhere DeepEP's kernels of low latency; with the engine
        TensorRT-LLM all-gather and reduce-scatter of all GPUs' rows in BF16, its default without such a rack.

        Args:
            tokens: per GPU.
        """
        if self.engine == "trtllm" and not self._is_rack:
            trees, size = self._collectives, tokens * ep_size * hidden
        else:
            trees, size = self._exchange(hidden, topk, experts), tokens
        if trees is None or ep_size > max(trees[0]):
            return None
        return _interpolated(trees[0], (ep_size, size)), _interpolated(trees[1], (ep_size, size))

    @cached_property
    def kernel_s(self) -> float:
        """The shortest product of the tables: the least that a kernel of a captured graph takes."""
        return exp(min(_leaves(self._products["bfloat16"])))

    @cached_property
    def _products(self) -> dict[str, Tree]:
        found = self._newest("gemm", "gemm_perf", None)
        if found is None:
            return {}
        names = pc.unique(found["gemm_dtype"]).to_pylist()
        return {
            name: _tree(found.filter(pc.field("gemm_dtype") == name), ("n", "k", "m"), "latency", 1e-3)
            for name in names
        }

    @cache  # noqa: B019  (as long-lived as the tables)
    def _experts(self, hidden: int, width: int, experts: int, topk: int, masked: bool) -> Tree | None:
        shape = (
            (pc.field("hidden_size") == hidden)
            & (pc.field("inter_size") == width)
            & (pc.field("num_experts") == experts)
            & (pc.field("topk") == topk)
            & (pc.field("moe_tp_size") == 1)
            & (pc.field("moe_dtype") == self.weights_dtype(has_fp4=True))
            & pc.field("distribution").isin([UNBALANCED] if self.loads == UNBALANCED else [BALANCED, "uniform"])
        )
        # DeepGEMM's products behind DeepEP, as in this package
        found = self._newest("moe", f"wideep_{'generation' if masked else 'context'}_moe_perf", shape)
        if found is None:
            found = self._newest("moe", "moe_perf", shape)
        if found is None:
            return None
        if self.weights == "fp4":
            found = found.sort_by("latency")  # an engine has several FP4 kernels, and takes the fastest
        slots = pc.divide(pa.scalar(float(experts)), pc.cast(found["moe_ep_size"], pa.float64()))
        rows = pc.multiply(pc.cast(found["num_tokens"], pa.float64()), topk / experts)
        return _tree(
            found.append_column("slots", slots).append_column("rows", rows), ("slots", "rows"), "latency", 1e-3
        )

    @cache  # noqa: B019
    def _latent(self, phase: str, heads: int, is_fp8: bool) -> Tree | None:
        shape = (pc.field("num_heads") == heads) & (pc.field("kv_cache_dtype") == ("fp8" if is_fp8 else "bfloat16"))
        found = self._newest("mla", f"{phase}_mla_perf", shape)
        if found is None:
            return None
        tokens = pc.cast(pc.add(found["isl"], found["step"]), pa.float64())
        return _tree(found.append_column("tokens", tokens), ("tokens", "batch_size"), "latency", 1e-3)

    @cache  # noqa: B019
    def _absorb(self, name: str, heads: int) -> Tree | None:
        shape = (pc.field("num_heads") == heads) & (pc.field("op_name") == name) & (pc.field("bmm_dtype") == "bfloat16")
        found = self._newest("mla_bmm", "mla_bmm_perf", shape)
        return None if found is None else _tree(found, ("num_tokens",), "latency", 1e-3)

    @cache  # noqa: B019
    def _exchange(self, hidden: int, topk: int, experts: int) -> tuple[Tree, Tree] | None:
        shape = (pc.field("hidden_size") == hidden) & (pc.field("num_experts") == experts)
        if self._is_rack:
            rack = self._newest("comm", "trtllm_alltoall_perf", shape & (pc.field("topk") == topk), engine="trtllm")
            if rack is None:
                return None
            of_dtype = rack.filter(
                (pc.field("kernel_source") == "NVLinkTwoSided")
                & (pc.field("moe_dtype") == "fp8")
                & (pc.field("distribution") == BALANCED)
            )
            trees = [
                _tree(of_dtype.filter(pc.field("op_name") == name), ("moe_ep_size", "num_tokens"), "latency", 1e-3)
                for name in ("alltoall_prepare", "alltoall_dispatch", "alltoall_combine")
            ]
            return _summed(trees[0], trees[1]), trees[2]
        found = self._newest(
            "comm", "wideep_deepep_ll_perf", shape & (pc.field("num_topk") == topk), engine="sglang", all_versions=True
        )
        if found is None:
            return None
        sizes = pc.multiply(pc.cast(found["node_num"], pa.float64()), 8.0)
        found = found.append_column("gpus", sizes)
        return (
            _tree(found, ("gpus", "num_token"), "dispatch_avg_t_us", 1e-6),
            _tree(found, ("gpus", "num_token"), "combine_avg_t_us", 1e-6),
        )

    @cached_property
    def _is_rack(self) -> bool:
        return self.folder.name.startswith("gb")

    @cached_property
    def _collectives(self) -> tuple[Tree, Tree] | None:
        found = self._newest("comm", "nccl_perf", pc.field("nccl_dtype") == "half", engine="nccl")
        if found is None:
            return None
        gather, scatter = (
            _tree(found.filter(pc.field("op_name") == name), ("num_gpus", "message_size"), "latency", 1e-3)
            for name in ("all_gather", "reduce_scatter")
        )
        return gather, scatter

    def _newest(
        self,
        family: str,
        name: str,
        rows: pc.Expression | None,
        *,
        engine: str | None = None,
        all_versions: bool = False,
    ) -> pa.Table | None:
        """Return the rows of the newest version that has some; `all_versions`: of all, the newest ones first."""
        found = []
        # both racks have the same NVLink, and only one was measured
        folder = self.folder.with_name("gb200") if name == "trtllm_alltoall_perf" else self.folder
        for path in sorted(
            (folder / family / (engine or self.engine)).glob(f"*/{name}.parquet"),
            key=lambda path: _version(path.parent.name),
            reverse=True,
        ):
            table = pq.read_table(path, filters=rows)
            if len(table) and not all_versions:
                return table
            if len(table):
                found.append(table)
        return pa.concat_tables(found, promote_options="permissive") if found else None


def _version(name: str) -> list[int]:
    digits = "".join(letter if letter.isdigit() else " " for letter in name)
    return [int(part) for part in digits.split()]


def _tree(table: pa.Table, axes: Sequence[str], column: str, unit_s: float) -> Tree:
    """Return a tree over the axes; of several rows at a place the first counts."""
    tree: Tree = {}
    columns = [pc.cast(table[name], pa.float64()).to_pylist() for name in axes]
    for *at, value in zip(*columns, table[column].to_pylist(), strict=True):
        branch = tree
        for part in at[:-1]:
            branch = branch.setdefault(part, {})
        branch.setdefault(at[-1], log(value * unit_s))
    return _sorted(tree)


def _sorted(tree: Tree) -> Tree:
    return {at: _sorted(tree[at]) if isinstance(tree[at], dict) else tree[at] for at in sorted(tree)}


def _summed(one: Tree, other: Tree) -> Tree:
    """Return the sums of the seconds of two trees at the places that both have."""
    return {
        at: _summed(one[at], other[at]) if isinstance(one[at], dict) else log(exp(one[at]) + exp(other[at]))
        for at in one
        if at in other
    }


def _leaves(tree: Tree) -> list[float]:
    return [leaf for at in tree.values() for leaf in (_leaves(at) if isinstance(at, dict) else [at])]


def _interpolated(tree: Tree, at: Sequence[float]) -> float:
    """Return the seconds at a place of a tree, see `_log_seconds`."""
    return exp(_log_seconds(tree, at))


def _log_seconds(tree: Tree, at: Sequence[float]) -> float:
    """Interpolate the logarithm of seconds over the logarithm of each axis.

    Below an axis its first place counts; beyond it the slope of its last two places goes on, at most in
    proportion.
    """

    def read(key: float) -> float:
        return _log_seconds(tree[key], at[1:]) if len(at) > 1 else tree[key]

    keys = list(tree)
    place = bisect_left(keys, at[0])
    if place == 0 or len(keys) == 1:
        return read(keys[0])
    low, high = (keys[-2], keys[-1]) if place == len(keys) else (keys[place - 1], keys[place])
    first, last = read(low), read(high)
    slope = (last - first) / log(high / low)
    if place == len(keys):
        return last + min(1.0, max(0.0, slope)) * log(at[0] / high)
    return first + slope * log(at[0] / low)
