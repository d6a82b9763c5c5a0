"""`batchinfer price`: cost, revenue and margins of a job, from a run, from options or from both."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import RenderableType

from batchinfer.records import ConfigError
from batchinfer.report import forms
from batchinfer.report.figure import Figure, Group
from batchinfer.report.figures import FIGURES, known
from batchinfer.report.price import margin
from batchinfer.report.price.price_list import PRICES, PriceList
from batchinfer.report.read import read_report
from batchinfer.report.terminal import figure_table, text
from batchinfer.run.job_file import recorded_job
from batchinfer.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Amounts:
    """The resources and tokens of a job; None: not known."""

    hit_tokens: float | None = None
    miss_tokens: float | None = None
    output_tokens: float | None = None
    nodes: float | None = None
    gpus_per_node: float | None = None
    hours: float | None = None
    gpu_hours: float | None = None  # of a run; nodes x gpus_per_node x hours replaces it if all three are known

    @property
    def held_gpu_hours(self) -> float | None:
        """The accelerator-hours to pay for."""
        if self.nodes is None or self.gpus_per_node is None or self.hours is None:
            return self.gpu_hours
        return self.nodes * self.gpus_per_node * self.hours


def amounts_of_run(run_folder: Path) -> tuple[Amounts, PriceList]:
    """Read the tokens and accelerator-hours of a finished run, and the prices of its job.

    Raises:
        ConfigError: the folder is no finished run.
    """
    figures = read_report(run_folder).values
    hit = figures["cached_tokens"] or 0
    amounts = Amounts(
        hit_tokens=hit,
        miss_tokens=(figures["input_tokens"] or 0) - hit,
        output_tokens=figures["output_tokens"],
        gpu_hours=figures["gpu_hours"],
        hours=None if figures["wall_s"] is None else figures["wall_s"] / 3600,
    )
    return amounts, PriceList(**recorded_job(RunDir(Path(run_folder))).pricing.model_dump())


def with_changes(amounts: Amounts, **changes: float | None) -> Amounts:
    """Return the amounts with some replaced; None leaves an amount unchanged.

    Raises:
        ConfigError: an amount is negative or infinite, or only some factors of a run's accelerator-hours are replaced.
    """
    for name, value in changes.items():
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give a number that is at least 0")
    given = {name: value for name, value in changes.items() if value is not None}
    held = {"nodes", "gpus_per_node", "hours"} & set(given)
    if held and amounts.gpu_hours is not None and not {"nodes", "gpus_per_node"} <= held:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(held))
        raise ConfigError(f"{names} alone cannot replace what the run held; give --nodes and --gpus-per-node, too")
    return replace(amounts, **given)


def price(
    amounts: Amounts, prices: PriceList, *, is_batch: bool = False, start_minute: float | None = None
) -> dict[str, float | None]:
    """Compute the figures of a job by the report's keys; None if a figure cannot be known.

    The cost per million tokens is given by three conventions: over output tokens alone; over input and output tokens;
    over computed tokens (misses and output).

    Raises:
        ConfigError: neither cost nor revenue can be computed, or off-peak or cheap hours need the job's duration.
    """
    hit, miss, output = amounts.hit_tokens, amounts.miss_tokens, amounts.output_tokens
    factor = prices.token_factor(is_batch=is_batch, start_minute=start_minute, hours=amounts.hours)
    gpu_hours = amounts.held_gpu_hours
    gpu_hour = None if gpu_hours is None else prices.mean_gpu_hour(start_minute=start_minute, hours=amounts.hours)
    cost = margin.cost(gpu_hours, gpu_hour)
    list_price = margin.revenue(
        hit, miss, output, input_hit=prices.input_hit, input_miss=prices.input_miss, output=prices.output
    )
    revenue = None if list_price is None else list_price * factor
    inputs = None if hit is None or miss is None else hit + miss
    computed = None if miss is None or output is None else miss + output
    if cost is None and revenue is None:
        raise ConfigError(
            "neither cost nor revenue can be computed; give --nodes, --gpus-per-node, --hours and --gpu-hour, or "
            "--hit-tokens, --miss-tokens, --output-tokens and three token prices (--prices FILE has prices)"
        )
    return {
        "input_tokens": inputs,
        "cached_tokens": hit,
        "cache_hit_rate": None if not inputs or hit is None else hit / inputs,
        "output_tokens": output,
        "gpu_hours": gpu_hours,
        "mean_gpu_hour_usd": gpu_hour,
        **margin.money(cost, revenue, output),
        "profit_usd": None if cost is None or revenue is None else revenue - cost,
        "token_price_factor": factor,
        "usd_per_million_tokens": margin.per_million(
            cost, None if inputs is None or output is None else inputs + output
        ),
        "usd_per_million_computed_tokens": margin.per_million(cost, computed),
    }


SHOWN = (
    Group(
        "",
        (
            *known("input_tokens", "cached_tokens", "cache_hit_rate", "output_tokens", "gpu_hours"),
            Figure("mean_gpu_hour_usd", "price of a GPU-hour", forms.unit_dollars, "$",
                   note="mean, cheap hours counted", why_empty="needs GPU-hours and gpu_hour"),
            *known("cost_usd"),
            FIGURES["revenue_usd"].called("revenue at these prices"),
            Figure("profit_usd", "profit", forms.number, "$", why_empty="needs cost and revenue"),
            *known("cost_profit_margin", "gross_margin"),
            Figure("token_price_factor", "token prices after discounts", forms.percent, "%"),
            *known("usd_per_million_output_tokens", "usd_per_million_tokens"),
            Figure("usd_per_million_computed_tokens", "all cost on computed tokens", forms.unit_dollars, "$/M",
                   note="misses and output", why_empty="no such tokens"),
        ),
    ),
)  # fmt: skip


def price_table(figures: dict[str, float | None], prices: PriceList) -> Iterator[RenderableType]:
    """Yield the figures with units, then the prices and their source."""
    yield from figure_table(figures, SHOWN)
    known = {name: value for name, value in asdict(prices).items() if name in PRICES and value is not None}
    yield text("prices: " + ", ".join(f"{name} ${value:g}" for name, value in known.items()))
    if prices.source:
        yield text(f"source: {prices.source} ({prices.date})")
