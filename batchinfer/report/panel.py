"""The report of a run for a terminal: figures under headings, then time by part, plan, ranks and errors."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from batchinfer.report import forms
from batchinfer.report.figures import EXPERTS, GROUPS, PART_COSTS, PARTS, PREDICTIONS, RANKS, STORE
from batchinfer.report.forms import Value
from batchinfer.report.read import RankDetails, Report, is_worth_showing
from batchinfer.report.terminal import (
    HEADING,
    LINED_UP,
    WARNING,
    WIDTH,
    figure_lines,
    figure_table,
    line,
    table,
    text,
)
from batchinfer.sanitize import count_text, display_width, fit

Cells = Sequence[str | Text]
DECODE_HEADER = ("Decode, from s", "KV, mean", "max / mean", "at best", "requests", "max / mean")
LENGTH_HEADER = ("Output tokens of a row", "rows", "share", "by thinking")
BAR_LETTERS = 14  # length of the longest bar
MAX_SHARDS = 10  # unreadable shards that are listed


def panel(report: Report) -> Iterator[RenderableType]:
    """Yield the lines and tables of a run's report."""
    yield text(_heading(report), HEADING)
    if report.unfinished is not None:
        yield text(report.unfinished.sentence(), WARNING)
    for warning in report.warnings:
        yield text(f"warning: {warning}", WARNING)
    first = tuple(group for group in GROUPS if group not in (PART_COSTS, RANKS, EXPERTS, STORE))
    yield from figure_table(report.values, first)
    if sum(report.seconds.values()):
        yield _number_table(["Where the time went", "rank-seconds", "share", "cost, $"], _part_lines(report))
    plan = list(_plan_lines(report))
    if plan:
        yield _number_table(["Plan", "planned", "happened", "at best"], plan)
    if len(report.lengths) > 1:
        yield table(list(_length_lines(report)), "lrrrl")
    several = len(report.ranks) > 1
    if several:
        yield _number_table(["Ranks", "prefilled", "decoded", "busy s"], _rank_lines(report.ranks))
    lines = list(figure_lines(report.values, [RANKS]))[several:]  # the table of ranks has the heading already
    balance = _balance_lines(report.ranks) if several else ()
    figures = figure_lines(report.values, [EXPERTS, STORE])
    yield table([*balance, *lines, *figures], "lrw", min_widths=LINED_UP)
    over_time = list(_decode_lines(report))
    if over_time:
        yield table([[text(name, HEADING) for name in DECODE_HEADER], *over_time], "lrrrrr")
    yield from _trouble(report)


def _heading(report: Report) -> str:
    """Return one line with the run, its model and its precision; a long model path keeps its end."""
    start, end = f"{fit(report.run, WIDTH // 2)}   (", f", {fit(report.dtype, WIDTH // 3)})"
    room = max(1, WIDTH - display_width(start) - display_width(end))
    return f"{start}{fit(report.model, room, keep_end=True)}{end}"


def _number_table(header: list[str], lines: Iterator[Cells] | list[Cells]) -> RenderableType:
    return table([[text(name, HEADING) for name in header], *lines], "lrrr", min_widths=LINED_UP)


def _part_lines(report: Report) -> Iterator[Cells]:
    """Yield seconds, share and cost of each part of the ranks' time."""
    total = sum(report.seconds.values())
    for part, part_s in report.seconds.items():
        cost = forms.dollars(report.values[f"{part}_cost_usd"])
        yield [f"  {PARTS[part]}", forms.rate(part_s), f"{part_s / total:.1%}", cost]


def _plan_lines(report: Report) -> Iterator[Cells]:
    """Yield planned and actual value of each prediction that is worth showing."""
    for found in filter(is_worth_showing, report.predictions):
        label, form = PREDICTIONS[found.name]
        yield [f"  {label}", form(found.planned), form(found.happened), form(found.at_best)]


def _decode_lines(report: Report) -> Iterator[Cells]:
    """Yield KV tokens and requests per decode rank, mean and busiest, for each stretch of time with decode steps."""
    for stretch in report.decode_over_time:
        cells = [f"  {stretch['second']:,.6g}"]
        for kind, form in (("kv", forms.count), ("requests", forms.rate)):
            cells.append(form(stretch[f"{kind}_mean"]))
            cells.append(forms.ratio(stretch[f"{kind}_max_over_mean"]))
        cells.insert(3, forms.ratio(stretch["kv_bound"]))
        yield cells


def _length_lines(report: Report) -> Iterator[Cells]:
    """Yield a histogram of answer lengths, with the lengths of thinking if any row has some."""
    num_rows = sum(length["rows"] for length in report.lengths)
    most = max(length["rows"] for length in report.lengths)
    has_thinking = bool(report.values["reasoning.rows"])
    yield [text(name, HEADING) for name in LENGTH_HEADER[: 3 + has_thinking]]
    for length in report.lengths:
        rows = length["rows"]
        thinking = forms.count(length["reasoning_rows"]) if has_thinking else ""
        bar = "█" * round(rows / most * BAR_LETTERS) or "▏" * bool(rows)
        yield [f"  {forms.span(length['from_tokens'], length['to_tokens'])}", forms.count(rows),
               f"{rows / num_rows:.1%}", thinking, bar]  # fmt: skip


def _rank_lines(ranks: tuple[RankDetails, ...]) -> Iterator[Cells]:
    digits = len(str(ranks[-1].rank))
    for rank in ranks:
        tokens = forms.count(rank.prefill_tokens), forms.count(rank.output_tokens)
        yield [f"  rank {rank.rank:>{digits}}  {rank.role}", *tokens, forms.rate(rank.busy_s)]


def _balance_lines(ranks: tuple[RankDetails, ...]) -> Iterator[Cells]:
    """Yield the imbalance of expert rows over the ranks of each role, which share the experts between them."""
    roles = list(dict.fromkeys(rank.role for rank in ranks))
    for role in roles:
        rows = [rank.expert_rows for rank in ranks if rank.role == role]
        if len(rows) > 1:
            ratio: Value = max(rows) * len(rows) / sum(rows) if any(rows) else None
            note = f"{role} ranks" if len(roles) > 1 else ""
            yield line("expert rows, max / mean", forms.rate(ratio), note=note if any(rows) else "no expert was used")


def _trouble(report: Report) -> Iterator[RenderableType]:
    """Yield the unreadable shards and the most frequent errors of rows."""
    shards, errors = report.unreadable_shards, report.errors
    if shards:
        yield text(f"Unreadable shards ({len(shards):,})", HEADING)
        for path, problem in shards[:MAX_SHARDS]:
            yield text(f"  {fit(path, WIDTH - 2, keep_end=True)}\n    {fit(problem, WIDTH - 4)}")
        if len(shards) > MAX_SHARDS:
            yield text(f"  and {len(shards) - MAX_SHARDS:,} more")
    if errors:
        yield text("Errors", HEADING)
        for error, num_rows in errors:
            yield text(f"{num_rows:>12,} x {fit(error, WIDTH - 15)}")
        if report.num_error_texts > len(errors):
            num_more = report.num_error_texts - len(errors)
            yield text(f"{'':>12}   and {count_text(num_more, 'other text')} (column error of the outputs)")
