"""batchinfer: offline batch inference for DeepSeek-V3/R1-style models.

A prompt's journey, one way: data (Parquet, tokenise, validate) -> plan (order, pack into work units) -> engine
(prefill, decode) -> finish (outputs in input order, statistics) -> report.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("batchinfer")
except PackageNotFoundError:  # run from a source folder on sys.path, where nothing can be installed
    __version__ = "0+source"
