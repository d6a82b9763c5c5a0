"""The tensors that a checkpoint must have by its config.json, and the check that it has them.

The check reads headers alone, so it covers the whole checkpoint, also tensors that a rank will not read. The planner
uses it, too, without torch.
"""

import math
from collections import Counter
from collections.abc import Sequence

from batchinfer.model.attention_config import Tensors, linear_tensors
from batchinfer.model.config import ModelConfig
from batchinfer.model.headers import TensorHeaders
from batchinfer.model.integer_forms import PER_WORD, StoredPart
from batchinfer.model.moe_config import SQRT_SOFTPLUS
from batchinfer.records import ModelError
from batchinfer.sanitize import count_text

SCALE_SUFFIX = "_scale_inv"
FP4_VALUES, FP4_SCALES = "_blocks", "_scales"  # of MXFP4
FP4_GROUP = 32  # values that share a scale

_FP8, _E8M0 = "F8_E4M3", "F8_E8M0"
_FP8_SCALES = ("F32", "F16", "BF16", _E8M0)
_FLOATS = ("F64", "F32", "F16", "BF16")
# Left in some checkpoints by the code that saved them; computed from config.json instead.
HEAD = "lm_head.weight"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_MTP_PREFIX = "mtp."  # of layers for multi-token prediction in DeepSeek-V4's files
_HASHED = ".gate.tid2eid"  # table of experts by token
# Scales of activations, stored next to weights with one scale each; here activations are rounded by their own values.
_INPUT_SCALE_SUFFIXES = (".activation_scale", "_proj_activation_scale", ".input_scale")
_MAX_LISTED = 10


def check_tensors(checkpoint: TensorHeaders, config: ModelConfig) -> None:
    """Compare names, shapes and formats of a whole checkpoint with `config`; no data is read.

    Raises:
        ModelError: names the first offending tensors and the number of further ones.
    """
    folder = checkpoint.folder
    expected = {
        name: part
        for weight, shape in expected_tensors(config)
        for name, part in _as_stored(checkpoint, config, weight, shape).items()
    }
    if config.tie_word_embeddings and HEAD in checkpoint:  # it is compared with the embedding
        expected[HEAD] = StoredPart((config.vocab_size, config.hidden_size), ())
    mtp_layers = {layer for name in checkpoint if ".eh_proj." in name and (layer := _layer_of(name)) is not None}
    unknown: list[str] = []
    scales: list[str] = []
    for name in checkpoint:
        if name in expected or _is_ignored(name, config, mtp_layers) or _may_be_zeros(name, checkpoint, config):
            continue
        is_scale = name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in expected
        (scales if is_scale else unknown).append(name)
    missing = [name for name in expected if name not in checkpoint]
    complaints = [
        f"{len(names)} {what}: {_listed(names)}"
        for names, what in ((missing, "missing"), (unknown, "unknown"))
        if names
    ]
    if complaints:
        raise ModelError(f"{folder}: the tensors do not fit config.json; {'; '.join(complaints)}.")

    wrong = [
        f"{name} is {list(checkpoint.info(name).shape)} instead of {list(part.shape)}"
        for name, part in expected.items()
        if checkpoint.info(name).shape != part.shape
    ]
    if wrong:
        raise ModelError(f"{folder}: {count_text(len(wrong), 'tensor')} with a wrong shape: {_listed(wrong)}.")
    for name, part in expected.items():
        _check_format(checkpoint, config, name, part.formats)
    for name in scales:
        _check_scale(checkpoint, config, name)


def spare_biases(checkpoint: TensorHeaders, config: ModelConfig) -> list[str]:
    """Return the biases that the model does not have, of a checkpoint that `check_tensors` has passed.

    Some writers of GPTQ's form store one of zeros beside every weight.
    """
    candidates = [name for name in checkpoint if _may_be_zeros(name, checkpoint, config)]
    expected = {name for name, _ in expected_tensors(config)} if candidates else set()
    return [name for name in candidates if name not in expected]


def why_no_mtp(checkpoint: TensorHeaders, config: ModelConfig) -> str | None:
    """Return why the layer for multi-token prediction cannot be used; None if it is complete and as in config.json."""
    if not config.num_mtp_layers:
        return "config.json names no layer for multi-token prediction"
    if config.attention.why_no_drafts is not None:
        return config.attention.why_no_drafts
    try:
        for name, shape in mtp_tensors(config):
            for part, stored in _as_stored(checkpoint, config, name, shape).items():
                if part not in checkpoint:
                    return f"the checkpoint has no {part}"
                if checkpoint.info(part).shape != stored.shape:
                    return f"{part} is {list(checkpoint.info(part).shape)} instead of {list(stored.shape)}"
                _check_format(checkpoint, config, part, stored.formats)
    except ModelError as error:
        return str(error)
    return None


def num_bytes_to_read(
    checkpoint: TensorHeaders, config: ModelConfig, expert_ids: Sequence[Sequence[int]], *, mtp: bool = False
) -> int:
    """Return the bytes that a rank with these routed experts per MoE layer reads; an expert listed twice counts twice.

    Args:
        mtp: add the layer for multi-token prediction, with all of its experts.
    """
    held = dict(zip(config.moe_layers, map(Counter, expert_ids), strict=True))
    held[config.num_hidden_layers] = Counter(range(config.n_routed_experts))
    total = 0
    for name, shape in (*expected_tensors(config), *(mtp_tensors(config) if mtp else ())):
        words = name.split(".")  # model.layers.3.mlp.experts.7.up_proj.weight
        times = held[int(words[2])][int(words[5])] if words[4:5] == ["experts"] else 1
        if times:
            parts = (*_as_stored(checkpoint, config, name, shape), name + SCALE_SUFFIX)
            found = [part for part in parts if part in checkpoint]
            total += times * sum(checkpoint.info(part).num_bytes for part in found)
    if config.tie_word_embeddings and HEAD in checkpoint:  # compared with the embedding
        total += sum(checkpoint.info(part).num_bytes for part in (HEAD, HEAD + SCALE_SUFFIX) if part in checkpoint)
    return total


def expected_tensors(config: ModelConfig) -> Tensors:
    """Yield name and shape of every tensor of a checkpoint without scales and multi-token-prediction layers."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, hidden)
    if config.hyper is not None:
        yield from config.hyper.end_tensors(hidden)
    for layer in range(config.num_hidden_layers):
        yield from _expected_layer(config, layer)


def mtp_tensors(config: ModelConfig) -> Tensors:
    """Yield name and shape of the first multi-token-prediction layer's tensors; it shares embedding and head."""
    hidden, layer = config.hidden_size, config.num_hidden_layers
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"model.layers.{layer}.{name}.weight", (hidden,)
    yield f"model.layers.{layer}.eh_proj.weight", (hidden, 2 * hidden)
    yield from _expected_layer(config, layer)


def _expected_layer(config: ModelConfig, layer: int) -> Tensors:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    for name in config.family_row.norms.values():
        yield f"{prefix}.{name}.weight", (hidden,)
    yield from config.attention.tensors(f"{prefix}.self_attn", hidden, layer)
    if config.hyper is not None:
        yield from config.hyper.tensors(prefix, hidden)
    if config.is_moe_layer(layer):
        yield from _expected_moe(config, f"{prefix}.mlp", layer)
    else:
        joined = config.family_row.joined_mlp
        yield from _expected_mlp(f"{prefix}.mlp", hidden, config.intermediate_size, config.mlp_bias, joined=joined)


def _expected_moe(config: ModelConfig, prefix: str, layer: int) -> Tensors:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    yield f"{prefix}.gate.weight", (config.n_routed_experts, hidden)
    if layer < config.num_hash_layers:
        yield f"{prefix}{_HASHED}", (config.vocab_size, config.num_experts_per_tok)
    elif config.topk_method in ("noaux_tc", SQRT_SOFTPLUS):
        yield f"{prefix}.gate.e_score_correction_bias", (config.n_routed_experts,)
    has_biases = config.has_expert_biases
    if has_biases:
        yield f"{prefix}.gate.bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _expected_mlp(f"{prefix}.experts.{expert}", hidden, width, bias=has_biases)
    if config.family_row.has_shared_gate:
        yield f"{prefix}.shared_expert_gate.weight", (1, hidden)
    if config.n_shared_experts:
        yield from _expected_mlp(
            f"{prefix}.shared_experts", hidden, width * config.n_shared_experts, bias=config.mlp_bias
        )


def _expected_mlp(prefix: str, hidden: int, width: int, bias: bool, *, joined: bool = False) -> Tensors:
    if joined:
        yield from linear_tensors(f"{prefix}.gate_up_proj", 2 * width, hidden, bias=bias)
    else:
        yield from linear_tensors(f"{prefix}.gate_proj", width, hidden, bias=bias)
        yield from linear_tensors(f"{prefix}.up_proj", width, hidden, bias=bias)
    yield from linear_tensors(f"{prefix}.down_proj", hidden, width, bias=bias)


def _as_stored(
    checkpoint: TensorHeaders, config: ModelConfig, name: str, shape: tuple[int, ...]
) -> dict[str, StoredPart]:
    """Return the stored tensors of a weight by name."""
    form = config.integers
    if name.endswith(_HASHED):
        return {name: StoredPart(shape, ("I64", "I32"))}
    if config.has_fp4_experts and name + FP4_VALUES in checkpoint:
        num_out, num_in = shape
        num_groups = num_in // FP4_GROUP
        if num_in % FP4_GROUP:
            path = checkpoint.info(name + FP4_VALUES).path
            raise ModelError(f"{path}: {name} is in FP4, but {FP4_GROUP} does not divide its {num_in} columns.")
        by_group = checkpoint.info(name + FP4_VALUES).dtype == "U8"
        values = (num_out, num_groups, FP4_GROUP // 2) if by_group else (num_out, num_in // 2)
        return {
            name + FP4_VALUES: StoredPart(values, ("U8", "I8")),
            name + FP4_SCALES: StoredPart((num_out, num_groups), ("U8",) if by_group else (_E8M0,)),
        }
    if form is None:
        packed = (name + "_packed", name.removesuffix(".weight") + ".qweight")
        if found := next((part for part in packed if part in checkpoint), None):
            said = "but the quantization_config of config.json says nothing of that"
            raise ModelError(f"{checkpoint.info(found).path}: {name} is packed, {said}.")
    if form is None or len(shape) != 2 or not form.is_stored(name, checkpoint):
        return {name: StoredPart(shape, ())}
    num_out, num_in = shape
    path = checkpoint.info(form.part(name, "values")).path
    if num_in % form.group:
        raise ModelError(f"{path}: {name} is packed, but group_size {form.group} does not divide its {num_in} columns.")
    if form.method != "compressed-tensors" and (num_out % PER_WORD or num_in % PER_WORD):
        raise ModelError(f"{path}: {name} is packed, but {PER_WORD} does not divide its {num_out} x {num_in} values.")
    return form.parts(name, (num_out, num_in), checkpoint)


def _is_ignored(name: str, config: ModelConfig, mtp_layers: set[int]) -> bool:
    """Return whether a tensor is optional and not used.

    Args:
        mtp_layers: layers with the projection that only those for multi-token prediction have.
    """
    if name.endswith(_IGNORED_SUFFIXES):
        return True
    if config.fp8_per_tensor and name.endswith(_INPUT_SCALE_SUFFIXES):
        return True
    if config.num_mtp_layers and name.startswith(_MTP_PREFIX):
        return True
    layer, first = _layer_of(name), config.num_hidden_layers
    return layer in mtp_layers and first <= layer < first + config.num_mtp_layers


def _may_be_zeros(name: str, checkpoint: TensorHeaders, config: ModelConfig) -> bool:
    """Return whether a tensor is the bias of a weight in GPTQ's form."""
    form, (prefix, _, kind) = config.integers, name.rpartition(".")
    return (
        form is not None and form.method == "gptq" and kind == "bias" and form.is_stored(f"{prefix}.weight", checkpoint)
    )


def _layer_of(name: str) -> int | None:
    """Return the number of a tensor's layer; None if it is not of a layer."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[2].isdecimal() else None


def _check_format(checkpoint: TensorHeaders, config: ModelConfig, name: str, formats: tuple[str, ...]) -> None:
    """Raise if a tensor has none of these formats; without formats it must be floats, or FP8 with a scale per block."""
    info = checkpoint.info(name)
    if formats:
        if info.dtype not in formats:
            raise ModelError(f"{info.path}: {name} is {info.dtype} instead of {' or '.join(formats)}.")
        return
    has_scale = name + SCALE_SUFFIX in checkpoint
    if info.dtype in (_FP8, config.eight_bits):
        kind = "FP8" if info.dtype == _FP8 else info.dtype
        if config.fp8_block is None or info.dtype != config.eight_bits:
            raise ModelError(f"{info.path}: {name} is {kind}, but config.json has no quantization_config that says so.")
        if not has_scale or len(info.shape) != 2:
            raise ModelError(f"{info.path}: {name} is {kind}, but there is no {name}{SCALE_SUFFIX} for its blocks.")
    elif info.dtype not in _FLOATS:
        raise ModelError(f"{info.path}: {name} is {info.dtype}; supported are {', '.join(_FLOATS)} and {_FP8}.")
    elif has_scale:
        raise ModelError(f"{info.path}: {name}{SCALE_SUFFIX} is a scale, but {name} is {info.dtype} and not {_FP8}.")


def _check_scale(checkpoint: TensorHeaders, config: ModelConfig, name: str) -> None:
    """Raise unless scales are floats or powers of two, one per block (smaller at the edges) or one in all."""
    info = checkpoint.info(name)
    rows, columns = config.fp8_block or (1, 1)
    num_out, num_in = checkpoint.info(name.removesuffix(SCALE_SUFFIX)).shape
    needed = (-(-num_out // rows), -(-num_in // columns))
    has_one = config.fp8_per_tensor and math.prod(info.shape) == 1
    if (info.shape != needed and not has_one) or info.dtype not in _FP8_SCALES:
        needs = f"{' or '.join(_FP8_SCALES)} {list(needed)}"
        raise ModelError(f"{info.path}: {name} is {info.dtype} {list(info.shape)} instead of {needs}.")


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
