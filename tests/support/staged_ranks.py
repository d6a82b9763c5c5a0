"""Rank processes on a CPU whose rows are staged as a GPU's are: copied into the host's shared memory and out of it.

Everything else is the product. What a GPU adds, streams and copies over PCIe, is not in it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

SITE = """
import os
if "BATCHINFER_RANK_NUMBER" in os.environ:
    from support.staged_ranks import install
    install(**{options!r})
"""


def write_site(folder: Path, **options: Any) -> str:
    """A folder for PYTHONPATH with which ranks call `install` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(options={"marks": str(folder), **options}))
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def install(*, marks: str, dies: tuple[int, int] | None = None) -> None:
    """Have rows staged.

    Args:
        marks: a folder; each rank that exchanges rows leaves a file rank-N, and one that has died a file died.
        dies: a rank, and how many exchanges it has made when it dies in the middle of the next, once.
    """
    from batchinfer.parallel import mesh
    from batchinfer.parallel.staged_exchange import StagedExchange

    died = Path(marks, "died")
    plain, made = StagedExchange._all_to_all, 0

    def counted(self: StagedExchange, *arguments: Any) -> Any:
        nonlocal made
        rank = int(os.environ["BATCHINFER_RANK_NUMBER"])  # not that of the process that ranks are forked from
        Path(marks, f"rank-{rank}").touch()
        if dies is not None and (rank, made) == dies and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        made += 1
        return plain(self, *arguments)

    stand_ins: list[tuple[Any, str, Any]] = [
        (mesh, "_is_staged", lambda device: True),
        (StagedExchange, "_all_to_all", counted),
    ]
    for owner, name, stand_in in stand_ins:
        assert hasattr(owner, name)
        setattr(owner, name, stand_in)
