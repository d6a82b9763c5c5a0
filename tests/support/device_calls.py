"""A step's calls of a GPU, counted without one: kernels that it starts, and where the host waits for the device.

Tensors of the device are on torch's "meta", which has shapes and no values; kernels in Triton and those of DeepSeek's
libraries are counted and not run. So the code for GPUs runs as it is, at any shapes.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from batchinfer_kernels import registry
from batchinfer_kernels.hopper import invariant, libraries
from batchinfer_kernels.hopper import ops as hopper

META = torch.device("meta")
# They only make room, or look at memory that is there.
_NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "_unsafe_view",
    "detach",
}
# The host has to know how many values there are, or what they are.
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "bincount",
    "equal",
    "is_nonzero",
}
_SEVERAL = {"constant_pad_nd": 2}  # room filled, then a part of it copied


@dataclass
class DeviceCalls:
    """Counted calls of a device.

    kernels: starts by name; in_triton: names of the kernels in Triton; waits: the host's waits, with the line.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    in_triton: set[str] = field(default_factory=set)
    waits: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Reset all counts."""
        self.kernels.clear()
        self.waits.clear()

    def wait(self, what: str) -> None:
        """The host has waited."""
        frames = [frame for frame in traceback.extract_stack() if "/batchinfer" in frame.filename]
        at = f" at {frames[-1].filename.rpartition('/batchinfer')[2]}:{frames[-1].lineno}" if frames else ""
        self.waits.append(what + at)


class CountCalls(TorchDispatchMode):
    """Counts torch's starts on the device, and calls that make the host wait."""

    def __init__(self, calls: DeviceCalls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if (reason := self._why_wait(name, given, args, kwargs)) is not None:
            self.calls.wait(reason)
        result = func(*args, **kwargs)  # on "meta" most of these fail
        out = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        has_work = any(tensor.numel() for tensor in out) and any(tensor.device == META for tensor in given + out)
        if has_work and name not in _NO_KERNEL and not func.is_view:
            self.calls.kernels[name] += _SEVERAL.get(name, 1)
        return result

    @staticmethod
    def _why_wait(name: str, given: list[torch.Tensor], args: Any, kwargs: Any) -> str | None:
        is_here, is_there = (any((tensor.device == META) is there for tensor in given) for there in (False, True))
        if name == "_to_copy":
            goal = kwargs.get("device")
            is_across = goal is not None and given and given[0].device != torch.device(goal)
            return "a copy that is waited for" if is_across and not kwargs.get("non_blocking") else None
        if name == "copy_":
            return "a copy that is waited for" if is_here and is_there and True not in args[2:] else None
        if not is_there:
            return None
        if name in ("index", "index_put", "index_put_"):
            places = [place for place in args[1] if place is not None]
            if any(place.dtype in (torch.bool, torch.uint8) for place in places):
                return f"{name} with a mask"
            return f"{name} with places of the host" if any(place.device != META for place in places) else None
        if name == "repeat_interleave":
            return None if kwargs.get("output_size") is not None else "repeat_interleave of unknown size"
        return name if name in _WAITS else None


class NoteLists(TorchFunctionMode):
    """Notes tensors that are made on the device from values of the host, which torch copies unseen, and waits."""

    def __init__(self, calls: DeviceCalls):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "new_tensor", "asarray") and result.device == META:
            self.calls.wait(f"torch.{name} on the device")
        if name in ("__getitem__", "__setitem__") and args[0].device == META and isinstance(args[1], list):
            self.calls.wait("index with places of the host")
        return result


@contextmanager
def counted_calls(*, with_hopper: bool) -> Iterator[DeviceCalls]:
    """Operations for tensors on "meta" are those for GPUs, of Hopper's libraries or in Triton alone."""
    calls = DeviceCalls()

    def run(function: Any, *args: Any, grid: Any, warmup: Any, **options: Any) -> None:
        calls.kernels[function.__name__] += 1
        calls.in_triton.add(function.__name__)

    def gemm(names: tuple[str, ...]) -> Callable[..., None]:
        def product(*args: Any, **options: Any) -> None:
            calls.kernels[names[0]] += 1

        return product

    def metadata() -> tuple[Any, None]:
        return SimpleNamespace(), None

    def attention(
        q_BQHW: torch.Tensor, pages: Any, table: Any, kv_tokens: Any, latent_dim: int, *_: Any, **__: Any
    ) -> Any:
        calls.kernels["flash_mla"] += 2  # splits, then their sum
        num_requests, num_queries, num_heads = q_BQHW.shape[:3]
        log_sums_BHQ = q_BQHW.new_empty(num_requests, num_heads, num_queries, dtype=torch.float32)
        return q_BQHW.new_empty(num_requests, num_queries, num_heads, latent_dim), log_sums_BHQ

    def for_any_device(candidate: registry.Candidate) -> registry.Candidate:
        return replace(candidate, probe=lambda: None, probe_auto=lambda: None, device_types=None)

    names = (registry.INVARIANT, registry.HOPPER, registry.TRITON) if with_hopper else (registry.TRITON,)
    candidates = {
        op: tuple(
            for_any_device(candidate) if candidate.name in names else candidate
            for candidate in listed
            if candidate.name in (*names, registry.REFERENCE)
        )
        for op, listed in registry._CANDIDATES.items()
    }
    library = SimpleNamespace(get_mla_metadata=metadata, flash_mla_with_kvcache=attention)
    with pytest.MonkeyPatch.context() as patch, NoteLists(calls), CountCalls(calls):
        patch.setattr(registry, "_CANDIDATES", candidates)
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(JITFunction, "run", run)
        patch.setattr(hopper, "is_on_gpu", lambda *tensors: True)
        patch.setattr(libraries, "deep_gemm", gemm)
        patch.setattr(libraries, "flash_mla", lambda: library)
        patch.setattr(libraries, "decode_parameters", lambda: frozenset({"use_legacy"}))
        patch.setattr(invariant, "_num_parts", lambda *_: 66)
        yield calls
