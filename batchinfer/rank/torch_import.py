"""A quicker `import torch`, which is most of a rank's start.

A quarter of that import goes to modules that only tracing, compiling and training ask for, which no rank does; most of
it to torch._meta_registrations, what operators make of tensors without values. They are executed when somebody first
uses a name of theirs. In which order torch's modules import each other changes from version to version, and an import
that ends in a circle cannot be tried again in its process: versions that nobody has tried are imported whole.
"""

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PUT_OFF = frozenset({"torch._meta_registrations", "torch.distributions", "torch.quantization"})
TRIED = frozenset({"2.11", "2.13", "2.14", "2.15"})


def put_off_compilers() -> None:
    """Let a later `import torch` of this process leave out the modules of PUT_OFF until they are used."""
    if ".".join(importlib.metadata.version("torch").split(".")[:2]) in TRIED:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds the modules of PUT_OFF and nothing else (a finder of sys.meta_path)."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PUT_OFF:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(Loader):
    """Hands out a module that its own loader executes later."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not yet."""


class _LateModule(ModuleType):
    """importlib.util.LazyLoader's would not do: an import asks for the module's __spec__, a use of it there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        loader = self.__spec__.loader  # type: ignore[union-attr]
        self.__class__ = ModuleType  # type: ignore[assignment]  # first: what it imports may import it in turn
        loader.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)
