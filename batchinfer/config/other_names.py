"""Names of settings in vLLM, transformers and OpenAI's API, with what to write here."""

import re

from batchinfer.config.sampling import JobSampling

_RANKS = 'cluster={"prefill_ranks": N} sets the number of ranks, one per GPU, which share the experts'
_LENGTH = "write max_tokens=N"
_SCHEMA = 'write structured_outputs={"json": schema}'
_CHOSEN = "this is chosen from the model folder; leave it out"
_MEMORY = 'memory is measured; cluster={"page_bytes": N} limits the KV of a rank'
_KWARGS = 'write input={"chat_template_kwargs": {"enable_thinking": True}}, or what the model\'s template reads'
_TEXT = "the text is always without control tokens; token_ids has all of them"
_DTYPE = 'write dtype="float32", "bfloat16", "fp8", "int4" or "fp4"'
_NOT_HERE = "batchinfer has nothing of the kind; leave it out"
_IDS = "give the lists of token ids as the first argument"
_PREFILL = 'write cluster={"prefill_tokens": N}'
_DECODE = 'write cluster={"decode_requests": N}'
_BY_NAME = "give its values by name: max_tokens=…, temperature=…"
_WINDOW = f"the window is that of the model; for the length of answers, {_LENGTH}"
_NO_DOWNLOAD = "models come from the Hugging Face cache (HF_HOME) or a folder; nothing is downloaded"
_BARS = 'write progress=True, False or "tqdm"'

OTHER_NAMES = {
    # lengths and ends
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "max_new_tokens": _LENGTH,
    "max_gen_toks": _LENGTH,
    "max_length": _LENGTH,
    "min_new_tokens": "write min_tokens=N",
    "max_model_len": _WINDOW,
    "max_seq_len": _WINDOW,
    "context_length": _WINDOW,
    "truncate_prompt_tokens": "prompts are not cut; a prompt that does not fit becomes an error row",
    "stop_strings": "write stop=[…]",
    "stop_sequences": "write stop=[…]",
    "stop_regex": "write stop=[…] with texts; patterns are not searched",
    "no_stop_trim": "write include_stop_str_in_output=True",
    "eos_token_id": "write stop_token_ids=[…]",
    # choice of tokens
    "sampling_params": _BY_NAME,
    "default_generation_params": _BY_NAME,
    "engine_kwargs": _BY_NAME,
    "extra_args": _BY_NAME,
    "extra_body": _BY_NAME,
    "sampling_seed": "write seed=N",
    "random_seed": "write seed=N",
    "generation_config": 'write defaults="generation_config" for the values of the model\'s file',
    "do_sample": "temperature=0 is greedy, temperature above 0 samples",
    "num_return_sequences": "write n=N",
    "rollouts_per_document": "write n=N",
    "best_of": "write n=N and choose among the samples",
    "num_beams": f"there is no beam search; {_NOT_HERE}",
    "use_beam_search": f"there is no beam search; {_NOT_HERE}",
    "beam_width": f"there is no beam search; {_NOT_HERE}",
    "length_penalty": f"there is no beam search; {_NOT_HERE}",
    "early_stopping": f"there is no beam search; {_NOT_HERE}",
    "no_repeat_ngram_size": "no rule forbids repeated words; repetition_penalty=X makes repeated tokens less likely",
    "typical_p": _NOT_HERE,
    "top_a": _NOT_HERE,
    "logits_processors": "write logit_bias={token id: number}, bad_words=[…] or structured_outputs={…}",
    "allowed_token_ids": 'write structured_outputs={"choice": […]} or {"regex": …}',
    "top_logprobs": "write logprobs=N",
    "return_logprob": "write logprobs=N",
    "top_logprobs_num": "write logprobs=N",
    "logprob_token_ids": "logprobs=N reports the N most likely tokens; tokens cannot be named",
    "echo": "write prompt_logprobs=N for the log-probabilities of the prompt",
    # form of answers
    "guided_json": _SCHEMA,
    "guided_regex": 'write structured_outputs={"regex": …}',
    "guided_choice": 'write structured_outputs={"choice": […]}',
    "guided_grammar": 'write structured_outputs={"grammar": …}',
    "guided_json_object": 'write structured_outputs={"json_object": True}',
    "regex": 'write structured_outputs={"regex": …}',
    "ebnf": 'write structured_outputs={"grammar": …}',
    "guided_decoding": f"{_SCHEMA}, or regex, choice or grammar in place of json",
    "guided_decoding_backend": "llguidance is the only backend; leave it out",
    "response_format": f'{_SCHEMA}, or {{"json_object": True}}',
    "text_format": _SCHEMA,
    "json_schema": _SCHEMA,
    "schema": _SCHEMA,
    "output_schema": _SCHEMA,
    "response_model": 'write structured_outputs={"json": Model}, with a pydantic model or a dataclass',
    "skip_special_tokens": _TEXT,
    "spaces_between_special_tokens": _TEXT,
    "detokenize": _TEXT,
    "return_full_text": "the text is the answer alone; leave it out",
    "tool_choice": 'the model decides; tools are input={"tools": …}',
    "functions": 'write input={"tools": …}',
    "parallel_tool_calls": "the model decides; leave it out",
    "reasoning_effort": 'write input={"chat_template_kwargs": {"reasoning_effort": …}}, or thinking_budget=N',
    "reasoning_parser": 'write output={"reasoning": "auto"}',
    "enable_reasoning": 'write output={"reasoning": "auto"}',
    # prompts
    "prompts": "give the prompts as the first argument",
    "system_prompt": 'write input={"system": …}',
    "instructions": 'write input={"system": …}',
    "enable_thinking": _KWARGS,
    "add_generation_prompt": 'this is done unless input={"continue_final_message": True}; leave it out',
    "apply_chat_template": "texts are user's messages of a chat; raw=True gives them to the model as they are",
    "prompt_token_ids": _IDS,
    "input_ids": _IDS,
    "prompt_embeds": _NOT_HERE,
    "preprocess": "change the rows before they are the first argument",
    "postprocess": "change the answers that the call returns; leave it out",
    "prompt_column": 'write prompt="column" or user="column"',
    # ranks, memory, loading
    "tensor_parallel_size": _RANKS,
    "pipeline_parallel_size": _RANKS,
    "data_parallel_size": _RANKS,
    "concurrency": _RANKS,
    "expert_parallel_size": _RANKS,
    "enable_expert_parallel": f"experts are always shared by the ranks; {_RANKS}",
    "num_gpus": _RANKS,
    "tp_size": _RANKS,
    "dp_size": _RANKS,
    "ep_size": _RANKS,
    "world_size": _RANKS,
    "gpu_memory_utilization": _MEMORY,
    "mem_fraction_static": _MEMORY,
    "kv_cache_memory_bytes": 'write cluster={"page_bytes": N}',
    "swap_space": _MEMORY,
    "cpu_offload_gb": _MEMORY,
    "device": 'ranks use the GPUs if there are any; cluster={"backend": "cpu"} chooses kernels for CPUs',
    "device_map": 'ranks use the GPUs if there are any; cluster={"backend": "cpu"} chooses kernels for CPUs',
    "attention_backend": 'write cluster={"backend": …}; `batchinfer doctor` lists those that run here',
    "attn_implementation": 'write cluster={"backend": …}; `batchinfer doctor` lists those that run here',
    "torch_dtype": _DTYPE,
    "precision": _DTYPE,
    "quantization": _DTYPE,
    "load_in_8bit": 'write dtype="fp8"',
    "load_in_4bit": 'write dtype="int4"',
    "kv_cache_dtype": 'write kv={"dtype": "fp8"}',
    "enable_prefix_caching": 'shared prefixes are always computed once; kv={"dir": …} keeps them for later jobs',
    "disable_radix_cache": "shared prefixes are always computed once; leave it out",
    "block_size": 'write kv={"block_tokens": N}',
    "max_num_seqs": _DECODE,
    "max_running_requests": _DECODE,
    "max_concurrency": _DECODE,
    "max_concurrent_generations": _DECODE,
    "max_num_batched_tokens": _PREFILL,
    "max_prefill_tokens": _PREFILL,
    "chunked_prefill_size": _PREFILL,
    "batch_size": "all rows are given at once and batched here; leave it out",
    "enable_chunked_prefill": 'long prompts are always cut; cluster={"prefill_tokens": N} sets the size',
    "enforce_eager": 'write cluster={"graphs": "off"}',
    "disable_cuda_graph": 'write cluster={"graphs": "off"}',
    "speculative_config": 'write cluster={"speculate": "auto"}',
    "speculative_algorithm": 'write cluster={"speculate": "auto"}',
    "trust_remote_code": "no code of a model folder is ever run; leave it out",
    "tokenizer": _CHOSEN,
    "tokenizer_path": _CHOSEN,
    "tokenizer_revision": _CHOSEN,
    "skip_tokenizer_init": _CHOSEN,
    "tokenizer_mode": _CHOSEN,
    "load_format": _CHOSEN,
    "revision": 'write the revision behind the name: model="owner/name@revision"',
    "download_dir": _NO_DOWNLOAD,
    "hf_token": _NO_DOWNLOAD,
    "lora_request": f"LoRA adapters must be merged into the checkpoint; {_NOT_HERE}",
    "enable_lora": f"LoRA adapters must be merged into the checkpoint; {_NOT_HERE}",
    "chat_template": "the template is that of the model folder; leave it out",
    "output_dir": "write output=FOLDER",
    "use_tqdm": _BARS,
    "show_progress": _BARS,
    "verbose": _BARS,
    "api_key": "the model runs on this machine; leave it out",
    "base_url": "the model runs on this machine; leave it out",
    "timeout": "the model runs on this machine; leave it out",
}

# In hints that are of no use in a job file: calls have arguments, shorthands and Python classes.
_OF_CALLS = ("argument", "pydantic", "progress=", "output=FOLDER", "dtype=", "model=", "raw=")


def remedy_in_a_file(name: str) -> str | None:
    """Return what to write in a job file (TOML) instead of another library's name; None if there is no hint."""
    hint = OTHER_NAMES.get(name)
    if hint is None or any(words in hint for words in _OF_CALLS):
        return None
    return re.sub(r'"(\w+)": ', r"\1 = ", hint).replace("True", "true")


def remedy_in_a_row(name: str) -> str | None:
    """Return what to write in a row's sampling (JSON) instead of another library's name; None if there is no hint."""
    hint = OTHER_NAMES.get(name, "")
    is_sampling = hint.startswith("write ") and set(re.findall(r"(\w+)=", hint)) <= JobSampling.model_fields.keys()
    if not is_sampling or "pydantic" in hint:
        return None
    return re.sub(r"(\w+)=", r'"\1": ', hint).replace("True", "true")
