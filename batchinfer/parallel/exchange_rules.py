"""Limits of each exchange: its device, sizes of rows, numbers of ranks and experts. No torch: the planner uses them."""

from batchinfer.records import ConfigError

ON_CPUS = ("tls", "gloo")
DEEPEP = ("deepep", "deepep-v1", "deepep-low-latency")
ON_GPUS = ("nccl", *DEEPEP)

# The limits of DeepEP 2.1.0's kernels.
# Version 2 reads rows in whole warps of 16-byte loads, version 1 needs whole FP8 scales.
_HIDDEN_MULTIPLE = {"deepep": 256, "deepep-v1": 128}
# The low-latency kernels are compiled for these sizes alone.
_LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_V1_ROW_BYTES = 16_384  # shared memory of one warp, part of which holds more than the row
_MOST_TOPK = {"deepep": 32, "deepep-v1": 32, "deepep-low-latency": 11}
_MOST_SLOTS_PER_RANK = {"deepep": 256, "deepep-v1": 1024}
_HOST_RANKS = 8  # version 1 counts eight GPUs per host
_V1_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_V1_HIDDEN_MULTIPLE_BETWEEN_HOSTS = 256


def check_device(exchange: str, device_type: str) -> None:
    """Raise for an exchange between GPUs if ranks are on CPUs ("cpu"), and for the reverse ("cuda").

    Raises:
        ConfigError: the exchange does not run on this device.
    """
    if exchange in ON_CPUS and device_type == "cuda":
        raise ConfigError(
            f"cluster.exchange is {exchange!r}, which moves rows between CPUs, but the ranks compute on GPUs; use "
            "'auto', or set cluster.backend to 'cpu' or 'reference'"
        )
    if exchange in ON_GPUS and device_type != "cuda":
        raise ConfigError(
            f"cluster.exchange is {exchange!r}, which needs GPUs, but the ranks compute on CPUs; use 'auto'"
        )


def check_rows(exchange: str, dtype: str, hidden: int) -> None:
    """Raise for rows that DeepEP does not carry.

    Args:
        dtype: dtype of rows on their way to the experts: "float32", "bfloat16" or "fp8".
        hidden: values per row.

    Raises:
        ConfigError: names the size or type, the limit and another exchange.
    """
    if exchange not in DEEPEP:
        return
    if dtype == "float32":
        raise ConfigError(
            f"cluster.exchange is {exchange!r}, but DeepEP carries bfloat16 or FP8 rows, not float32; "
            "set model.dtype = 'bfloat16' or cluster.exchange = 'nccl'"
        )
    size = f"the model's hidden size {hidden}"
    if exchange == "deepep-low-latency":
        if hidden not in _LOW_LATENCY_HIDDEN:
            raise _refusal(exchange, f"{size} is none of {_listed(_LOW_LATENCY_HIDDEN)}")
        return
    multiple = _HIDDEN_MULTIPLE[exchange]
    if hidden % multiple:
        raise _refusal(exchange, f"{size} is not a multiple of {multiple}")
    value_bytes = 1 if dtype == "fp8" else 2
    if exchange == "deepep-v1" and hidden * value_bytes >= _V1_ROW_BYTES:
        raise _refusal(exchange, f"{size} makes rows of {hidden * value_bytes} bytes, not less than {_V1_ROW_BYTES}")


def check_group(exchange: str, *, num_ranks: int, slots_per_rank: int, topk: int, hidden: int) -> None:
    """Raise for a group of ranks that DeepEP cannot serve.

    Args:
        num_ranks: ranks that share the experts; one rank exchanges nothing.
        slots_per_rank: experts of one rank, redundant ones included.
        topk: experts per token.
        hidden: values per row.

    Raises:
        ConfigError: names the number, the limit and another exchange.
    """
    if exchange not in DEEPEP or num_ranks == 1:
        return
    if topk > _MOST_TOPK[exchange]:
        raise _refusal(exchange, f"the model has {topk} experts per token, more than {_MOST_TOPK[exchange]}")
    if slots_per_rank > _MOST_SLOTS_PER_RANK.get(exchange, slots_per_rank):
        raise _refusal(exchange, f"a rank has {slots_per_rank} experts, more than {_MOST_SLOTS_PER_RANK[exchange]}")
    if exchange == "deepep-v1" and num_ranks not in _V1_RANKS:
        raise _refusal(exchange, f"{num_ranks} ranks share the experts, not {_listed(_V1_RANKS)}")
    if exchange == "deepep-low-latency" and num_ranks > _HOST_RANKS and num_ranks % _HOST_RANKS:
        raise _refusal(exchange, f"{num_ranks} ranks share the experts, not a multiple of {_HOST_RANKS}")
    if exchange == "deepep-v1" and num_ranks > _HOST_RANKS and hidden % _V1_HIDDEN_MULTIPLE_BETWEEN_HOSTS:
        raise _refusal(
            exchange,
            f"the model's hidden size {hidden} is not a multiple of {_V1_HIDDEN_MULTIPLE_BETWEEN_HOSTS}, "
            f"which more than {_HOST_RANKS} ranks need",
        )


def _refusal(exchange: str, reason: str) -> ConfigError:
    return ConfigError(f"cluster.exchange is {exchange!r}, but {reason}; use cluster.exchange = 'nccl'")


def _listed(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
