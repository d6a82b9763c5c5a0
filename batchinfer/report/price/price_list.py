"""Prices as data: a TOML file with source and date, discounts for batches and for hours of the day.

Every price may be left out; figures that need it are then unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from batchinfer.config import read_toml
from batchinfer.records import ConfigError

MINUTES_PER_DAY = 24 * 60
PRICES = ("gpu_hour", "input_hit", "input_miss", "output")


@dataclass(frozen=True, slots=True)
class OffPeak:
    """Minutes of the day (UTC) with cheaper tokens; `end` at or before `start` crosses midnight."""

    start: int
    end: int
    discount: float  # share of the token prices

    def minutes_within(self, start: float, length: float) -> float:
        """Minutes of [start, start + length), counted from midnight, that fall into this window on any day."""
        own_length = (self.end - self.start) % MINUTES_PER_DAY or MINUTES_PER_DAY
        whole_days, rest = divmod(length, MINUTES_PER_DAY)
        inside = whole_days * own_length
        first = start % MINUTES_PER_DAY
        for opens in (self.start - MINUTES_PER_DAY, self.start, self.start + MINUTES_PER_DAY):
            inside += max(0.0, min(first + rest, opens + own_length) - max(first, opens))
        return inside


@dataclass(frozen=True, slots=True)
class PriceList:
    """$ per accelerator-hour and $ per million tokens; None: not known."""

    gpu_hour: float | None = None
    input_hit: float | None = None
    input_miss: float | None = None
    output: float | None = None
    batch_discount: float = 0.0  # share of the token prices
    off_peak: tuple[OffPeak, ...] = ()
    source: str = ""
    date: str = ""

    def with_prices(self, **prices: float | None) -> PriceList:
        """This list with some prices replaced; None leaves one as it is.

        Raises:
            ConfigError: a value that is no price.
        """
        given: dict[str, Any] = {name: price for name, price in prices.items() if price is not None}
        for name, value in given.items():
            _number(value, name)
        return replace(self, **given)

    def token_factor(self, *, is_batch: bool, start_minute: float | None, hours: float | None) -> float:
        """What the token prices are multiplied by, 1.0 without any discount.

        Args:
            is_batch: the batch discount applies.
            start_minute: minute of the day (UTC) at which delivery begins, evenly from then on; None: not off-peak.
            hours: how long that goes on.

        Raises:
            ConfigError: a start without hours.
        """
        factor = 1.0 - self.batch_discount * is_batch
        if start_minute is None or not self.off_peak:
            return factor
        if not hours:
            raise ConfigError("off-peak hours need to know how long the job takes; give the hours, too")
        length = hours * 60
        saved = sum(window.discount * window.minutes_within(start_minute, length) for window in self.off_peak)
        return factor * (1.0 - saved / length)


def read_prices(path: Path) -> PriceList:
    """Read a price list.

    Raises:
        ConfigError: no such file, no TOML, an unknown key, a missing source or date, or a value that is no price.
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
    windows = table.get("off_peak", [])
    if not isinstance(windows, list) or not all(isinstance(window, dict) for window in windows):
        raise ConfigError(f"{path}: off_peak is no list of tables; write each window as [[off_peak]]")
    off_peak = tuple(_off_peak(window, path) for window in windows)
    busy = [0.0] * MINUTES_PER_DAY
    for window in off_peak:
        for minute in range(MINUTES_PER_DAY):
            busy[minute] += window.minutes_within(minute, 1)
    if max(busy) > 1:
        raise ConfigError(f"{path}: two off_peak windows overlap; make them follow one another")
    return PriceList(
        **{name: _number(table[name], f"{path}: {name}") for name in PRICES if name in table},
        batch_discount=_share(table.get("batch_discount", 0.0), f"{path}: batch_discount"),
        off_peak=off_peak,
        source=table["source"],
        date=table["date"].isoformat(),
    )


def minute_of_day(text: str, what: str) -> int:
    """Minutes after midnight of a time like 16:30.

    Raises:
        ConfigError: the text is no time of day.
    """
    match = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)", text)
    if match is None:
        raise ConfigError(f"{what} is {text!r}, not a time of day; write it like 16:30")
    return int(match[1]) * 60 + int(match[2])


def _off_peak(window: dict[str, Any], path: Path) -> OffPeak:
    if set(window) != {"from", "to", "discount"}:
        raise ConfigError(f"{path}: an off_peak window has the keys {sorted(window)}; give from, to and discount")
    start, end = (minute_of_day(str(window[key]), f"{path}: off_peak.{key}") for key in ("from", "to"))
    return OffPeak(start, end, _share(window["discount"], f"{path}: off_peak.discount"))


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{what} is {value!r}, not a price; give a number of $ that is at least 0")
    return float(value)


def _share(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{what} is {value!r}, not a share; give a number from 0 to 1")
    return float(value)
