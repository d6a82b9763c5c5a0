"""The schema of the job file: its parts, their keys and the checks of values."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from batchinfer.config.cluster import ClusterConfig
from batchinfer.config.input import InputConfig
from batchinfer.config.part import Count, Part, Text
from batchinfer.config.sampling import NOTHING_SCORED, JobSampling
from batchinfer.config.uris import is_uri

PAGE_TOKENS = 64  # tokens in one page of device KV
# Bytes of a value of KV, and of weights that are never in 8 or 4 bits, by model.dtype.
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2, "int4": 2, "fp4": 2}

Price = Annotated[float, Field(ge=0)]


def _folder_in_bucket(value: str) -> str:
    if re.fullmatch(r"s3://[^/*?\[]+/[^*?\[]*[^*?\[/]/?", value) is None:
        raise ValueError("names no folder in a bucket; write s3://bucket/folder, without wildcards")
    return value.rstrip("/")


class OutputConfig(Part):
    """The run folder, and form and columns of the outputs."""

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
        description="separate columns for a model's thinking up to </think>, or in gpt-oss's channel analysis; "
        "deepseek_r1: an answer begins with thinking unless its prompt ends it; auto: only if the prompt "
        "or the answer begins it",
    )
    token_texts: bool = Field(False, description="logprobs have the text of each token in addition to its id")
    shared_group: Text | None = Field(
        None, description="group whose members may all work in the run folder; unset: only this user enters it"
    )

    @field_validator("dir")
    @classmethod
    def _is_folder(cls, value: str) -> str:
        if value.startswith("s3:"):
            return _folder_in_bucket(value)
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
    """The model folder, in Hugging Face's layout."""

    path: Text = Field(
        description="owner/name[@revision] in the Hugging Face cache, or a folder with config.json (or params.json), "
        "*.safetensors, tokenizer.json (or tiktoken.model, tekken.json), tokenizer_config.json"
    )
    dtype: Literal["float32", "bfloat16", "fp8", "int4", "fp4"] = Field(
        "bfloat16",
        description="precision of weights and KV; fp8: 8-bit weights and products, KV in bfloat16; "
        "int4: as fp8, with routed experts in 4 bits; "
        "fp4: as fp8, with routed experts as stored in MXFP4",
    )


class KvConfig(Part):
    """KV of tokens, and the KV store on disk, from which prefixes computed by this or earlier jobs are read."""

    dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="of latents in pages and store; auto: bfloat16, or float32 if the model is; fp8: E4M3 with a scale "
        "per 128 values, 0.57 of the bytes, but different results (rotary keys stay in bfloat16)",
    )
    dir: Text | None = Field(None, description="folder of the store; unset: no store")
    shared_group: Text | None = Field(
        None, description="group whose members all use the store and trust each other; unset: only this user does"
    )
    max_bytes: Count | None = Field(None, description="size bound of the store")
    second_tier: Annotated[Text, AfterValidator(_folder_in_bucket)] | None = Field(
        None, description="s3://bucket/folder with a copy of all blocks, for nodes whose `dir` is on a local disk"
    )
    block_tokens: int = Field(
        PAGE_TOKENS,
        ge=PAGE_TOKENS,
        le=2**20,
        description="tokens per block, a multiple of 64; rounded up to a multiple of 128 for deepseek_v4",
    )
    persist: Literal["shared", "all", "none"] = Field(
        "shared", description="blocks to write: those of several requests, all, or none"
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

    @model_validator(mode="after")
    def _has_first_tier(self) -> Self:
        if self.second_tier is not None and self.dir is None:
            raise ValueError("second_tier is set, but not dir; name a folder on a disk of each node")
        return self


class PricingConfig(Part):
    """Prices for the report; values without a price are not reported."""

    gpu_hour: Price | None = Field(None, description="$ per accelerator-hour (per rank on a CPU)")
    input_hit: Price | None = Field(None, description="$ per million input tokens served from a cache")
    input_miss: Price | None = Field(None, description="$ per million input tokens computed")
    output: Price | None = Field(None, description="$ per million output tokens")


class S3Config(Part):
    """Access to s3:// URIs. Credentials come from AWS's environment variables and profiles, never from the job."""

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
    """Use of a Slurm cluster, without effect on results."""

    schedule: list[Text] = Field(
        default=[],
        description="tasks by local time of day, for `submit --follow`: 'HH:MM N' or 'HH:MM N%M' each",
    )


class JobConfig(Part):
    """A job file."""

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
        """Precision in words, for reports and comparisons of runs: model.dtype, and kv.dtype unless it is auto."""
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
