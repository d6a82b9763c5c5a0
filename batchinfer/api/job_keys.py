"""Types of the keys of a job file, for editors and type checkers; written by tests/support/job_keys_types.py."""

# fmt: off
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class StructuredOutputs(TypedDict, total=False):
    """Constraint on the answer; exactly one key is set."""

    json: str | Mapping[str, Any] | type[Any]
    regex: str
    choice: list[str] | tuple[str, ...]
    grammar: str
    json_object: bool


class InputKeys(TypedDict, total=False):
    """[input] of a job file: Files of prompts, their format, and the use of columns."""

    files: list[str] | tuple[str, ...]
    """shards: paths, folders or URIs (s3://bucket/a.parquet), globs too (`*`, `**`), in sorted order"""
    format: Literal["parquet", "jsonl", "csv", "arrow", "sharegpt", "openai"] | None
    """of the files; unset: by extension, as jsonl.gz or tsv, else Parquet; sharegpt: by extension, and messages
    (unset: conversations) holds {from: human | gpt | system, value}; openai: lines of its batch files"""
    id: str
    """column with the row's id (text or integer), which may repeat or be null; none: rows have no ids"""
    user: str | None
    """column with text that goes through the chat template as the user's message"""
    prompt: str | None
    """column with raw text that goes to the model as it is (or user, messages, template, token_ids)"""
    messages: str | None
    """column with a list of {role, content}, or JSON text of it, put through the chat template"""
    template: str | None
    """Jinja over the row's columns that writes the raw prompt text; with system: the user's message"""
    system: str | None
    """system message of chats that have none: a text, or Jinja over the row's columns; empty: none (with template, a
    chat without one)"""
    chat_template_kwargs: Mapping[str, Any] | str | None
    """variables for the chat template, such as enable_thinking, or JSON text of them ({...}); or a column: structs
    or JSON text"""
    tools: Sequence[Mapping[str, Any]] | Mapping[str, Any] | str | None
    """tools for the chat template, or JSON text of them ([...]), or a column with them: structs or JSON text;
    outputs get tool_calls"""
    continue_final_message: bool
    """the answer continues the last message, as with transformers"""
    token_ids: str | None
    """column with ready token ids"""
    control_tokens: Literal["parse", "text", "error"]
    """text in prompts that equals a control token such as <|User|>: parse: is this token, as with transformers;
    text: is ordinary text; error: makes the row bad"""
    choices: str | None
    """column with a list of texts (or of lists of token ids), each scored as the prompt's continuation;
    sampling.max_tokens must be 0"""
    sampling: str | None
    """column with a struct, or JSON text of one, that overrides [sampling] row by row"""


class OutputKeys(TypedDict, total=False):
    """[output] of a job file: The run folder, and form and columns of the outputs."""

    dir: str | Path
    """run folder: plan, durable results, outputs/ and stats/; a folder that all workers see, or s3://bucket/folder
    in a store with conditional writes"""
    work_dir: str | Path | None
    """folder for each node's copy of a run folder in s3://; unset: one in the temporary folder"""
    format: Literal["parquet", "jsonl", "openai"]
    """of outputs/: Parquet always; jsonl: the same rows as lines, too; openai: lines as OpenAI answers a batch, too,
    and *.errors.jsonl"""
    push: Literal["hf-folder"] | None
    """hf-folder: dataset/ in the run folder is these outputs as a Hugging Face dataset with a card"""
    keep_columns: list[str] | tuple[str, ...]
    """input columns to copy to the outputs"""
    publish: str | None
    """URI such as s3://bucket/folder: `finish` copies outputs/ and stats/ there, too"""
    reasoning: Literal["none", "auto", "deepseek_r1"]
    """separate columns for a model's thinking up to </think>, or in gpt-oss's channel analysis; deepseek_r1: an
    answer begins with thinking unless its prompt ends it; auto: only if the prompt or the answer begins it"""
    token_texts: bool
    """logprobs have the text of each token in addition to its id"""
    shared_group: str | None
    """group whose members may all work in the run folder; unset: only this user enters it"""


class ModelKeys(TypedDict, total=False):
    """[model] of a job file: The model folder, in Hugging Face's layout."""

    path: str | Path
    """owner/name[@revision] in the Hugging Face cache, or a folder with config.json (or params.json), *.safetensors,
    tokenizer.json (or tiktoken.model, tekken.json), tokenizer_config.json"""
    dtype: Literal["float32", "bfloat16", "fp8", "int4", "fp4"]
    """precision of weights and KV; fp8: 8-bit weights and products, KV in bfloat16; int4: as fp8, with routed
    experts in 4 bits; fp4: as fp8, with routed experts as stored in MXFP4"""


class SamplingKeys(TypedDict, total=False):
    """[sampling] of a job file: Choice of tokens by a job; a row may override every key except `defaults`."""

    max_tokens: int
    """most new tokens per sample (required: no silent default); 0: prompts are only scored"""
    temperature: float
    """0: greedy, the default"""
    top_p: float
    """keep the smallest set of tokens with this probability; 1: all"""
    top_k: int
    """keep the k most likely tokens; 0 or -1: all"""
    min_p: float
    """then drop tokens below this share of the top probability"""
    n: int
    """samples per row"""
    seed: int
    """same seed and row: same tokens in every run"""
    stop: str | list[str] | tuple[str, ...]
    """strings (or one) that end the text: the first that is complete; not part of it"""
    stop_token_ids: Sequence[int]
    """token ids that end the output, in addition to the model's own"""
    include_stop_str_in_output: bool
    """the text includes the stop string or token at its end"""
    ignore_eos: bool
    """go on after the model's end token"""
    min_tokens: int
    """least new tokens, except for a structured output that is complete"""
    bad_words: list[str] | tuple[str, ...]
    """words that are not generated"""
    presence_penalty: float
    """taken off the logit of each generated token"""
    frequency_penalty: float
    """taken off for each time that a token has been generated"""
    repetition_penalty: float
    """divides (below 0: multiplies) logits of tokens in the prompt or the output"""
    logit_bias: Mapping[int, float] | Mapping[str, float]
    """by token id (as text) a number added to its logit, -100 to 100"""
    structured_outputs: StructuredOutputs | None
    """constraint on the answer: one of json (a schema), regex, choice (a list), grammar, json_object"""
    thinking_budget: int | None
    """most tokens of thinking; thinking is then ended by force"""
    logprobs: int | None
    """alternatives reported per token; unset: no logprobs"""
    prompt_logprobs: int | None
    """the same for each token of the prompt; unset: no log-probabilities of it"""
    defaults: Literal["generation_config"] | None
    """generation_config: temperature, top_p, top_k, min_p and repetition_penalty that are not set here are those of
    the model's generation_config.json, as with vLLM"""


class ClusterKeys(TypedDict, total=False):
    """[cluster] of a job file: Ranks, their memory, and how often results become durable."""

    mode: Literal["colocated", "disaggregated"]
    """same ranks for both phases, or apart"""
    prefill_ranks: int | None
    """expert-parallel size of prefill"""
    decode_ranks: int | None
    """expert-parallel size of decode (colocated: the same)"""
    redundant_experts: int
    """extra expert slots, over all ranks of a group"""
    nodes: int | None
    """hosts that the ranks are spread over, evenly and in order; unset: by Slurm or the ranks"""
    overlap: Literal["auto"] | bool
    """two micro-batches per step, one computes while the other's rows travel between ranks; auto: in prefill and in
    decode separately, if the ranks measure that it is faster; results stay the same"""
    speculate: Literal["auto", "off"] | None
    """speculative decoding: draft tokens with the model's layer for multi-token prediction, verify them in the next
    step; results stay the same to the byte; auto: in steps where it was measured to be faster; unset: auto where
    weights are streamed, otherwise off"""
    backend: Literal["auto", "hopper", "hopper-invariant", "triton", "sdpa", "cpu", "reference"]
    """kernels; `batchinfer doctor` lists those that run here; cpu: C++; on GPUs sdpa: as auto, but PyTorch's
    attention for prefill; hopper: as auto, but flash_mla splits decode steps freely, which is faster for few
    requests, but a request's last bits then depend on the other requests of its steps"""
    exchange: Literal["auto", "shared", "tls", "gloo", "nccl", "deepep", "deepep-v1", "deepep-low-latency"]
    """how expert rows travel; auto: shared memory on one host, tls between hosts, nccl on GPUs; shared: of GPUs,
    too, copied to the host and back, and several ranks may share a GPU; deepep-low-latency is for decode, ranks
    that do prefill alone take deepep-v1"""
    graphs: Literal["auto", "off"]
    """decode steps as CUDA graphs if GPU, exchange and operations support them; off: never, for drivers with which
    graphs fail; results stay the same"""
    collective_seconds: float
    """a rank that does not answer for this long has failed"""
    page_bytes: int | None
    """KV page budget per rank in bytes; measured when unset"""
    weights: Literal["auto", "resident", "stream"]
    """stream: read the layers of a converted folder from its disk again for each sweep of many steps, for models
    larger than memory; results stay the same to the byte; on a GPU layers are copied there for each sweep, from
    the host's memory or a folder of convert --gpu; auto: on CPUs, if they do not fit"""
    memory_bytes: int | None
    """most memory of a rank on a CPU: weights, KV pages and steps; where weights are streamed to a GPU, most of the
    host's for weights; unset: what is free"""
    commit_seconds: float
    """a finished request is durable within this time"""
    prefill_tokens: int
    """prompt tokens per prefill step and rank (long prompts are cut)"""
    decode_requests: int
    """requests that decode together on one rank"""
    gpu: Literal["H800", "H100", "H200", "B200", "B300", "GB200", "GB300"] | None
    """accelerator of each rank; the plan then predicts without an earlier run"""
    finish_hours: float | None
    """with gpu: the plan also reports the number of nodes that finish within this time"""


class KvKeys(TypedDict, total=False):
    """[kv] of a job file: KV of tokens, and the KV store on disk, from which prefixes computed by this or earlier jobs are read."""

    dtype: Literal["auto", "fp8"]
    """of latents in pages and store; auto: bfloat16, or float32 if the model is; fp8: E4M3 with a scale per 128
    values, 0.57 of the bytes, but different results (rotary keys stay in bfloat16)"""
    dir: str | Path | None
    """folder of the store; unset: no store"""
    shared_group: str | None
    """group whose members all use the store and trust each other; unset: only this user does"""
    max_bytes: int | None
    """size bound of the store"""
    second_tier: str | None
    """s3://bucket/folder with a copy of all blocks, for nodes whose `dir` is on a local disk"""
    block_tokens: int
    """tokens per block, a multiple of 64; rounded up to a multiple of 128 for deepseek_v4"""
    persist: Literal["shared", "all", "none"]
    """blocks to write: those of several requests, all, or none"""
    reuse: Literal["auto", "always"]
    """auto: stop loading when it is slower than computing"""
    salt: str
    """part of every block's name: stores with other salts share nothing"""


class PricingKeys(TypedDict, total=False):
    """[pricing] of a job file: Prices for the report; values without a price are not reported."""

    gpu_hour: float | None
    """$ per accelerator-hour (per rank on a CPU)"""
    input_hit: float | None
    """$ per million input tokens served from a cache"""
    input_miss: float | None
    """$ per million input tokens computed"""
    output: float | None
    """$ per million output tokens"""


class S3Keys(TypedDict, total=False):
    """[s3] of a job file: Access to s3:// URIs. Credentials come from AWS's environment variables and profiles, never from the job."""

    endpoint: str | None
    """URL of another S3 service; unset: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else Amazon's"""
    region: str | None
    """unset: AWS_REGION or AWS_DEFAULT_REGION, else asked of the bucket"""
    anonymous: bool
    """send no credentials, for public buckets"""


class SlurmKeys(TypedDict, total=False):
    """[slurm] of a job file: Use of a Slurm cluster, without effect on results."""

    schedule: list[str] | tuple[str, ...]
    """tasks by local time of day, for `submit --follow`: 'HH:MM N' or 'HH:MM N%M' each"""


class JobKeys(TypedDict, total=False):
    """The parts of a job file."""

    input: InputKeys
    output: OutputKeys
    model: ModelKeys
    sampling: SamplingKeys
    cluster: ClusterKeys
    kv: KvKeys
    pricing: PricingKeys
    s3: S3Keys
    slurm: SlurmKeys
