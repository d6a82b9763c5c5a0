"""Effects of positions on queries and keys, by config.json: rotary embedding, YaRN, a factor on queries."""

import math
from dataclasses import dataclass, replace

from batchinfer.model.config_keys import judge_unread_keys
from batchinfer.model.config_reader import ConfigReader
from batchinfer.model.families import Family
from batchinfer.records import ModelError

_LONGROPE_POSITIONS = 4096  # original ones where config.json does not say them, as in transformers
_MAX_PAIR_FACTOR = 10**6  # published ones are below 100
_MAX_WINDOWS = 2**16  # each has a factor that is computed at the start; published models have 36 and 128


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries grow with their position (Llama 4; Mistral 4), by 1 + beta * ln(1 + floor(position / window))."""

    beta: float
    window: int  # positions with one factor
    num_windows: int  # those of the model's positions and one more


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Effects of positions on queries and keys: rotary embedding, and a factor on queries.

    rope_type: "default"; "linear": all angles are `factor` times smaller; "llama3": pairs that turn less often than
        `low_freq_factor` times within the original window are slowed by `factor`, those that turn more often than
        `high_freq_factor` times stay, and others are between; "yarn" (arXiv 2309.00071); "longrope" (arXiv
        2402.13753): the angles of each pair are smaller by its own of `pair_factors`.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    pair_factors: tuple[float, ...] = ()
    query_scale: QueryScale | None = None

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin: the stated attention factor, else mscale ÷ mscale_all_dim, else YaRN's own."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor on the attention scores: the square of YaRN's mscale over all dimensions."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return _yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def read_rope(
    reader: ConfigReader, family: Family, max_positions: int, rotary_share: float, kind: str | None = None
) -> RopeConfig:
    """Read RoPE from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (original); both must agree.

    Args:
        rotary_share: share of a head's width that is rotary.
        kind: of layers, in layer_types, to which `rope_parameters` gives a section each; None: it is of all layers.
    """
    _check_share(reader, family, rotary_share)
    reader.pass_over("original_max_position_embeddings")  # it counts with some types alone, which read it again
    sections = {"rope_parameters": reader.section("rope_parameters"), "rope_scaling": reader.section("rope_scaling")}
    if kind is not None and (of_kinds := sections["rope_parameters"]) is not None:
        sections["rope_parameters"] = of_kinds.section(kind)
    ropes = {
        key: _parse_rope(reader, section, family, max_positions, rotary_share)
        for key, section in sections.items()
        if section is not None
    }
    if len(set(ropes.values())) > 1:
        raise ModelError(f"{reader.path}: rope_parameters and rope_scaling say different things; keep one of them.")
    if ropes:
        return next(iter(ropes.values()))
    if family.scales_queries:
        raise reader.unsupported("rope_parameters", None, "a JSON object with llama_4_scaling_beta")
    if family.grouped is not None and family.grouped.needs_rope:
        raise reader.unsupported("rope_parameters", None, "a JSON object, here or as rope_scaling")
    return RopeConfig(theta=reader.number("rope_theta", family.rope_theta, above=1.0))


def read_window_rope(reader: ConfigReader, family: Family, max_positions: int, kinds: tuple[str, str]) -> RopeConfig:
    """Read RoPE of layers with a window from `rope_parameters` (newer) or `rope_local_base_freq` (original).

    Args:
        kinds: of layers, as read_rope has them: without a window, and with one.
    """
    assert family.grouped is not None
    key, own = "rope_local_base_freq", None
    theta = reader.number(key, family.grouped.window_theta, above=1.0)
    if (of_kinds := reader.section("rope_parameters")) is not None:
        of_kinds.pass_over(kinds[0])
        own = of_kinds.section(kinds[1])
        judge_unread_keys(of_kinds, refuse_unknown=True)
    if own is None:
        return RopeConfig(theta=theta)
    return _parse_rope(reader, own, family, max_positions, 1.0, (key, theta))


def _check_share(holder: ConfigReader, family: Family, rotary_share: float) -> None:
    """Raise unless partial_rotary_factor, where it is given, is the share that is rotated."""
    share, why = 1.0, "all of qk_rope_head_dim is rotated"
    if family.grouped is not None:
        share, why = rotary_share, "as elsewhere" if rotary_share < 1 else "all of a head is rotated"
    partial = holder.number("partial_rotary_factor", share)
    if partial != share:
        raise holder.unsupported("partial_rotary_factor", partial, f"{share}: {why}")


def _parse_rope(
    reader: ConfigReader,
    rope: ConfigReader,
    family: Family,
    max_positions: int,
    rotary_share: float,
    outer: tuple[str, float] | None = None,
) -> RopeConfig:
    """Return the configuration in one of these sections.

    Args:
        rotary_share: as of read_rope.
        outer: the key beside the section that also says theta, and theta where neither does; None: rope_theta.
    """
    key, default_theta = outer or ("rope_theta", family.rope_theta)
    types = _types_of(family)
    rope_type = rope.text("rope_type", "type", default="default")
    if rope_type not in types:
        raise rope.unsupported("rope_type", rope_type, " or ".join(f'"{one}"' for one in types))
    outer_theta = reader.optional_number(key, above=1.0)
    theta = rope.number("rope_theta", outer_theta or default_theta, above=1.0)
    if outer_theta is not None and theta != outer_theta:
        raise rope.unsupported("rope_theta", theta, f"the same as the outer {key} = {outer_theta}")
    query_scale = None
    if family.scales_queries:
        query_scale = _parse_query_scale(rope, rope_type, max_positions, rotary_share)
    else:
        _check_share(rope, family, rotary_share)
    if rope_type in _LONGROPE:
        config = _parse_longrope(reader, rope, theta, max_positions)
    elif rope_type == "yarn":
        config = _parse_yarn(rope, theta, max_positions)
    else:
        config = _PARSERS[rope_type](rope, theta)
    if original := config.original_max_positions:
        reader.expect("original_max_position_embeddings", original, supported=f"the same as in {rope.prefix}")
    judge_unread_keys(rope, refuse_unknown=True)
    return replace(config, query_scale=query_scale)


def _parse_query_scale(rope: ConfigReader, rope_type: str, max_positions: int, rotary_share: float) -> QueryScale:
    """Return the scale of queries by position, as Mistral 4 writes it: partial_rotary_factor is of the whole head."""
    if rope_type != "yarn":
        raise rope.unsupported("rope_type", rope_type, '"yarn" for this model_type')
    share = rope.number("partial_rotary_factor", rotary_share)
    if not math.isclose(share, rotary_share, rel_tol=1e-6):
        supported = f"{rotary_share:g}, the share of qk_rope_head_dim in a head"
        raise rope.unsupported("partial_rotary_factor", share, supported)
    rope.pass_over("max_position_embeddings")  # the outer one counts
    window = rope.size("original_max_position_embeddings")
    if max_positions // window > _MAX_WINDOWS:
        supported = f"at least {-(-max_positions // _MAX_WINDOWS)} for max_position_embeddings = {max_positions}"
        raise rope.unsupported("original_max_position_embeddings", window, supported)
    beta = rope.number("llama_4_scaling_beta", at_least=0.0)
    return QueryScale(beta, window, max_positions // window + 2)


def _parse_default(rope: ConfigReader, theta: float) -> RopeConfig:
    return RopeConfig(theta=theta)


def _parse_linear(rope: ConfigReader, theta: float) -> RopeConfig:
    return RopeConfig("linear", theta, rope.number("factor", above=0.0, at_least=1.0))


def _parse_dynamic(rope: ConfigReader, theta: float) -> RopeConfig:
    """Return plain angles: they only change behind max_position_embeddings, where no request reaches."""
    rope.pass_over("factor", "original_max_position_embeddings")
    return RopeConfig(theta=theta)


def _parse_llama3(rope: ConfigReader, theta: float) -> RopeConfig:
    low, high = rope.number("low_freq_factor", above=0.0), rope.number("high_freq_factor", above=0.0)
    if low >= high:
        raise rope.unsupported("high_freq_factor", high, f"a number above low_freq_factor = {low:g}")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=rope.number("factor", above=0.0, at_least=1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=rope.size("original_max_position_embeddings"),
    )


_PARSERS = {
    "default": _parse_default,
    "linear": _parse_linear,
    "dynamic": _parse_dynamic,
    "llama3": _parse_llama3,
}
_LONGROPE = ("longrope", "su")  # its name, and that in the first files


def _types_of(family: Family) -> tuple[str, ...]:
    """Return the types of rotary embedding that a family may have."""
    if family.grouped is None:
        return "default", "yarn"
    return ("default", *_LONGROPE) if family.grouped.has_longrope else (*_PARSERS, "yarn")


def _pair_factors(rope: ConfigReader, key: str) -> tuple[float, ...]:
    """Return a factor for each pair."""
    factors = rope.numbers(key)
    if not factors or not all(0 < factor <= _MAX_PAIR_FACTOR for factor in factors):
        supported = f"a list of numbers above 0 and at most {_MAX_PAIR_FACTOR:,}, one per rotary pair"
        raise rope.unsupported(key, factors or None, supported)
    return tuple(map(float, factors))


def _parse_longrope(reader: ConfigReader, rope: ConfigReader, theta: float, max_positions: int) -> RopeConfig:
    """Return the long factors if the window is longer than the original one, else the short ones, for all requests.

    So the angles of a request, and the keys that it shares with others, depend on the model alone.
    """
    # as in transformers, where this key's default counts, too, whatever the section says
    original = reader.size("original_max_position_embeddings", default=_LONGROPE_POSITIONS, minimum=2)
    rope.expect("original_max_position_embeddings", original, supported=f"{original}, as outside of {rope.prefix}")
    short, long = (_pair_factors(rope, key) for key in ("short_factor", "long_factor"))
    if len(short) != len(long):
        raise rope.unsupported("long_factor", f"{len(long)} numbers", f"as many as short_factor has: {len(short)}")
    factor = rope.number("factor", max_positions / original, above=0.0)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        rope_type="longrope",
        theta=theta,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", scale, above=0.0),
        pair_factors=long if max_positions > original else short,
    )


def _parse_yarn(rope: ConfigReader, theta: float, max_positions: int) -> RopeConfig:
    rope.pass_over("finetuned")
    original = rope.size("original_max_position_embeddings")
    if original > max_positions:
        supported = f"at most max_position_embeddings = {max_positions}"
        raise rope.unsupported("original_max_position_embeddings", original, supported)
    beta_fast, beta_slow = rope.number("beta_fast", 32.0, above=0.0), rope.number("beta_slow", 1.0, above=0.0)
    if beta_fast < beta_slow:
        raise rope.unsupported("beta_fast", beta_fast, f"at least beta_slow = {beta_slow}")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=rope.number("factor", above=0.0, at_least=1.0),
        original_max_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        mscale=rope.optional_number("mscale", at_least=0.0),
        mscale_all_dim=rope.optional_number("mscale_all_dim", at_least=0.0),
        attention_factor=rope.optional_number("attention_factor", above=0.0),
        truncate=rope.flag("truncate", default=True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's growth of attention temperature with the stretch of the window (arXiv 2309.00071 section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
