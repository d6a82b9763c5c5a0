"""Build steps: the README for package indexes, and a wheel for one platform with the C++ operations compiled inside.

    BATCHINFER_COMPILED=1 python -m build --wheel --no-isolation

That wheel has the operations for every instruction set. It asks for the release of torch that the building environment
has, since compiled operations fit one release. Without the variable the wheel is the same on all platforms, and
compiles the operations on first use.
"""

import os
import re
import sys
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "kernels"))


def readme() -> str:
    """Return README.md with whole addresses in place of relative links, which lead nowhere on a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = project["urls"]["Homepage"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/raw/main/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{home}/blob/main/", text)


class _CompiledDistribution(Distribution):
    """The distribution with operations compiled inside; a class of setuptools."""

    def has_ext_modules(self) -> bool:
        return True

    def parse_config_files(self, *args: object, **options: object) -> None:
        from batchinfer_kernels.cpu.build import torch_release

        super().parse_config_files(*args, **options)
        torch = f"torch=={torch_release()}"
        fixed = [torch if one.startswith("torch>") else one for one in self.install_requires]
        self.install_requires = self.metadata.install_requires = fixed


class _BuildCompiled(build_py):
    """Copy the modules, then compile the operations next to them."""

    def run(self) -> None:
        from batchinfer_kernels.cpu.build import compile_all

        super().run()
        compile_all(Path(self.build_lib, "batchinfer_kernels", "cpu", "compiled"))


class _CompiledWheel(bdist_wheel):
    """Name the wheel for its platform and any Python 3: the operations use nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


description = {"long_description": readme(), "long_description_content_type": "text/markdown"}
if os.environ.get("BATCHINFER_COMPILED") == "1":
    commands = {"build_py": _BuildCompiled, "bdist_wheel": _CompiledWheel}
    setup(distclass=_CompiledDistribution, cmdclass=commands, **description)
else:
    setup(**description)
