"""The job file: its parts, their keys, and what each may say."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from batchinfer.config.part import INT64_MAX, Part, Text
from batchinfer.config.sampling import NOTHING_SCORED, JobSampling
from batchinfer.config.uris import is_uri
from batchinfer.sanitize import first_line

# what data/formats/openai_batch.py makes of a line, as keys of [input]
OPENAI_COLUMNS = {"id": "custom_id", "messages": "request", "sampling": "sampling"}
PAGE_TOKENS = 64  # tokens in one page of device KV
FREE_SHARE = 8  # prefill waits until this fraction (1/8) of the decode slots is free, so that its steps are not tiny
# Of KV, and of weights that are never in 8 or 4 bits, by model.dtype.
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2, "int4": 2}

Count = Annotated[int, Field(ge=1, le=INT64_MAX)]
RankCount = Annotated[int, Field(ge=1, le=4096)]
Price = Annotated[float, Field(ge=0)]

_FOLDER_IN_BUCKET = r"s3://[^/*?\[]+/[^*?\[]*[^*?\[/]/?"


class InputConfig(Part):
    """Where the prompts are and which columns hold what."""

    files: list[Text] = Field(
        min_length=1,
        description="shards: paths, folders or URIs (s3://bucket/a.parquet), globs too (`*`, `**`), in sorted order",
    )
    format: Literal["parquet", "jsonl", "csv", "arrow", "sharegpt", "openai"] | None = Field(
        None,
        description="of the files; unset: by extension, as jsonl.gz or tsv, else Parquet; sharegpt: by extension, and "
        "messages (unset: conversations) holds {from: human | gpt | system, value}; openai: lines of its batch files",
    )
    id: Text = Field(
        "id",
        description="column with the row's id (text or integer), which may repeat or be null; none: rows have no ids",
    )
    prompt: Text | None = Field(None, description="column with raw prompt text (or messages, template, token_ids)")
    messages: Text | None = Field(
        None, description="column with a list of {role, content}, or JSON text of it, put through the chat template"
    )
    template: Text | None = Field(
        None,
        description="Jinja over the row's columns that writes the raw prompt text; with system: the user's message",
    )
    system: Text | None = Field(None, description="text of the system message of chats that have none")
    chat_template_kwargs: dict[str, JsonValue] | Text | None = Field(
        None,
        description="variables for the chat template, such as enable_thinking, or JSON text of them ({...}); or a "
        "column: structs or JSON text",
    )
    tools: list[dict[str, JsonValue]] | dict[str, JsonValue] | Text | None = Field(
        None,
        description="tools for the chat template, or JSON text of them ([...]), or a column with them: structs or JSON "
        "text; outputs get tool_calls",
    )
    continue_final_message: bool = Field(
        False, description="the answer goes on where the last message ends, as with transformers"
    )
    token_ids: Text | None = Field(None, description="column with ready token ids")
    control_tokens: Literal["parse", "text", "error"] = Field(
        "parse",
        description="prompts that spell control tokens such as <|User|>: parse: they are these tokens, as with "
        "transformers; text: ordinary text; error: the row is bad",
    )
    choices: Text | None = Field(
        None,
        description="column with a list of texts (or of lists of token ids), each scored as the prompt's continuation; "
        "sampling.max_tokens must be 0",
    )
    sampling: Text | None = Field(
        None, description="column with a struct, or JSON text of one, that overrides [sampling] row by row"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_columns_of_format(cls, table: Any) -> Any:
        form = table.get("format") if isinstance(table, dict) else None
        if form != "openai":
            return {"messages": "conversations", **table} if form == "sharegpt" else table
        for name in ("id", "prompt", "messages", "template", "token_ids", "tools", "choices", "sampling"):
            if table.get(name, OPENAI_COLUMNS.get(name)) != OPENAI_COLUMNS.get(name):
                raise ValueError(f"{name} does not go with format = 'openai', whose lines say all that; leave it out")
        kwargs = table.get("chat_template_kwargs")
        if isinstance(kwargs, str) and not _is_json(kwargs):
            raise ValueError("chat_template_kwargs names a column, which format = 'openai' has not; write a table")
        return {**table, **OPENAI_COLUMNS}

    @field_validator("chat_template_kwargs", "tools", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Values that are null, which TOML has not, are written as JSON text."""
        if not isinstance(value, str) or not _is_json(value):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"begins as JSON does, but is not valid JSON: {first_line(error)}") from None

    @model_validator(mode="after")
    def _one_prompt_column(self) -> InputConfig:
        given = [name for name in ("prompt", "messages", "token_ids", "template") if getattr(self, name) is not None]
        if len(given) != 1:
            have = " and ".join(given) or "none"
            raise ValueError(f"prompt, messages, token_ids, template: exactly one must be set, but the job sets {have}")
        for name in ("system", "chat_template_kwargs", "tools"):
            if getattr(self, name) is not None and not self.makes_chats:
                raise ValueError(
                    f"{name} is for chats, but {given[0]} alone makes none; use messages, or template with system"
                )
        if self.continue_final_message and self.messages is None:
            raise ValueError(f"continue_final_message is for chats of input.messages, but the job sets {given[0]}")
        return self

    @property
    def makes_chats(self) -> bool:
        """Whether prompts go through the chat template; with format = 'openai' each line says."""
        return self.messages is not None or (self.template is not None and self.system is not None)

    @property
    def prompt_column(self) -> str:
        """The column that holds prompts; "" where `template` makes them of others."""
        return self.prompt or self.messages or self.token_ids or ""

    @property
    def prompt_kind(self) -> Literal["prompt", "messages", "token_ids", "template"]:
        if self.template:
            return "template"
        return "prompt" if self.prompt else "messages" if self.messages else "token_ids"


class OutputConfig(Part):
    """Where the run folder is and what goes along to the outputs."""

    dir: Text = Field(
        description="run folder: plan, durable results, outputs/ and stats/; a folder that all workers see, or "
        "s3://bucket/folder in a store with conditional writes"
    )
    work_dir: Text | None = Field(
        None, description="folder for each node's copy of a run folder in s3://; unset: one in the temporary folder"
    )
    format: Literal["parquet", "jsonl", "openai"] = Field(
        "parquet",
        description="of outputs/: Parquet always; jsonl: the same rows as lines, too; openai: lines as OpenAI answers "
        "a batch, too, and *.errors.jsonl",
    )
    push: Literal["hf-folder"] | None = Field(
        None, description="hf-folder: dataset/ in the run folder is these outputs as a Hugging Face dataset with a card"
    )
    keep_columns: list[Text] = Field(default=[], description="input columns to copy to the outputs")
    publish: Text | None = Field(
        None, description="URI such as s3://bucket/folder: `finish` copies outputs/ and stats/ there, too"
    )
    reasoning: Literal["none", "auto", "deepseek_r1"] = Field(
        "none",
        description="what a model thinks up to </think> apart from its answer, in columns of its own; deepseek_r1: "
        "an answer begins in thinking unless its prompt ends it; auto: where the prompt or the answer begins it",
    )
    token_texts: bool = Field(False, description="each token of logprobs has its text beside its id")
    shared_group: Text | None = Field(
        None, description="group whose members may all work in the run folder; unset: only this user enters it"
    )

    @field_validator("dir")
    @classmethod
    def _is_folder(cls, value: str) -> str:
        if value.startswith("s3:"):
            if re.fullmatch(_FOLDER_IN_BUCKET, value) is None:
                raise ValueError("names no folder in a bucket; write s3://bucket/folder, without wildcards")
            return value.rstrip("/")
        if is_uri(value) and not value.startswith("file:"):
            raise ValueError(
                "is a URI, but a run folder is on a file system or in S3 (s3://bucket/folder), since it needs "
                "exclusive create; have `finish` copy the results elsewhere with output.publish"
            )
        return value

    @field_validator("publish")
    @classmethod
    def _is_a_place(cls, value: str | None) -> str | None:
        if value is not None and not is_uri(value):
            raise ValueError(
                f"is {value!r}, not a URI such as s3://bucket/folder; output.dir is the place for a folder"
            )
        return value

    @field_validator("keep_columns")
    @classmethod
    def _no_repeats(cls, value: list[str]) -> list[str]:
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"names {name!r} twice")
        return value


class ModelPart(Part):
    """The model folder, as Hugging Face lays it out."""

    path: Text = Field(
        description="folder with config.json (or params.json), *.safetensors, tokenizer.json (or tiktoken.model, "
        "tekken.json), tokenizer_config.json"
    )
    dtype: Literal["float32", "bfloat16", "fp8", "int4"] = Field(
        "bfloat16",
        description="precision of weights and KV; fp8: 8-bit weights and products, KV in bfloat16; "
        "int4: as fp8, with routed experts in 4 bits (on CPUs)",
    )


class ClusterConfig(Part):
    """Ranks, memory and how often results become durable."""

    mode: Literal["colocated", "disaggregated"] = Field("colocated", description="same ranks for both phases, or apart")
    prefill_ranks: RankCount | None = Field(None, description="expert-parallel size of prefill")
    decode_ranks: RankCount | None = Field(None, description="expert-parallel size of decode (colocated: the same)")
    redundant_experts: int = Field(0, ge=0, le=65536, description="extra expert slots, over all ranks of a group")
    nodes: RankCount | None = Field(
        None, description="hosts that the ranks are spread over, evenly and in order; unset: as Slurm or the ranks say"
    )
    overlap: bool | None = Field(
        None, description="two micro-batches, one computes while the other's rows travel; unset: when EP size > 1"
    )
    speculate: Literal["auto", "off"] = Field(
        "off",
        description="draft tokens with the model's own layer for multi-token prediction and run them with those that "
        "are due; results stay the same to the byte; auto: in steps where it is quicker, by what was measured",
    )
    backend: Literal["auto", "hopper", "hopper-invariant", "triton", "sdpa", "cpu", "reference"] = Field(
        "auto",
        description="kernels; `batchinfer doctor` says which run here; cpu: C++; on GPUs sdpa: as auto, but PyTorch's "
        "own attention for prefill; hopper: as auto, but flash_mla cuts a decode step as it likes, which is quicker "
        "where requests are few, and a request's last bits depend on what is decoded beside it",
    )
    exchange: Literal["auto", "shared", "tls", "gloo", "nccl", "deepep", "deepep-v1", "deepep-low-latency"] = Field(
        "auto",
        description="how expert rows travel; auto: shared memory on one host, tls between hosts, nccl on GPUs; "
        "deepep-low-latency is for decode, ranks that do prefill alone take deepep-v1",
    )
    graphs: Literal["auto", "off"] = Field(
        "auto",
        description="decode steps as CUDA graphs where GPU, exchange and operations allow it; off: never, for drivers "
        "with which they fail; results stay the same",
    )
    collective_seconds: float = Field(
        300.0, gt=0, le=86400, description="a rank that does not answer for this long has failed"
    )
    page_bytes: Count | None = Field(None, description="KV page budget per rank in bytes; measured when unset")
    commit_seconds: float = Field(30.0, gt=0, le=86400, description="a finished request is durable within this time")
    prefill_tokens: int = Field(
        4096, ge=1, le=2**20, description="prompt tokens per prefill step and rank (long prompts are cut)"
    )
    decode_requests: int = Field(256, ge=1, le=2**16, description="requests that decode together on one rank")
    gpu: Literal["H800", "H100", "H200", "B200"] | None = Field(
        None, description="accelerator of each rank, in nodes of eight; the plan then predicts without an earlier run"
    )
    finish_hours: float | None = Field(
        None, gt=0, description="with gpu: the plan also says how many nodes finish within this time"
    )

    @model_validator(mode="after")
    def _ranks_fit_the_mode(self) -> ClusterConfig:
        if self.mode == "disaggregated":
            for name in ("prefill_ranks", "decode_ranks"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is not set; disaggregated ranks need both prefill_ranks and decode_ranks")
        elif None not in (self.prefill_ranks, self.decode_ranks) and self.prefill_ranks != self.decode_ranks:
            raise ValueError(
                f"decode_ranks is {self.decode_ranks} and prefill_ranks {self.prefill_ranks}, but colocated ranks do "
                "both; make them equal, leave one out, or set mode = 'disaggregated'"
            )
        if self.finish_hours is not None and self.gpu is None:
            raise ValueError("finish_hours is set, but not gpu; name the gpu whose nodes are to be counted")
        return self

    @property
    def num_prefill_ranks(self) -> int:
        return self.prefill_ranks or self.decode_ranks or 1

    @property
    def num_decode_ranks(self) -> int:
        return self.decode_ranks or self.prefill_ranks or 1

    @property
    def expert_groups(self) -> dict[str, int]:
        """The groups of ranks over which experts are spread: what they run -> how many ranks, where that is several."""
        if self.mode == "colocated":
            groups = {"both": self.num_prefill_ranks}
        else:
            groups = {"prefill": self.num_prefill_ranks, "decode": self.num_decode_ranks}
        return {phase: num_ranks for phase, num_ranks in groups.items() if num_ranks > 1}

    def hosts_of(self, phase: str, nodes: int) -> list[str]:
        """The host of each rank of an expert group, if all ranks are spread over `nodes` hosts, evenly and in order."""
        first = self.num_prefill_ranks if phase == "decode" else 0
        return [str(rank * nodes // self.num_ranks) for rank in range(first, first + self.expert_groups[phase])]

    @property
    def num_ranks(self) -> int:
        """Processes in all: colocated ranks do both phases."""
        both = self.num_prefill_ranks
        return both + self.num_decode_ranks if self.mode == "disaggregated" else both


class KvConfig(Part):
    """What is kept of tokens, and the store on disk: prefixes that this or an earlier job has computed are read."""

    dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="of latents in pages and store; auto: bfloat16, or float32 as the model; fp8: E4M3 with a scale "
        "per 128 values, 0.57 of the bytes and other results (rotary keys stay in bfloat16)",
    )
    dir: Text | None = Field(None, description="folder of the store; unset: no store")
    shared_group: Text | None = Field(
        None, description="group whose members all use the store and trust each other; unset: only this user does"
    )
    max_bytes: Count | None = Field(None, description="size bound of the store")
    second_tier: Text | None = Field(
        None, description="s3://bucket/folder that has all blocks, too: for nodes whose `dir` is on a disk of their own"
    )
    block_tokens: int = Field(PAGE_TOKENS, ge=PAGE_TOKENS, le=2**20, description="tokens per block, a multiple of 64")
    persist: Literal["shared", "all", "none"] = Field(
        "shared", description="blocks to write: those that several requests have, all, or none"
    )
    reuse: Literal["auto", "always"] = Field("auto", description="auto: stop loading when it is slower than computing")
    salt: str = Field("", description="part of every block's name: stores with other salts share nothing")

    @field_validator("block_tokens")
    @classmethod
    def _whole_pages(cls, value: int) -> int:
        if value % PAGE_TOKENS:
            raise ValueError(
                f"is {value}, not a multiple of {PAGE_TOKENS}; use {-(-value // PAGE_TOKENS) * PAGE_TOKENS}"
            )
        return value

    @field_validator("second_tier")
    @classmethod
    def _is_in_bucket(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(_FOLDER_IN_BUCKET, value) is None:
            raise ValueError("names no folder in a bucket; write s3://bucket/folder, without wildcards")
        return value if value is None else value.rstrip("/")

    @model_validator(mode="after")
    def _has_first_tier(self) -> Self:
        if self.second_tier is not None and self.dir is None:
            raise ValueError("second_tier is set, but not dir; name a folder on a disk of each node")
        return self


class PricingConfig(Part):
    """Prices for the report; what is unset is not reported."""

    gpu_hour: Price | None = Field(None, description="$ per accelerator-hour (per rank on a CPU)")
    input_hit: Price | None = Field(None, description="$ per million input tokens served from a cache")
    input_miss: Price | None = Field(None, description="$ per million input tokens computed")
    output: Price | None = Field(None, description="$ per million output tokens")


class S3Config(Part):
    """How s3:// is reached. Credentials are never here: they come from AWS's environment variables and profiles."""

    endpoint: Text | None = Field(
        None, description="URL of another S3 service; unset: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else Amazon's"
    )
    region: Text | None = Field(None, description="unset: AWS_REGION or AWS_DEFAULT_REGION, else asked of the bucket")
    anonymous: bool = Field(False, description="send no credentials, for public buckets")

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/@?#]+/?", value):
            raise ValueError("is not of the form https://host:port (no path, no credentials)")
        return value


DEFAULT_S3 = S3Config()


class SlurmConfig(Part):
    """How a job uses a Slurm cluster; nothing here changes a result."""

    schedule: list[Text] = Field(
        default=[],
        description="tasks by local time of day, for `submit --follow`: 'HH:MM N' or 'HH:MM N%M' each",
    )


class JobConfig(Part):
    """One job file."""

    input: InputConfig
    output: OutputConfig
    model: ModelPart
    sampling: JobSampling
    cluster: ClusterConfig = ClusterConfig()
    kv: KvConfig = KvConfig()
    pricing: PricingConfig = PricingConfig()
    s3: S3Config = DEFAULT_S3
    slurm: SlurmConfig = SlurmConfig()

    @property
    def precision(self) -> str:
        """What values are held in, for people and wherever runs are compared: model.dtype, and KV where it differs."""
        return self.model.dtype if self.kv.dtype == "auto" else f"{self.model.dtype}, KV in {self.kv.dtype}"

    @model_validator(mode="after")
    def _something_is_computed(self) -> JobConfig:
        if not self.sampling.max_tokens and self.sampling.prompt_logprobs is None and self.input.choices is None:
            raise ValueError(f"sampling.max_tokens {NOTHING_SCORED}")
        return self

    @model_validator(mode="after")
    def _choices_generate_nothing(self) -> JobConfig:
        for name, wanted in (("max_tokens", 0), ("n", 1)):
            value = getattr(self.sampling, name)
            if self.input.choices is not None and value != wanted:
                raise ValueError(
                    f"sampling.{name} is {value}, but a job with input.choices generates nothing; set it to {wanted}"
                )
        if self.input.choices is not None and self.sampling.prompt_logprobs is not None:
            raise ValueError("sampling.prompt_logprobs does not go with input.choices; leave one of them out")
        return self

    @model_validator(mode="after")
    def _latents_are_rounded_from_bfloat16(self) -> JobConfig:
        if self.kv.dtype == "fp8" and self.model.dtype == "float32":
            raise ValueError(
                "kv.dtype is 'fp8', but model.dtype is 'float32'; FP8 is rounded from bfloat16: use model.dtype "
                "bfloat16, fp8 or int4, or leave kv.dtype out"
            )
        return self

    @model_validator(mode="after")
    def _answers_have_names(self) -> JobConfig:
        without = {"input.choices is set": self.input.choices is not None, "rows have no ids": self.input.id == "none"}
        for reason, holds in without.items():
            if self.output.format == "openai" and holds:
                raise ValueError(
                    f"output.format is 'openai', in which lines are answers by id, but {reason}; use jsonl"
                )
        return self

    @model_validator(mode="after")
    def _texts_have_tokens(self) -> JobConfig:
        asked_for = self.sampling.logprobs, self.sampling.prompt_logprobs, self.input.sampling
        if self.output.token_texts and all(item is None for item in asked_for):
            raise ValueError(
                "output.token_texts is set, but no row has logprobs; set sampling.logprobs, or leave token_texts out"
            )
        return self


def _is_json(text: str) -> bool:
    """Whether the value of a key that may also name a column is JSON."""
    return text.lstrip()[:1] in ("[", "{")
