"""Cost, revenue at list prices and margins of a run: plain arithmetic.

Two margins are easily confused, both ratios: cost_profit_margin is the profit over the cost (a markup: 5.45 means
545 %), gross_margin is the profit over the revenue (0.845 means 84.5 %).
"""

TOKENS_PER_PRICE = 1_000_000  # list prices are $ per million tokens


def _times(amount: float | None, price: float | None) -> float | None:
    return None if amount is None or price is None else amount * price


def cost(num_gpu_hours: float | None, gpu_hour: float | None) -> float | None:
    """Return the cost in $ of accelerator-hours at `gpu_hour` $ each; None if either is not known."""
    return _times(num_gpu_hours, gpu_hour)


def revenue(
    hit_tokens: float | None,
    miss_tokens: float | None,
    output_tokens: float | None,
    *,
    input_hit: float | None,
    input_miss: float | None,
    output: float | None,
) -> float | None:
    """Return the $ that the tokens would earn at list prices; None unless all counts and prices are known.

    Args:
        hit_tokens: input tokens served from a cache, at `input_hit` $ per million.
        miss_tokens: input tokens computed, at `input_miss`.
        output_tokens: output tokens delivered, at `output`.
    """
    hit, miss, out = _times(hit_tokens, input_hit), _times(miss_tokens, input_miss), _times(output_tokens, output)
    return None if hit is None or miss is None or out is None else (hit + miss + out) / TOKENS_PER_PRICE


def money(cost_usd: float | None, revenue_usd: float | None, output_tokens: float | None) -> dict[str, float | None]:
    """Return cost, revenue, margins and unit cost by the report's keys; a margin of an unknown or zero base is None."""
    profit = None if cost_usd is None or revenue_usd is None else revenue_usd - cost_usd
    return {
        "cost_usd": cost_usd,
        "revenue_usd": revenue_usd,
        "cost_profit_margin": _over(profit, cost_usd),
        "gross_margin": _over(profit, revenue_usd),
        "usd_per_million_output_tokens": per_million(cost_usd, output_tokens),
    }


def _over(profit: float | None, base: float | None) -> float | None:
    return None if profit is None or base is None or base <= 0 else profit / base


def per_million(cost_usd: float | None, tokens: float | None) -> float | None:
    """Return the cost in $ per million tokens; None if the cost is unknown or there are no tokens."""
    return None if cost_usd is None or not tokens else cost_usd / tokens * TOKENS_PER_PRICE
