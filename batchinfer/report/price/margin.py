"""What a run costs and what it would earn at list prices: plain arithmetic.

Two margins that are easily mixed up, both ratios: cost_profit_margin is the profit over the cost (a markup: 5.45 means
545 %), gross_margin is the profit over the revenue (0.845 means 84.5 %).
"""

from __future__ import annotations

TOKENS_PER_PRICE = 1_000_000  # list prices are $ per million tokens


def gpu_hours(num_nodes: float, gpus_per_node: float, hours: float) -> float:
    """Accelerator-hours of a mean number of nodes held for some hours."""
    return num_nodes * gpus_per_node * hours


def cost(num_gpu_hours: float, gpu_hour: float | None) -> float | None:
    """$ for the accelerator-hours held; None when there is no price.

    Args:
        num_gpu_hours: accelerators times hours.
        gpu_hour: $ per accelerator-hour.
    """
    return None if gpu_hour is None else num_gpu_hours * gpu_hour


def revenue(
    hit_tokens: float,
    miss_tokens: float,
    output_tokens: float,
    *,
    input_hit: float | None,
    input_miss: float | None,
    output: float | None,
) -> float | None:
    """$ that the tokens would earn at list prices; None unless all three prices are known.

    Args:
        hit_tokens: input tokens served from a cache.
        miss_tokens: input tokens computed.
        output_tokens: output tokens delivered.
        input_hit: $ per million hit tokens.
        input_miss: $ per million miss tokens.
        output: $ per million output tokens.
    """
    if input_hit is None or input_miss is None or output is None:
        return None
    return (hit_tokens * input_hit + miss_tokens * input_miss + output_tokens * output) / TOKENS_PER_PRICE


def cost_profit_margin(revenue_usd: float | None, cost_usd: float | None) -> float | None:
    """Profit over cost, a ratio; None when either is unknown or nothing was spent."""
    if revenue_usd is None or cost_usd is None or cost_usd <= 0:
        return None
    return (revenue_usd - cost_usd) / cost_usd


def gross_margin(revenue_usd: float | None, cost_usd: float | None) -> float | None:
    """Profit over revenue, a ratio; None when either is unknown or nothing was earned."""
    if revenue_usd is None or cost_usd is None or revenue_usd <= 0:
        return None
    return (revenue_usd - cost_usd) / revenue_usd


def per_million(cost_usd: float | None, tokens: float | None) -> float | None:
    """$ per million tokens when the cost is spread over them; None when either is unknown or there are none."""
    return None if cost_usd is None or not tokens else cost_usd / tokens * TOKENS_PER_PRICE
