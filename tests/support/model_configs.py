"""Configs of models that differ in their attention."""

from dataclasses import fields, replace
from typing import Any

from batchinfer.model.config import ModelConfig
from batchinfer.model.indexer_config import IndexerConfig
from batchinfer.model.mla_config import DsaConfig, MlaConfig


def with_attention(model: ModelConfig, **changes: Any) -> ModelConfig:
    """The model with other values of its attention."""
    return replace(model, attention=replace(model.attention, **changes))


def with_indexer(model: ModelConfig, indexer: IndexerConfig) -> ModelConfig:
    """The model with an indexer, which may be another one than it had."""
    values = {field.name: getattr(model.attention, field.name) for field in fields(MlaConfig)}
    return replace(model, attention=DsaConfig(**values, indexer=indexer))


def value(config: ModelConfig, name: str) -> Any:
    """A value of the model or of its attention."""
    return getattr(config, name) if hasattr(config, name) else getattr(config.attention, name)
