"""`batchinfer price` and price lists: the published day, discounts, what-if on a run, bad input."""

import json
from pathlib import Path

import pytest

from batchinfer.records import ConfigError
from batchinfer.report.price.price_list import OffPeak, PriceList, read_prices
from batchinfer.report.price.what_if import Amounts, price
from support.jobs import batchinfer
from support.runs import request, session, write_run

LISTS = Path(__file__).parents[3] / "jobs" / "prices"
GOOD = 'source = "a page"\ndate = 2025-03-01\n'
# 27 February 2025, 12:00 to 28 February, 12:00 (UTC+8), as published by DeepSeek
DAY = [
    *("--hit-tokens", "342e9", "--miss-tokens", "266e9", "--output-tokens", "168e9"),
    *("--nodes", "226.75", "--gpus-per-node", "8", "--hours", "24"),
]
R1 = ["--gpu-hour", "2", "--price-hit", "0.14", "--price-miss", "0.55", "--price-output", "2.19"]


@pytest.mark.parametrize("prices", [R1, ["--prices", LISTS / "deepseek-r1.toml"]])
def test_the_published_day(prices):
    figures = json.loads(batchinfer("price", *DAY, *prices, "--json").out)
    assert figures["cost_usd"] == pytest.approx(87_072)
    assert figures["revenue_usd"] == pytest.approx(562_100)  # published: 562,027, from tokens that are not rounded
    assert figures["cost_profit_margin"] == pytest.approx(5.45, abs=0.01)
    assert figures["gross_margin"] == pytest.approx(0.845, abs=0.0005)
    assert figures["cache_hit_rate"] == pytest.approx(0.5625)
    assert figures["usd_per_million_output_tokens"] == pytest.approx(87_072 / 168e3)
    assert figures["usd_per_million_tokens"] == pytest.approx(87_072 / 776e3)
    assert figures["usd_per_million_computed_tokens"] == pytest.approx(87_072 / 434e3)


def test_the_day_as_text_names_both_margins_and_the_source():
    text = batchinfer("price", *DAY, "--prices", LISTS / "deepseek-r1.toml").out
    for words in ("87,072.00 $", "562,100.00 $", "545.6 %", "84.5 %"):
        assert words in " ".join(text.split())
    assert "open-infra-index" in text


def test_what_is_not_given_is_unknown_and_not_zero():
    figures = json.loads(batchinfer("price", *DAY[6:], "--gpu-hour", "2", "--json").out)
    assert figures["cost_usd"] == pytest.approx(87_072)
    assert figures["revenue_usd"] is None
    assert figures["gross_margin"] is None


@pytest.mark.parametrize(
    ("start", "length", "inside"),
    [
        # the window 16:30-00:30 lies on both sides of midnight
        (16 * 60 + 30, 480, 480),
        (0, 60, 30),
        (0, 24 * 60, 480),
        (12 * 60, 3 * 24 * 60, 3 * 480),
        (23 * 60, 120, 90),
        (8 * 60, 60, 0),
        (20 * 60, 24 * 60 + 60, 480 + 60),
    ],
)
def test_minutes_within_a_window(start, length, inside):
    window = OffPeak(16 * 60 + 30, 30, 0.75)
    minute_by_minute = sum((minute % 1440) >= 990 or (minute % 1440) < 30 for minute in range(start, start + length))
    assert window.minutes_within(start, length) == inside == minute_by_minute


def test_discounts_lower_the_revenue_only():
    day = Amounts(342e9, 266e9, 168e9, nodes=226.75, gpus_per_node=8, hours=24)
    prices = read_prices(LISTS / "deepseek-r1.toml")
    full, off_peak = price(day, prices), price(day, prices, start_minute=4 * 60)
    assert off_peak["cost_usd"] == full["cost_usd"]
    assert off_peak["revenue_usd"] == pytest.approx(full["revenue_usd"] * (1 - 0.75 / 3))  # 8 of 24 hours at a quarter
    half = PriceList(2.0, 0.14, 0.55, 2.19, batch_discount=0.5)
    assert price(day, half, is_batch=True)["revenue_usd"] == pytest.approx(full["revenue_usd"] / 2)
    assert price(day, half)["revenue_usd"] == full["revenue_usd"]


def test_the_batch_discount_and_off_peak_hours_of_a_list_are_asked_for(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'source = "a page"\ndate = 2025-03-01\ngpu_hour = 2.0\ninput_hit = 0.14\ninput_miss = 0.55\noutput = 2.19\n'
        'batch_discount = 0.5\n[[off_peak]]\nfrom = "22:00"\nto = "04:00"\ndiscount = 0.25\n'
    )
    plain, batch, both = (
        json.loads(batchinfer("price", *DAY, "--prices", prices, *options, "--json").out)
        for options in ([], ["--batch"], ["--batch", "--start", "12:00"])
    )
    assert (plain["token_price_factor"], plain["revenue_usd"]) == (1.0, pytest.approx(562_100))
    assert batch["revenue_usd"] == pytest.approx(562_100 / 2)
    # 6 of 24 hours a quarter cheaper, besides half of everything
    assert both["token_price_factor"] == pytest.approx(0.5 * (1 - 0.25 * 6 / 24))
    assert both["cost_usd"] == plain["cost_usd"] == pytest.approx(87_072)
    text = batchinfer("price", *DAY, "--prices", prices, "--batch").out
    assert "a page (2025-03-01)" in text


def test_cheap_hours_count_from_the_start_of_a_job(tmp_path):
    path = tmp_path / "list.toml"
    path.write_text(GOOD + 'gpu_hour = 2.0\n[[cheap_hours]]\nfrom = "22:00"\nto = "06:00"\ngpu_hour = 0.5\n')
    numbers = ("--nodes", "2", "--gpus-per-node", "4", "--json")

    def cost(*arguments):
        figures = json.loads(batchinfer("price", "--prices", path, *numbers, *arguments).out)
        assert figures["cost_usd"] == pytest.approx(figures["gpu_hours"] * figures["mean_gpu_hour_usd"])
        return figures["cost_usd"]

    assert cost("--hours", "10") == pytest.approx(8 * 10 * 2.0)
    # 20:00 to 06:00: two hours at 2 $, eight at 0.5 $
    assert cost("--hours", "10", "--start", "20:00") == pytest.approx(8 * (2 * 2.0 + 8 * 0.5))
    # two whole days: 16 of 24 hours at 2 $
    assert cost("--hours", "48", "--start", "07:30") == pytest.approx(8 * 2 * (16 * 2.0 + 8 * 0.5))


def test_accelerators_are_cheaper_at_hours_of_the_day(tmp_path):
    #  days    | 0           | 1           |        cheap from 22:00 to 06:00 UTC
    #              6      22     6      22
    path = tmp_path / "prices.toml"
    path.write_text(GOOD + 'gpu_hour = 2.0\n[[cheap_hours]]\nfrom = "22:00"\nto = "06:00"\ngpu_hour = 0.5\n')
    prices, hour = read_prices(path), 3600.0
    assert prices.gpu_hours_between(20 * hour, 55 * hour) == [
        (20 * hour, 22 * hour, 2.0),
        (22 * hour, 30 * hour, 0.5),
        (30 * hour, 46 * hour, 2.0),
        (46 * hour, 54 * hour, 0.5),
        (54 * hour, 55 * hour, 2.0),
    ]
    assert prices.gpu_cost(20 * hour, 31 * hour) == pytest.approx(2 * 2.0 + 8 * 0.5 + 1 * 2.0)
    assert PriceList(gpu_hour=3.0).gpu_hours_between(0.0, 1.0) == [(0.0, 1.0, 3.0)]
    assert PriceList().gpu_cost(0.0, hour) == 0.0


@pytest.mark.parametrize("name", sorted(path.name for path in LISTS.glob("*.toml")))
def test_every_price_list_has_source_date_and_prices(name):
    prices = read_prices(LISTS / name)
    assert prices.source
    assert prices.date
    assert None not in (prices.gpu_hour, prices.input_hit, prices.input_miss, prices.output)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("date = 2025-03-01", ["source"]),
        ('source = "a page"', ["date"]),
        (GOOD + "gpu_houre = 2", ["gpu_houre", "not a known key"]),
        (GOOD + "output = -1", ["output", "-1"]),
        (GOOD + "output = nan", ["output", "nan"]),
        (GOOD + "batch_discount = 1.5", ["batch_discount", "1.5"]),
        (GOOD + '[[off_peak]]\nfrom = "25:00"\nto = "1:00"\ndiscount = 0.5', ["off_peak.from", "25:00"]),
        (GOOD + '[[off_peak]]\nfrom = "01:00"\ndiscount = 0.5', ["off_peak", "from, to and discount"]),
        (GOOD + '[[cheap_hours]]\nfrom = "01:00"\nto = "02:00"\ngpu_hour = 1.0', ["cheap_hours needs gpu_hour"]),
        (
            GOOD + 'gpu_hour = 2\n[[cheap_hours]]\nfrom = "01:00"\nto = "02:00"\ndiscount = 1.0',
            ["from, to and gpu_hour"],
        ),
        (GOOD + 2 * '[[off_peak]]\nfrom = "01:00"\nto = "02:00"\ndiscount = 0.5\n', ["overlap"]),
        ("not toml", ["cannot read"]),
    ],
)
def test_a_bad_price_list_is_named(tmp_path, text, words):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_prices(path)
    for word in [str(path), *words]:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["neither cost nor revenue"]),
        ([*DAY, *R1, "--start", "8"], ["--start", "16:30"]),
        ([*DAY, *R1, "--start", "08:00"], ["--start", "--prices FILE"]),
        ([*DAY, *R1, "--batch"], ["--batch", "--prices FILE"]),
        (["--hit-tokens", "-1", *DAY[2:], *R1], ["--hit-tokens", "-1"]),
        ([*DAY, *R1, "--gpu-hour", "-2"], ["gpu_hour", "-2"]),
        (["--prices", "nowhere.toml"], ["nowhere.toml"]),
        (["--run", "nowhere"], ["nowhere"]),
        (["--nodes", "many"], ["many"]),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(arguments, words):
    ended = batchinfer("price", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err


def test_a_run_is_the_start_and_options_replace_its_numbers(tmp_path):
    run = write_run(
        tmp_path / "run",
        requests=[request(0, 1000, 500, cached_memory_tokens=400)],
        nodes=[session("s1", 0.0, 7200.0, prefill_s=1.0)],
    )
    (run / "job.toml").write_text(
        '[input]\nfiles = ["a.parquet"]\nprompt = "p"\n[output]\ndir = "."\n[model]\npath = "m"\n'
        "[sampling]\nmax_tokens = 1\n[pricing]\ngpu_hour = 2.0\ninput_hit = 1.0\ninput_miss = 2.0\noutput = 3.0\n"
    )
    figures = json.loads(batchinfer("price", "--run", run, "--json").out)
    assert figures["cached_tokens"] == 400
    assert figures["cost_usd"] == pytest.approx(2.0 * figures["gpu_hours"])
    assert figures["revenue_usd"] == pytest.approx((400 * 1 + 600 * 2 + 500 * 3) / 1e6)
    cheaper = json.loads(batchinfer("price", "--run", run, "--gpu-hour", "1", "--json").out)
    assert cheaper["cost_usd"] == pytest.approx(figures["cost_usd"] / 2)
    larger = json.loads(batchinfer("price", "--run", run, "--nodes", "3", "--gpus-per-node", "8", "--json").out)
    assert larger["gpu_hours"] == pytest.approx(24 * 2)
    alone = batchinfer("price", "--run", run, "--hours", "5")
    assert alone.code == 2
    assert "--hours alone" in alone.err
