"""batchinfer: offline batch inference for DeepSeek-V3/R1-style models.

A prompt's journey, one way: data (Parquet, tokenise, validate) -> plan (order, pack into work units) -> work
(a controller and its ranks: prefill, decode) -> finish (outputs in input order, statistics) -> report.

From Python: `generate` for prompts in memory, `Model` for several calls, `Job` for a job file. The errors are those of
records.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchinfer.api import Job as Job
    from batchinfer.api import Model as Model
    from batchinfer.api import generate as generate
    from batchinfer.records import BatchinferError as BatchinferError
    from batchinfer.records import ConfigError as ConfigError
    from batchinfer.records import DamagedFileError as DamagedFileError
    from batchinfer.records import IncompleteRunError as IncompleteRunError
    from batchinfer.records import InputError as InputError
    from batchinfer.records import InterruptedRunError as InterruptedRunError
    from batchinfer.records import ModelError as ModelError
    from batchinfer.records import RunMismatchError as RunMismatchError
    from batchinfer.records import StoreError as StoreError

__version__: str

_API = ("Job", "Model", "generate")
_ERRORS = (
    "BatchinferError", "ConfigError", "DamagedFileError", "IncompleteRunError", "InputError", "InterruptedRunError",
    "ModelError", "RunMismatchError", "StoreError",
)  # fmt: skip


if not TYPE_CHECKING:  # for type checkers the names above are all there are

    def __getattr__(name: str) -> Any:
        """Import a name of the API, or look up the version (35 ms), on first access: commands start without either."""
        from importlib import import_module

        if name in (*_API, *_ERRORS):
            return getattr(import_module("batchinfer.api" if name in _API else "batchinfer.records"), name)
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("batchinfer")
        except PackageNotFoundError:  # run from a source folder on sys.path, where nothing can be installed
            return "0+source"


def __dir__() -> list[str]:
    return sorted({*globals(), *_API, *_ERRORS, "__version__"})
