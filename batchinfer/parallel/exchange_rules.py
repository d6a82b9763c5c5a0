"""What cluster.exchange asks of a job: where its ranks compute, what their rows are. No torch here: plans ask, too."""

from batchinfer.records import ConfigError

ON_CPUS = ("shared", "tls", "gloo")
# what DeepEP's kernels ask of a row: whole warps of 16-byte loads (version 2), whole FP8 scales, four of them per load
_HIDDEN_MULTIPLE = {"deepep": 256, "deepep-v1": 128, "deepep-low-latency": 128}
_LOW_LATENCY_FP8_HIDDEN_MULTIPLE = 512
DEEPEP = tuple(_HIDDEN_MULTIPLE)
ON_GPUS = ("nccl", *DEEPEP)


def check_device(exchange: str, device_type: str) -> None:
    """Refuse an exchange between GPUs for ranks on CPUs ("cpu"), and the other way round ("cuda").

    Raises:
        ConfigError: it is one.
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
    """Refuse rows that DeepEP does not carry.

    Args:
        dtype: of the rows on their way to the experts: "float32", "bfloat16" or "fp8".
        hidden: values per row.

    Raises:
        ConfigError: it does not.
    """
    if exchange not in DEEPEP:
        return
    if dtype == "float32":
        raise ConfigError(
            f"cluster.exchange is {exchange!r}, but DeepEP carries bfloat16 or FP8 rows, not float32; "
            "set model.dtype = 'bfloat16' or cluster.exchange = 'nccl'"
        )
    multiple = _HIDDEN_MULTIPLE[exchange]
    if exchange == "deepep-low-latency" and dtype == "fp8":
        multiple = _LOW_LATENCY_FP8_HIDDEN_MULTIPLE
    if hidden % multiple:
        raise ConfigError(
            f"cluster.exchange is {exchange!r}, but the model's hidden size {hidden} is not a multiple of {multiple}; "
            "use cluster.exchange = 'nccl'"
        )
