"""Judgement of the keys of config.json that model/config.py does not read.

Such a key is of one of three kinds. A key that does not change the model's mathematics passes. A key that changes it
in a way that is not implemented is refused by name, unless its value turns the change off. Of an unknown key the plan
warns.
"""

from batchinfer.model.config_reader import ConfigReader, show
from batchinfer.records import ModelError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Notes of the code that saved the file, of training, and defaults of generation, which the job file has instead.
HARMLESS = _names(
    """
    _name_or_path _model_name_or_path _commit_hash _attn_implementation_autoset _attn_implementation
    _experts_implementation attn_implementation experts_implementation auto_map transformers_version torch_dtype dtype
    model_max_length unsloth_fixed unsloth_version use_cache return_dict return_dict_in_generate output_attentions
    output_hidden_states
    output_router_logits output_scores torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward problem_type
    finetuning_task id2label label2id num_labels task_specific_params tokenizer_class prefix is_decoder head_dim

    initializer_range embedding_initializer_range attention_dropout hidden_dropout residual_dropout resid_pdrop
    embd_pdrop dropout router_jitter_noise input_jitter_noise aux_loss_alpha seq_aux router_aux_loss_coef
    router_z_loss_coef mtp_loss_scaling_factor pretraining_tp ep_size gradient_checkpointing
    use_mtp num_mtp_modules mtp_transformer_layers initial_context_length mlp_intermediate_size
    shared_moe_mode use_routing_bias is_llama_config rope_interleaved transformers.js_config

    bos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size exponential_decay_length_penalty bad_words_ids suppress_tokens begin_suppress_tokens
    num_return_sequences num_beams num_beam_groups do_sample early_stopping max_length min_length max_new_tokens
    min_new_tokens remove_invalid_values cache_implementation
    """
)
# Parts that the model has not; off where null, false, 0 or empty.
OFF = _names(
    """
    sliding_window use_sliding_window sliding_window_pattern max_window_layers window_size attention_chunk_size
    qk_layernorm qk_norm qk_norm_type qk_layer_norms use_qk_norm clip_qkv alibi attn_logit_softcapping
    final_logit_softcapping attn_temperature_tuning attn_output_gate use_gated_attention attention_sinks
    num_attention_sinks learnable_sink_init no_rope_layers no_rope_layer_interval rope_local_base_freq
    rope_scaling_layers layer_rope_theta mrope_section use_mrope llama_4_scaling use_mem_rope
    use_bias use_qkv_bias qkv_bias query_bias key_bias value_bias add_bias_linear attention_out_bias proj_bias
    lm_head_bias moe_bias

    zero_expert_num zero_expert_type num_hash_layers mlp_only_layers shared_expert_gate shared_intermediate_size
    shared_expert_intermediate_size shared_experts_intermediate_size moe_apply_router_weight_on_input
    apply_router_weight_on_input moe_router_logit_softcapping

    o_lora_rank o_groups short_conv_kernel_size kv_source_layers num_kv_shared_layers layer_group_size gated_norm_rank
    scale_depth dim_model_base mup_enabled use_parallel_residual parallel_residual use_post_norm sandwich_norm
    norm_after use_bidirectional_attention prefix_lm is_encoder_decoder add_cross_attention tie_encoder_decoder
    pruned_heads cross_attention_hidden_size per_layer_config text_config quantization compression_config
    """
)
# The same for whole families of keys.
OFF_PREFIXES = (
    *("index_", "indexer_", "dsa_", "kda_", "linear_", "mamba_", "ssm_", "compress_", "attn_res_", "hc_"),
    *("swiglu_", "ngram_", "engram_", "ple_", "dspark_", "vision_", "audio_"),
)
# Factors that the model does not have.
ONE = _names(
    """
    attn_scale attention_multiplier attention_value_scale embedding_multiplier embedding_scale scale_emb logit_scale
    logits_scaling output_multiplier lm_head_multiplier residual_multiplier residual_scale router_scaling_factor
    layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
    moe_routed_scaling_factor moe_router_scaling_factor route_scale decoder_sparse_step moe_layer_interval
    interleave_moe_layer_step full_attn_mod interpolate_factor
    """
)
ON = _names("use_mla use_rope is_causal causal use_gated_mlp")
_MAX_NAMED = 6
_MAX_NAME = 80


def judge_unread_keys(reader: ConfigReader, *, refuse_unknown: bool = False) -> tuple[str, ...]:
    """Return the unknown keys of an object of config.json by full name; call it after all known keys were read.

    Args:
        refuse_unknown: of a part of the file whose every key counts.

    Raises:
        ModelError: a key changes what the model computes; the sentence names all of these with their values.
    """
    unread = reader.unread()
    changing = {key: value for key, value in unread.items() if _changes(key, value, unknown_does=refuse_unknown)}
    if changing:
        shown = [f"{_plain(reader.name(key))} is {show(value)}" for key, value in list(changing.items())[:_MAX_NAMED]]
        more = f" (and {len(changing) - _MAX_NAMED} more)" if len(changing) > _MAX_NAMED else ""
        one = len(changing) == 1
        raise ModelError(
            f"{reader.path}: {', '.join(shown)}{more}, which {'changes' if one else 'change'} what the model computes "
            f"and {'is' if one else 'are'} not supported; use a model without {'it' if one else 'them'}, or remove "
            f"{'the key' if one else 'the keys'} where the weights were made without {'it' if one else 'them'}."
        )
    return tuple(_plain(reader.name(key)) for key in unread if not _is_known(key))


def _changes(key: str, value: object, *, unknown_does: bool) -> bool:
    if key in OFF or key.startswith(OFF_PREFIXES):
        return bool(value)
    if key in ONE:
        return isinstance(value, bool) or value != 1
    if key in ON:
        return value is not True
    return unknown_does and key not in HARMLESS


def _plain(name: str) -> str:
    """Return a key's name for a sentence, printable and cut, as the file may hold anything."""
    return (name if name.isprintable() else repr(name))[:_MAX_NAME]


def _is_known(key: str) -> bool:
    return key in HARMLESS | OFF | ONE | ON or key.startswith(OFF_PREFIXES)
