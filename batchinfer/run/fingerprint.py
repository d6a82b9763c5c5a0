"""Fingerprint of a job: digests of model, tokenizer, inputs and settings, equal for two runs of the same job."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer import __version__
from batchinfer.config import JobConfig
from batchinfer.config.model_folder import config_file
from batchinfer.model_code import model_code
from batchinfer.records import ModelError, RunMismatchError, Shard

if TYPE_CHECKING:
    from batchinfer.data.prompt_tokenizer import PromptTokenizer

SAMPLE_BYTES = 128
SAMPLES_PER_TENSOR = 4
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format

Fingerprint = dict[str, Any]
# fields that an earlier run must share so that its answers can be reused
OF_ANSWERS = ("model.config", "model.weights", "tokenizer and template", "model.dtype", "output.reasoning")
VERSION = "version of batchinfer"
OF_CODE = (VERSION, "model code")


def job_fingerprint(job: JobConfig, shards: list[Shard], tokenizer_digest: str) -> Fingerprint:
    """Return everything that can change an output row, as small JSON values by name.

    Ranks, page budget, prices and commit interval are left out: results do not depend on them.

    Raises:
        ModelError: config.json or a weight file cannot be read.
    """
    return {
        **model_fingerprint(job, tokenizer_digest),
        **settings_fingerprint(job),
        "input shards": [_identity(shard) for shard in shards],
    }


def model_fingerprint(job: JobConfig, tokenizer_digest: str) -> Fingerprint:
    """Return the part of the fingerprint that depends on the model folder and on the code that computes the model."""
    folder = Path(job.model.path)
    return {
        "model.config": config_digest(folder),
        "model.weights": weights_digest(folder),
        "tokenizer and template": tokenizer_digest,
        "model code": model_code(),
    }


def settings_fingerprint(job: JobConfig) -> Fingerprint:
    """Return the part of the fingerprint that depends on the job file and the program version."""
    return {
        "model.dtype": job.precision,
        "sampling": job.sampling.model_dump(),
        # by extension is what "parquet" was before there were others
        "input columns": {**job.input.model_dump(exclude={"files"}), "format": job.input.format or "parquet"},
        "output.keep_columns": job.output.keep_columns,
        "output.reasoning": job.output.reasoning,
        "output.token_texts": job.output.token_texts,
        VERSION: __version__,
    }


def check_same(
    recorded: Fingerprint, current: Fingerprint, folder: Path | str, path_of_shard: Mapping[str, str] | None = None
) -> None:
    """Refuse to go on in a run folder that another job made.

    Args:
        path_of_shard: of both jobs' shards by name, for messages: names are those of the outputs.

    Raises:
        RunMismatchError: names the first field that differs, with both values when they are short.
    """
    # the code first: another version has other settings, too
    for field in (*(name for name in OF_CODE if name in current), *current):
        name, old, new = field, recorded.get(field), current[field]
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            missing = "not known"  # to another version of the program
            key = next(key for key in {**old, **new} if old.get(key, missing) != new.get(key, missing))
            name, old, new = f"{name}.{key}", old.get(key, missing), new.get(key, missing)
        differs = difference(name, old, new)
        if field == "input shards":
            differs = _shards_differ(old or [], new, path_of_shard or {})
        other = f"choose another output.dir{_reuse_hint(recorded, current)}"
        back = "go back to the code that it began with" if field in OF_CODE else "restore what changed"
        raise RunMismatchError(
            f"the run folder {folder} belongs to another job: {differs}; {other}, {back}, or delete that folder"
        )


def _reuse_hint(recorded: Fingerprint, current: Fingerprint) -> str:
    """Return the hint at --reuse, "" if a difference makes --reuse refuse the run."""
    if any(recorded.get(name) != current[name] for name in (*OF_ANSWERS, *OF_CODE) if name in current):
        return ""
    return " (with --reuse it gets the answers that are still the same)"


def planned_tokenizer(job: JobConfig, recorded: Fingerprint, folder: Path | str) -> PromptTokenizer:
    """Return the model's tokenizer, if it is the one of the plan.

    Args:
        recorded: the plan's fingerprint.
        folder: the run folder, for messages.

    Raises:
        ModelError: the tokenizer cannot be read.
        RunMismatchError: it is another one.
    """
    from batchinfer.data.tokenizer import load_tokenizer  # half a second, which most commands can do without

    tokenizer = load_tokenizer(Path(job.model.path))
    check_same(recorded, {"tokenizer and template": tokenizer.digest}, folder)
    return tokenizer


def difference(name: str, old: Any, new: Any) -> str:
    """Return a sentence on a field that differs, with both values when they are short."""
    return f"{name} was {_short(old)} and is now {_short(new)}"


def config_digest(folder: Path) -> str:
    """Return the digest of the model config in canonical form: key order and white space do not count."""
    path = config_file(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def weights_digest(folder: Path) -> str:
    """Return the digest of all safetensors files: names, sizes, headers and strided samples of every tensor.

    Reads about half a kilobyte per tensor, so that 700 GB take seconds rather than minutes.
    """
    hasher = hashlib.blake2b(digest_size=16)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(
            f"no *.safetensors file in {folder}; give a Hugging Face model folder with safetensors weights"
        )
    for path in paths:
        try:
            _hash_safetensors(path, hasher)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ModelError(f"cannot read the weights {path}: {error}; is the file complete?") from None
    return hasher.hexdigest()


def _hash_safetensors(path: Path, hasher: hashlib.blake2b) -> None:
    # file layout: header length (8 bytes, little endian), JSON header with byte ranges, tensor data
    size = path.stat().st_size
    hasher.update(f"{path.name}\0{size}\0".encode())
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(size, MAX_HEADER_BYTES):
            raise ValueError(f"its header claims {header_bytes} bytes")
        header = file.read(header_bytes)
        hasher.update(header)
        tensors = json.loads(header)
        for name in sorted(tensors):
            if name == "__metadata__":
                continue
            start, end = (int(value) for value in tensors[name]["data_offsets"])
            stride = max((end - start) // SAMPLES_PER_TENSOR, SAMPLE_BYTES)
            for offset in range(start, end, stride):
                hasher.update(os.pread(file.fileno(), min(SAMPLE_BYTES, end - offset), 8 + header_bytes + offset))


def _identity(shard: Shard) -> list[Any]:
    of_file = [shard.name, shard.size_bytes, shard.footer]
    return [*of_file, shard.version] if shard.version else of_file


def _shards_differ(old: list[Any], new: list[Any], path_of: Mapping[str, str]) -> str:
    """Return a sentence on the first difference; each shard is a list that begins with its name."""
    was, now = ({shard[0]: shard for shard in shards} for shards in (old, new))
    if added := now.keys() - was.keys():
        are_new = f"{'is' if len(added) == 1 else 'are'} new among its input shards"
        return f"{_some(added, path_of)} {are_new} (a job over new files alone gives their answers)"
    if gone := was.keys() - now.keys():
        return f"{_some(gone, path_of)} {'is' if len(gone) == 1 else 'are'} missing from its input shards"
    for name, shard in now.items():
        if shard != was[name]:
            return f"{path_of.get(name, name)} among its input shards has another content than when it was planned"
    return "input shards are in another order"


def _some(names: Iterable[str], path_of: Mapping[str, str]) -> str:
    """Return the path of the first shard by name, and the number of the others."""
    first, *others = sorted(names)
    return path_of.get(first, first) + (f" and {len(others):,} more" if others else "")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 100 else text[:97] + "..."
