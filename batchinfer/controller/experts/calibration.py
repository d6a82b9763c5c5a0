"""Choice of the prompt pieces that ranks run first, to measure the experts' loads when no earlier run has.

The pieces are a hundredth of the job's prompt tokens, within fixed bounds.
"""

import numpy as np

from batchinfer.records import Request

SHARE = 0.01  # of the prompt tokens that the job computes,
LEAST_TOKENS, MOST_TOKENS = 256, 2048  # but within these bounds
LARGEST_SHARE = 0.0625  # and never more than this share
PIECE_TOKENS = 16
MOST_UNITS = 16  # to read the pieces from


def num_calibration_tokens(job_tokens: int) -> int:
    """Return the number of tokens to calibrate with, for a job that computes `job_tokens` prompt tokens."""
    wanted = min(max(LEAST_TOKENS, int(SHARE * job_tokens)), MOST_TOKENS)
    return min(wanted, int(LARGEST_SHARE * job_tokens))


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, evenly spaced."""
    return sorted({int((place + 0.5) * count / most) for place in range(most)}) if count > most else list(range(count))


def prompt_pieces(requests: list[Request], num_tokens: int) -> list[list[int]]:
    """Return pieces of prompts, evenly spread over the tokens to compute; one of each prompt group if there is room.

    Args:
        requests: in the plan's order. A shared prefix is computed with the first request that has it.
        num_tokens: approximate total of all pieces.
    """
    own = np.array([len(request.token_ids) - request.cached_tokens for request in requests], dtype=np.int64)
    ends, num_pieces = own.cumsum(), num_tokens // PIECE_TOKENS
    if not num_pieces or not len(own) or not ends[-1]:
        return []
    middles = [int(np.median(places)) for places in _places_of_groups(requests)]
    points = [int(ends[middles[index]] - own[middles[index]] // 2 - 1) for index in spread(len(middles), num_pieces)]
    points += [int(ends[-1] * (place + 0.5) / num_pieces) for place in range(max(0, num_pieces - len(points)))]
    pieces = []
    for point in sorted(points):
        place = int(np.searchsorted(ends, point, side="right"))
        tokens = requests[place].token_ids
        start = len(tokens) - int(ends[place] - point)
        start = max(0, min(start, len(tokens) - PIECE_TOKENS))
        pieces.append(tokens[start : start + PIECE_TOKENS])
    return pieces


def _places_of_groups(requests: list[Request]) -> list[list[int]]:
    """Return the indices of the requests of each prompt group."""
    places: dict[int, list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(request.prompt_group, []).append(place)
    return list(places.values())
