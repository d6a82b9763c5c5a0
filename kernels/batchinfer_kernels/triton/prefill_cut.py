"""The cut of a step's prefill attention into programs: keys that are made once, and queries that share a program.

Adjacent requests with the same first pages form a run. The keys of a run's common pages (its prefix) are made once,
the keys after them once per request. A program attends with one tile of queries, which are some of one request or all
of several short requests of one run: first to the prefix, then to the own keys of one request after another.

    made keys      prefix | own keys of a | own keys of b | ...
    a program      rows of a, rows of b: all see the prefix, each its own request's keys

In any cut a row meets the tiles of its keys in ascending order, and a tile that it does not see changes none of its
bits. So the order of its sums depends on the request alone, not on the shared prefix or on neighbouring requests.
"""

# T tokens, B requests, P pages, X made keys (whole pages), N programs per head

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from batchinfer_kernels.reference.mla import PAGE_TOKENS
from batchinfer_kernels.transfer import in_one_copy

# Own keys of all requests that share a program: it works on each in turn, and should not be the step's last to end.
_MAX_STACKED_KEYS = 2048
_MANY = 2**62  # pages


@dataclass(frozen=True, slots=True)
class Work:
    """The attention of some of a step's requests, the same in all layers.

    slots_X: int64, the slot of each made key; behind a request's last token that token's slot again.
    tiles_N5: int64: first row, behind the last row, first key of the prefix and number of its keys, first own key.
    own_key_T: int64, the first own key of each row's request; of rows in another work, there.
    """

    slots_X: torch.Tensor
    tiles_N5: torch.Tensor
    own_key_T: torch.Tensor


class _Request(NamedTuple):
    place: int
    start: int  # first row
    num_tokens: int
    context: int
    shared: int  # first keys that it has in common with the request before, seen by all rows of both

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True)
class _Piece:
    """A work as it grows; the keys of a page are `valid` tokens."""

    places: list[int] = field(default_factory=list)  # in the flattened page table
    valid: list[int] = field(default_factory=list)
    tiles: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # with the number of keys of each

    def add_pages(self, request: _Request, table_width: int, first: int, stop: int, step: int) -> int:
        """Append the keys [first, stop) of a request, filled up to whole steps; return the number of the first one."""
        made = len(self.places) * PAGE_TOKENS
        last = -(-request.context // PAGE_TOKENS) - 1
        for key in range(first, first + -(-(stop - first) // step) * step, PAGE_TOKENS):
            page = min(key // PAGE_TOKENS, last)
            self.places.append(request.place * table_width + page)
            self.valid.append(min(PAGE_TOKENS, request.context - page * PAGE_TOKENS))
        return made


def cut(
    page_table_BP: torch.Tensor,
    num_tokens_B: torch.Tensor,
    context_tokens_B: torch.Tensor,
    shared_pages_B: torch.Tensor | None,
    *,
    tile_rows: int,
    tile_keys: int,
    max_keys: int,
) -> list[Work]:
    """Cut the work of all requests, on the host, which knows the lengths.

    Args:
        page_table_BP: int64, on the device.
        num_tokens_B, context_tokens_B: on the host; a chunk is the last `num_tokens` of its context.
        shared_pages_B: on the host, first pages that a request has in common with the one before it; None: none.
        tile_rows, tile_keys: of a program's tiles; keys in multiples of a page.
        max_keys: made at a time, if several requests need them.
    """
    pieces: list[_Piece] = []
    own_keys: list[int] = [0] * len(num_tokens_B)
    width = page_table_BP.shape[1]
    for run, prefix in _runs(_requests(num_tokens_B, context_tokens_B, shared_pages_B, tile_keys)):
        prefix_key = None
        stack: list[_Request] = []  # short requests that share the program that is being filled
        for request in run:
            needed = request.context - (0 if prefix_key is None else prefix)
            needed = -(-needed // tile_keys) * tile_keys
            if not pieces or len(pieces[-1].places) * PAGE_TOKENS + needed > max_keys:
                if pieces and prefix_key is not None:
                    _close(pieces[-1], stack, prefix_key, prefix, own_keys)
                pieces.append(_Piece())
                prefix_key = None
            piece = pieces[-1]
            if prefix_key is None:
                prefix_key = piece.add_pages(request, width, 0, prefix, tile_keys)
            own_keys[request.place] = piece.add_pages(request, width, prefix, request.context, tile_keys)
            if not _fits(stack, request, prefix, tile_rows):
                _close(piece, stack, prefix_key, prefix, own_keys)
            if request.num_tokens <= tile_rows:
                stack.append(request)
                continue
            for row in range(request.start, request.stop, tile_rows):
                behind = min(row + tile_rows, request.stop)
                tile = row, request.stop, prefix_key, prefix, own_keys[request.place]
                piece.tiles.append((request.context - request.stop + behind, tile))
        if stack and prefix_key is not None:
            _close(pieces[-1], stack, prefix_key, prefix, own_keys)
    return _on_device(pieces, page_table_BP, torch.tensor(own_keys).repeat_interleave(num_tokens_B))


def _requests(
    num_tokens_B: torch.Tensor, context_tokens_B: torch.Tensor, shared_pages_B: torch.Tensor | None, tile_keys: int
) -> list[_Request]:
    """Return the requests that have rows, with what each shares with the one before it, in whole tiles of keys."""
    requests: list[_Request] = []
    num_shared = [0] * len(num_tokens_B) if shared_pages_B is None else shared_pages_B.tolist()
    start, common, before = 0, _MANY, 0
    lengths = zip(num_tokens_B.tolist(), context_tokens_B.tolist(), num_shared, strict=True)
    for index, (num_tokens, context, pages) in enumerate(lengths):
        common = min(common, pages)
        if num_tokens:
            seen = context - num_tokens  # keys that all rows see
            shared = min(common * PAGE_TOKENS, before, seen) // tile_keys * tile_keys if requests else 0
            requests.append(_Request(index, start, num_tokens, context, shared))
            start, common, before = start + num_tokens, _MANY, seen
    return requests


def _runs(requests: Sequence[_Request]) -> Iterator[tuple[list[_Request], int]]:
    """Yield runs of requests, each with its number of common first keys.

    A request joins a run if that spares at least as many keys as beginning a run with the one behind it.
    """
    run: list[_Request] = []
    prefix = 0
    for place, request in enumerate(requests):
        following = requests[place + 1].shared if place + 1 < len(requests) else 0
        joined = min(prefix, request.shared) if len(run) > 1 else request.shared
        apart = (len(run) - 1) * prefix + (following if following > request.shared else 0)
        if run and len(run) * joined < apart:
            yield run, prefix if len(run) > 1 else 0
            run, joined = [], 0
        run.append(request)
        prefix = joined
    if run:
        yield run, prefix if len(run) > 1 else 0


def _fits(stack: Sequence[_Request], request: _Request, prefix: int, tile_rows: int) -> bool:
    """Return whether the program that `stack` fills has room for a whole request, too."""
    if not stack:
        return True
    num_rows = request.stop - stack[0].start
    return num_rows <= tile_rows and sum(one.context - prefix for one in (*stack, request)) <= _MAX_STACKED_KEYS


def _close(piece: _Piece, stack: list[_Request], prefix_key: int, prefix: int, own_keys: Sequence[int]) -> None:
    """Add the program of the stacked requests, if there are any, and empty the stack."""
    if stack:
        keys = prefix + sum(one.context - prefix for one in stack)
        piece.tiles.append((keys, (stack[0].start, stack[-1].stop, prefix_key, prefix, own_keys[stack[0].place])))
        stack.clear()


def _on_device(pieces: Sequence[_Piece], page_table_BP: torch.Tensor, own_key_T: torch.Tensor) -> list[Work]:
    """Copy all cuts to the device of the page table at once."""
    on_host, device = [own_key_T], page_table_BP.device
    for piece in pieces:  # the tiles with most keys first, so that no long one starts late
        piece.tiles.sort(key=lambda tile: tile[0], reverse=True)
        lists = piece.places, piece.valid, [tile for _, tile in piece.tiles]
        on_host += [torch.tensor(values, dtype=torch.int64) for values in lists]
    own_key_T, *rest = in_one_copy(on_host, device)
    in_page = torch.arange(PAGE_TOKENS, device=device)
    works = []
    for places, valid, tiles_N5 in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        page_ids = page_table_BP.flatten().index_select(0, places)
        slots = page_ids[:, None] * PAGE_TOKENS + torch.minimum(in_page, valid[:, None] - 1)
        works.append(Work(slots.flatten(), tiles_N5, own_key_T))
    return works
