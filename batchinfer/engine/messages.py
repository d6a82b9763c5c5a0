"""The nouns of records.py and feed.py as plain dictionaries for the channel, and back. No torch: both ends use it."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import lru_cache
from typing import Any

from batchinfer.engine.feed import Adoption, CachedTokens, Handover, StepRecord, StepReport
from batchinfer.parallel.spans import Span
from batchinfer.records import Completion, Request, RequestKey, RequestTimes, Sampling, TokenLogprob

Plain = dict[str, Any]

_FIELDS = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (CachedTokens, Completion, Handover, Request, RequestTimes, StepRecord)
}


def plain_request(request: Request) -> Plain:
    return {**_shallow(request), "key": plain_key(request.key), "sampling": _plain_sampling(request.sampling)}


def request_of(plain: Plain) -> Request:
    sampling = plain["sampling"]
    return Request(
        **{
            **plain,
            "key": key_of(plain["key"]),
            "last_units": tuple(plain["last_units"]),
            "sampling": Sampling(
                **{
                    **sampling,
                    "stop": tuple(sampling["stop"]),
                    "stop_token_ids": tuple(sampling["stop_token_ids"]),
                }
            ),
        }
    )


def plain_key(key: RequestKey) -> list[int]:
    return [key.shard, key.row, key.sample]


def key_of(plain: list[int]) -> RequestKey:
    return RequestKey(*plain)


def plain_report(report: StepReport) -> Plain:
    return {
        "record": _shallow(report.record),
        "completions": [plain_completion(completion) for completion in report.completions],
        "started": [plain_key(key) for key in report.started],
        "spans": [[span.kind, span.name, span.micro_batch, span.start_s, span.end_s] for span in report.spans],
    }


def report_of(plain: Plain) -> StepReport:
    return StepReport(
        record=StepRecord(**plain["record"]),
        completions=[completion_of(item) for item in plain["completions"]],
        started=[key_of(item) for item in plain["started"]],
        spans=[Span(*item) for item in plain["spans"]],
    )


def plain_completion(completion: Completion) -> Plain:
    logprobs = completion.logprobs
    return {
        **_shallow(completion),
        "key": plain_key(completion.key),
        "times": _shallow(completion.times),
        "logprobs": None if logprobs is None else [asdict(item) for item in logprobs],
    }


def completion_of(plain: Plain) -> Completion:
    logprobs = plain["logprobs"]
    return Completion(
        **{
            **plain,
            "key": key_of(plain["key"]),
            "times": RequestTimes(**plain["times"]),
            "logprobs": None if logprobs is None else tuple(_logprob_of(item) for item in logprobs),
        }
    )


def plain_handover(handover: Handover) -> Plain:
    return {
        **_shallow(handover),
        "key": plain_key(handover.key),
        "logprobs": [asdict(item) for item in handover.logprobs],
        "times": _shallow(handover.times),
        "cached": _shallow(handover.cached),
    }


def handover_of(plain: Plain) -> Handover:
    return Handover(
        **{
            **plain,
            "key": key_of(plain["key"]),
            "logprobs": [_logprob_of(item) for item in plain["logprobs"]],
            "times": RequestTimes(**plain["times"]),
            "cached": CachedTokens(**plain["cached"]),
        }
    )


def plain_adoption(adoption: Adoption) -> Plain:
    return {"request": plain_request(adoption.request), "handover": plain_handover(adoption.handover)}


def adoption_of(plain: Plain) -> Adoption:
    return Adoption(request_of(plain["request"]), handover_of(plain["handover"]))


def _shallow(item: Any) -> Plain:
    """A dataclass's fields; token lists are not copied, which asdict does one by one."""
    return {name: getattr(item, name) for name in _FIELDS[type(item)]}


@lru_cache(maxsize=256)
def _plain_sampling(sampling: Sampling) -> Plain:
    """Shared by the messages of all requests that are sampled alike: not to be changed."""
    return asdict(sampling)


def _logprob_of(plain: Plain) -> TokenLogprob:
    top = tuple((token, value) for token, value in plain["top"])
    return TokenLogprob(plain["token_id"], plain["logprob"], top)
