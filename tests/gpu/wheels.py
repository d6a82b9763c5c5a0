"""Wheels brought along in a folder, unpacked onto sys.path: for machines that have nothing to install from.

python tests/gpu/wheels.py FOLDER TARGET       unpack them into a folder, for PYTHONPATH
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

_PARTS = ("purelib", "platlib")  # below NAME.data/: files that an installer would put next to the other packages


class WheelError(RuntimeError):
    """The folder cannot be used; the message says why."""


def unpack_into(target: Path, folder: Path) -> list[str]:
    """Unpack every wheel of `folder` into `target`, which then works as an entry of sys.path.

    Neither dependencies nor tags are looked at: that they fit this Python and this torch is for the caller to know.

    Returns:
        The names of the wheels.

    Raises:
        WheelError: there is no such folder, no wheel in it, or one that is no zip file.
    """
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not wheels:
        raise WheelError(f"{folder} has no *.whl files; name a folder that has, or leave it out")
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
        except zipfile.BadZipFile as error:
            raise WheelError(f"{wheel} is no wheel ({error}); bring it along again") from error
    for data in target.glob("*.data"):
        for part in _PARTS:
            if (data / part).is_dir():
                shutil.copytree(data / part, target, dirs_exist_ok=True)
    return [wheel.name for wheel in wheels]


def unpack_wheels(folder: Path) -> list[str]:
    """`unpack_into` a temporary folder, which goes to the front of sys.path, and away when the process ends."""
    target = Path(tempfile.mkdtemp(prefix="wheels-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    names = unpack_into(target, folder)
    sys.path.insert(0, str(target))
    return names


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tests/gpu/wheels.py FOLDER TARGET")
    try:
        print("unpacked " + ", ".join(unpack_into(Path(sys.argv[2]), Path(sys.argv[1]))))
    except WheelError as error:
        print(f"{error}.", file=sys.stderr)
        sys.exit(2)
