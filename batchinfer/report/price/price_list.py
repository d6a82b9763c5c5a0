"""Price lists: a TOML file with source and date, batch discounts and prices by the hour of the day.

Every price is optional; figures that need a missing price are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from batchinfer.config import read_toml
from batchinfer.records import ConfigError

MINUTES_PER_DAY = 24 * 60
DAY_S = 86_400
PRICES = ("gpu_hour", "input_hit", "input_miss", "output")


@dataclass(frozen=True, slots=True)
class Window:
    """A window of minutes of the day (UTC); it crosses midnight if `end` is not after `start`."""

    start: int
    end: int

    def minutes_within(self, start: float, length: float) -> float:
        """Return how many of the minutes [start, start + length) fall into this window; 0 is midnight of any day."""
        own_length = (self.end - self.start) % MINUTES_PER_DAY or MINUTES_PER_DAY
        whole_days, rest = divmod(length, MINUTES_PER_DAY)
        inside = whole_days * own_length
        first = start % MINUTES_PER_DAY
        for opens in (self.start - MINUTES_PER_DAY, self.start, self.start + MINUTES_PER_DAY):
            inside += max(0.0, min(first + rest, opens + own_length) - max(first, opens))
        return inside


@dataclass(frozen=True, slots=True)
class OffPeak(Window):
    """A window in which tokens are cheaper."""

    discount: float  # share of the token prices


@dataclass(frozen=True, slots=True)
class CheapHours(Window):
    """A window in which accelerators are cheaper."""

    gpu_hour: float


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices in $ per accelerator-hour and $ per million tokens; None: not known."""

    gpu_hour: float | None = None
    input_hit: float | None = None
    input_miss: float | None = None
    output: float | None = None
    batch_discount: float = 0.0  # share of the token prices
    off_peak: tuple[OffPeak, ...] = ()
    cheap_hours: tuple[CheapHours, ...] = ()
    source: str = ""
    date: str = ""

    def with_prices(self, **prices: float | None) -> PriceList:
        """Return this list with some prices replaced; None leaves a price unchanged.

        Raises:
            ConfigError: a value is no price.
        """
        given: dict[str, Any] = {name: price for name, price in prices.items() if price is not None}
        for name, value in given.items():
            _number(value, name)
        return replace(self, **given)

    def token_factor(self, *, is_batch: bool, start_minute: float | None, hours: float | None) -> float:
        """Return the factor on token prices, 1.0 without any discount.

        Args:
            is_batch: the batch discount applies.
            start_minute: minute of the day (UTC) at which delivery begins; None: no off-peak discount.
            hours: duration of the delivery, which is even over that time.

        Raises:
            ConfigError: `start_minute` without `hours`, if the list has off-peak hours.
        """
        factor = 1.0 - self.batch_discount * is_batch
        if start_minute is None or not self.off_peak:
            return factor
        if not hours:
            raise ConfigError("off-peak hours need to know how long the job takes; give the hours, too")
        length = hours * 60
        saved = sum(window.discount * window.minutes_within(start_minute, length) for window in self.off_peak)
        return factor * (1.0 - saved / length)

    def mean_gpu_hour(self, *, start_minute: float | None, hours: float | None) -> float | None:
        """Return the mean price of an accelerator-hour over a job in $, None if it is not known.

        Args:
            start_minute: minute of the day (UTC) at which the job begins; None: cheap hours do not count.
            hours: duration of the job.

        Raises:
            ConfigError: `start_minute` without `hours`, if the list has cheap hours.
        """
        if start_minute is None or not self.cheap_hours:
            return self.gpu_hour
        if not hours:
            raise ConfigError("cheap hours need to know how long the job takes; give the hours, too")
        start_s = start_minute * 60
        return self.gpu_cost(start_s, start_s + hours * 3600) / hours

    def gpu_hours_between(self, start_s: float, end_s: float) -> list[tuple[float, float, float]]:
        """Return consecutive (from, to, $ per accelerator-hour) in Unix seconds; 0.0 $ without a price."""
        changes = sorted({60 * minute for window in self.cheap_hours for minute in (window.start, window.end)})
        days = range(int(start_s // DAY_S), int(end_s // DAY_S) + 1)
        cuts = [
            start_s,
            *(day * DAY_S + at for day in days for at in changes if start_s < day * DAY_S + at < end_s),
            end_s,
        ]
        return [(first, last, self._gpu_hour_at((first + last) / 2)) for first, last in pairwise(cuts) if first < last]

    def gpu_cost(self, start_s: float, end_s: float) -> float:
        """Return the cost in $ of one accelerator from one Unix time to another."""
        return sum((last - first) / 3600 * price for first, last, price in self.gpu_hours_between(start_s, end_s))

    def _gpu_hour_at(self, time_s: float) -> float:
        cheap = [hours.gpu_hour for hours in self.cheap_hours if hours.minutes_within(time_s / 60, 1e-6)]
        return cheap[0] if cheap else self.gpu_hour or 0.0


def read_prices(path: Path) -> PriceList:
    """Read a price list.

    Raises:
        ConfigError: the file is missing or no TOML, has an unknown key, lacks source or date, or a value is no price.
    """
    table = read_toml(Path(path), "price list")
    known = {field.name for field in fields(PriceList)}
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: {key} is not a known key; use {', '.join(sorted(known))}")
    if not isinstance(table.get("source"), str) or not table["source"].strip():
        raise ConfigError(f"{path}: source is missing; say where the prices come from")
    if not isinstance(table.get("date"), date):
        raise ConfigError(f"{path}: date is missing or no date; write it like date = 2025-03-01")
    off_peak = tuple(
        OffPeak(start, end, _share(value, f"{path}: off_peak.discount"))
        for start, end, value in _windows(table, "off_peak", "discount", path)
    )
    cheap_hours = tuple(
        CheapHours(start, end, _number(value, f"{path}: cheap_hours.gpu_hour"))
        for start, end, value in _windows(table, "cheap_hours", "gpu_hour", path)
    )
    if cheap_hours and "gpu_hour" not in table:
        raise ConfigError(f"{path}: cheap_hours needs gpu_hour, the price of all other hours; add it")
    return PriceList(
        **{name: _number(table[name], f"{path}: {name}") for name in PRICES if name in table},
        batch_discount=_share(table.get("batch_discount", 0.0), f"{path}: batch_discount"),
        off_peak=off_peak,
        cheap_hours=cheap_hours,
        source=table["source"],
        date=table["date"].isoformat(),
    )


def minute_of_day(text: str, what: str) -> int:
    """Parse a time of day like 16:30 to minutes after midnight.

    Raises:
        ConfigError: the text is no time of day.
    """
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)", text)
    if match is None:
        raise ConfigError(f"{what} is {text!r}, not a time of day; write it like 16:30")
    return int(match[1]) * 60 + int(match[2])


def _windows(table: dict[str, Any], key: str, value: str, path: Path) -> Iterator[tuple[int, int, Any]]:
    """Yield (first minute, minute after the last, value) of each window in the tables `key`; refuse overlaps."""
    tables = table.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(window, dict) for window in tables):
        raise ConfigError(f"{path}: {key} is no list of tables; write each window as [[{key}]]")
    busy = [0.0] * MINUTES_PER_DAY
    for window in tables:
        if set(window) != {"from", "to", value}:
            raise ConfigError(f"{path}: a window of {key} has the keys {sorted(window)}; give from, to and {value}")
        start, end = (minute_of_day(str(window[name]), f"{path}: {key}.{name}") for name in ("from", "to"))
        for minute in range(MINUTES_PER_DAY):
            busy[minute] += Window(start, end).minutes_within(minute, 1)
        if max(busy) > 1:
            raise ConfigError(f"{path}: two {key} windows overlap; make them follow one another")
        yield start, end, window[value]


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{what} is {value!r}, not a price; give a number of $ that is at least 0")
    return float(value)


def _share(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{what} is {value!r}, not a share; give a number from 0 to 1")
    return float(value)
