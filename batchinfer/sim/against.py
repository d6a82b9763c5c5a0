"""The simulator against whole-system measurements: rows of `silicon_sample.csv` of aiconfigurator-core.

A row is a closed loop: a benchmark keeps a number of requests under way and reports the mean time to a first token and
per further token. Only layouts that the simulator knows are predicted: attention data-parallel, experts over all GPUs.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pv

from batchinfer.model.config import ModelConfig
from batchinfer.model.page_format import BFLOAT16, FP8, PageFormat
from batchinfer.records import ConfigError
from batchinfer.sanitize import first_line
from batchinfer.sim.aiconfigurator import HINT, SYSTEMS, Engine, Weights, measured_rates
from batchinfer.sim.hardware import ACCELERATORS, Accelerator
from batchinfer.sim.steps import Unit, decode_step, prefill_step

Parity = Literal["even", "odd", "all"]
# the same architecture and sizes (jobs/models/deepseek-v3)
NAMES = ("DeepSeek-R1", "DeepSeek-V3")
HIDDEN, LAYERS = 7168, 61
# github.com/InferenceMAX/InferenceMAX, README: RANDOM_RANGE_RATIO 0.8, lengths even between 0.8 and 1.0 of those named
MEAN_LENGTH = 0.9
# Time of a step by the sum of its kernels, which the tables time one by one: waits between them, cold caches, sampling
# and the engine's own work. One number for all GPUs and engines: the median over the even FP8 rows of the file.
STEP_BY_KERNELS = 1.13
MAX_ROUNDS = 50  # until batch and time of a step agree


@dataclass(frozen=True, slots=True)
class Stage:
    """The workers of a stage: `workers` copies of the model over `gpus` GPUs each."""

    workers: int
    gpus: int
    requests_per_gpu: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    index: int  # in the file, from 0
    name: str
    model: str
    gpu: str
    engine: Engine
    weights: Weights
    prompt_tokens: float
    output_tokens: float
    concurrency: float
    prefill: Stage | None  # None: the GPUs of decode prefill, too
    decode: Stage
    first_token_s: float
    token_s: float
    peer: "Speed | None"  # predicted by aiconfigurator, where the file has it

    @property
    def gpus(self) -> int:
        """All GPUs of the system."""
        stages = [self.decode] if self.prefill is None else [self.decode, self.prefill]
        return sum(stage.workers * stage.gpus for stage in stages)

    @property
    def measured(self) -> "Speed":
        """The measured speed; requests per second follow from those under way and their time (Little's law)."""
        request_s = self.first_token_s + (self.output_tokens - 1) * self.token_s
        return Speed(self.token_s, self.concurrency / request_s * self.output_tokens / self.gpus)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per output token of a request, and output tokens per second and GPU of the whole system."""

    token_s: float
    tokens_per_s: float | None


def read_rows(path: Path, model: ModelConfig, parity: Parity = "all") -> tuple[list[Row], Counter[str]]:
    """Return the rows of a model that can be predicted, and the number of left out ones by reason.

    Raises:
        ConfigError: the file cannot be read, or its rows are of other models.
    """
    if (model.hidden_size, model.num_hidden_layers) != (HIDDEN, LAYERS):
        raise ConfigError(
            f"--against knows the rows of {' and '.join(NAMES)}; give a model folder of that architecture"
        )
    wanted = "give the path of silicon_sample.csv, a file of the package aiconfigurator-core"
    try:
        with path.open("rb") as file:
            records = pv.read_csv(file).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}; {wanted}") from None
    rows, left_out = [], Counter[str]()
    try:
        for index, record in enumerate(records):
            if parity != "all" and index % 2 != (parity == "odd"):
                continue
            reason = _why_not(record)
            if reason is None:
                rows.append(_row(index, record))
            else:
                left_out[reason] += 1
    except KeyError as error:
        raise ConfigError(f"{path} has no column {error.args[0]}; {wanted}") from None
    return rows, left_out


def predict(row: Row, model: ModelConfig, gpu: Accelerator) -> Speed:
    """Return the predicted speed of a row.

    Without prefill workers, prompts come between the steps of decode, on all ranks at once (TensorRT-LLM's balance of
    attention ranks waits for that). Otherwise the benchmark's requests go round between prefill, where they queue, and
    decode, where each gets a token per step.
    """
    unit = Unit(row.decode.gpus, overlap=False, pages=_pages(row))
    prompt, output = MEAN_LENGTH * row.prompt_tokens, MEAN_LENGTH * row.output_tokens
    kv_tokens, most = prompt + output / 2, row.decode.requests_per_gpu
    prefill = replace(unit, ep_size=unit.ep_size if row.prefill is None else row.prefill.gpus)
    prompt_s = STEP_BY_KERNELS * prefill_step(prompt, prompt**2 / 2, prompt, 1.0, model, gpu, prefill).seconds
    if row.prefill is None:
        token_s = _step_s(most, kv_tokens, model, gpu, unit) + most / output * prompt_s
        return Speed(token_s, most * output / (prompt_s + output * token_s))
    prefill_rate = row.prefill.workers * row.prefill.gpus / prompt_s
    gpus, requests = row.decode.workers * row.decode.gpus, most
    for _ in range(MAX_ROUNDS):
        token_s = _step_s(requests, kv_tokens, model, gpu, unit)
        rate = _closed_loop(row.concurrency, 1 / prefill_rate, prompt_s + output * token_s)
        requests = 0.5 * requests + 0.5 * min(most, rate * output * token_s / gpus)
    return Speed(token_s, rate * output / row.gpus)


def _closed_loop(requests: float, service_s: float, elsewhere_s: float) -> float:
    """Return the requests per second that go round between one queue and the rest of the system.

    Mean value analysis (Reiser and Lavenberg 1980) with one server.
    """
    queue = rate = 0.0
    for number in range(1, int(requests) + 1):
        response_s = service_s * (1 + queue)
        rate = number / (elsewhere_s + response_s)
        queue = rate * response_s
    return rate


def measured_gpu(row: Row) -> Accelerator:
    """Return the accelerator of a row with the rates of its engine's kernels.

    Raises:
        ConfigError: the package is not installed.
    """
    rates = measured_rates(row.gpu, row.engine, is_balanced=False, weights=row.weights)
    if rates is None:
        raise ConfigError(f"--against needs the tables of aiconfigurator-core; run: {HINT}")
    return replace(ACCELERATORS[row.gpu], rates=rates)


def compared(path: Path, model: ModelConfig, parity: Parity) -> dict[str, Any]:
    """Return predicted and measured speeds of all rows, errors by model, GPU and engine, and what was left out."""
    rows, left_out = read_rows(path, model, parity)
    own = [predict(row, model, measured_gpu(row)) for row in rows]
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        of_weights = " in FP4" if row.weights == "fp4" else ""
        for group in (f"all{of_weights}", f"{row.model} {row.gpu} {row.engine}{of_weights}"):
            groups.setdefault(group, []).append(place)
        if row.gpu in ("H100", "H200"):
            groups.setdefault("H100 and H200", []).append(place)
    return {
        "file": str(path),
        "rows": parity,
        "predicted": [_pair(row, speed) for row, speed in zip(rows, own, strict=True)],
        "groups": {
            name: {
                "own": _errors([(own[place], rows[place].measured) for place in places]),
                "aiconfigurator": _errors(
                    [(peer, rows[place].measured) for place in places if (peer := rows[place].peer) is not None]
                ),
            }
            for name, places in sorted(groups.items())
        },
        "left_out": dict(left_out.most_common()),
    }


def _pair(row: Row, own: Speed) -> dict[str, Any]:
    measured = row.measured
    return {
        "row": row.index,
        "id": row.name,
        "gpu": row.gpu,
        "engine": row.engine,
        "weights": row.weights,
        "gpus": row.gpus,
        "requests_per_gpu": row.decode.requests_per_gpu,
        "tpot_s": measured.token_s,
        "tpot_s_predicted": own.token_s,
        "tokens_per_s_per_gpu": measured.tokens_per_s,
        "tokens_per_s_per_gpu_predicted": own.tokens_per_s,
    }


def _errors(pairs: list[tuple[Speed, Speed]]) -> dict[str, Any] | None:
    """Return the distribution of errors of (predicted, measured); None without rows."""
    if not pairs:
        return None
    tpot = np.array([own.token_s / real.token_s - 1 for own, real in pairs])
    rates = np.array(
        [own.tokens_per_s / real.tokens_per_s - 1 for own, real in pairs if own.tokens_per_s and real.tokens_per_s]
    )
    return {"rows": len(pairs), "tpot": _distribution(tpot), "throughput": _distribution(rates)}


def _distribution(errors: np.ndarray) -> dict[str, float] | None:
    if not len(errors):
        return None
    return {
        "median": float(np.median(errors)),
        "median_absolute": float(np.median(np.abs(errors))),
        "within_25_percent": float((np.abs(errors) <= 0.25).mean()),
        "largest": float(np.abs(errors).max()),
    }


def _step_s(requests: float, kv_tokens: float, model: ModelConfig, gpu: Accelerator, unit: Unit) -> float:
    return STEP_BY_KERNELS * decode_step(requests, requests * kv_tokens, model, gpu, unit).seconds


def _pages(row: Row) -> PageFormat:
    """Return the KV format: FP8, except of SGLang on Hopper, whose attention there is over BF16."""
    return BFLOAT16 if row.engine == "sglang" and row.gpu in ("H100", "H200") else PageFormat(FP8)


def _why_not(record: dict[str, Any]) -> str | None:
    """Return why a row is left out; None: it is predicted."""
    if not record["model_path"].endswith(NAMES):
        return "another model"
    if record["precision"] == "fp4" and record["system"] in (SYSTEMS["H100"], SYSTEMS["H200"]):
        return "weights in FP4, which Hopper lacks"
    if record["precision"] not in ("fp8", "fp4"):
        return f"weights in {record['precision'].upper()}"
    if record["system"] not in SYSTEMS.values():
        return "another GPU"
    prefix = "" if record["mode"] == "agg" else "decode_"
    attention, experts = record[f"{prefix}attention_dp_size"], record[f"{prefix}moe_ep_size"]
    if attention is None or record[f"{prefix}batch_size"] is None or _concurrency(record) is None:
        return "sizes or batch are missing"
    if attention == 1 or record[f"{prefix}tp_size"] != 1:
        return "attention is tensor-parallel"
    if record[f"{prefix}moe_tp_size"] != 1 or experts != attention:
        return "experts are not split over the GPUs of attention"
    if record[f"{prefix}pp_size"] != 1:
        return "pipeline-parallel"
    return None


def _row(index: int, record: dict[str, Any]) -> Row:
    gpu = next(name for name, system in SYSTEMS.items() if system == record["system"])
    concurrency = float(_concurrency(record) or 0)
    if record["mode"] == "agg":
        gpus = record["attention_dp_size"]
        decode, prefill = Stage(1, gpus, min(record["batch_size"], concurrency / gpus)), None
    else:
        gpus, workers = record["decode_attention_dp_size"], record["decode_num_workers"]
        decode = Stage(workers, gpus, min(record["decode_batch_size"], concurrency / workers / gpus))
        prefill = Stage(
            record["prefill_num_workers"],
            record["prefill_tp_size"] * record["prefill_attention_dp_size"] * record["prefill_pp_size"],
            record["prefill_batch_size"],
        )
    row = Row(
        index=index,
        name=record["id"],
        model=record["model_path"].split("/")[-1],
        gpu=gpu,
        engine=record["backend"],
        weights=record["precision"],
        prompt_tokens=record["isl"],
        output_tokens=record["osl"],
        concurrency=concurrency,
        prefill=prefill,
        decode=decode,
        first_token_s=record["silicon_ttft_ms"] / 1e3,
        token_s=record["silicon_tpot_ms"] / 1e3,
        peer=None,
    )
    return replace(row, peer=_peer(record))


def _peer(record: dict[str, Any]) -> Speed | None:
    tpot_ms, rate = (record.get(f"aiconfigurator_{name}") for name in ("tpot_ms", "tokens_per_s_per_gpu"))
    return None if tpot_ms is None else Speed(tpot_ms / 1e3, rate)


def _concurrency(record: dict[str, Any]) -> int | None:
    found = re.search(r"concurrency=(\d+)", record["silicon_data_source"])
    return None if found is None else int(found[1])
