"""batchinfer: offline batch inference for DeepSeek-V3/R1-style models.

A prompt's journey, one way: data (Parquet, tokenise, validate) -> plan (order, pack into work units) -> engine
(prefill, decode) -> finish (outputs in input order, statistics) -> report.
"""

__version__: str


def __getattr__(name: str) -> str:
    """The version, found when it is asked for: looking through installed packages takes 35 ms of every start."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("batchinfer")
    except PackageNotFoundError:  # run from a source folder on sys.path, where nothing can be installed
        return "0+source"
