"""A results folder as one archive, with what kernels were compiled to, and back.

    python tests/gpu/parcel.py pack RESULTS ARCHIVE
    python tests/gpu/parcel.py unpack ARCHIVE RESULTS

RESULTS/caches/triton and RESULTS/caches/deep_gemm hold what Triton and DeepGEMM have compiled; on the next machine they
save minutes. Triton's cache names its files by their full paths, which are put right where they are unpacked.

Exit codes: 0 done, 2 not possible, for the reason that is printed.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Triton's steps on the way to a kernel: larger than all else together, and nothing reads them again.
_LEFT_OUT = {".ttir", ".ttgir", ".llir", ".ptx", ".source"}
_WHEELS = Path("caches") / "wheels"  # unpacked; they travel packed
_TRITON = Path("caches") / "triton"
MOST_BYTES = 16 * 2**20  # what may be carried away as one file in some places


class ParcelError(RuntimeError):
    """The archive cannot be made or read; the message says why."""


def pack(results: Path, archive: Path) -> int:
    """Write `results` into `archive` through a temporary file; return its bytes."""
    if not results.is_dir():
        raise ParcelError(f"there is no folder {results}")
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(archive.name + ".partial")
    try:
        file = tarfile.open(partial, "w:xz", preset=3)  # noqa: SIM115
    except tarfile.CompressionError:  # a Python without lzma
        file = tarfile.open(partial, "w:gz")  # noqa: SIM115
    with file:
        for path in _contents(results):
            file.add(path, path.relative_to(results), recursive=False)
    os.replace(partial, archive)
    return archive.stat().st_size


def _contents(results: Path) -> Iterator[Path]:
    for path in sorted(results.rglob("*")):
        inside = path.relative_to(results)
        is_step = path.suffix in _LEFT_OUT and "caches" in inside.parts
        if path.is_file() and not path.is_symlink() and not is_step and not inside.is_relative_to(_WHEELS):
            yield path


def unpack(archive: Path, results: Path) -> None:
    """Unpack into a new folder `results`; files outside it, links and devices are refused."""
    if results.exists():
        raise ParcelError(f"{results} is there already; rename it or leave the archive packed")
    partial = results.with_name(results.name + ".partial")
    try:
        with tarfile.open(archive, "r:*") as file:
            _extract(file, partial)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ParcelError(f"{archive} cannot be unpacked ({error})") from error
    os.replace(partial, results)
    for path in (results / _TRITON).glob("*/__grp__*"):
        _move_group(path.resolve())


def _extract(file: tarfile.TarFile, folder: Path) -> None:
    """Write the archive's files into a folder."""
    members = file.getmembers()
    for member in members:
        inside = PurePosixPath(member.name)
        if not member.isreg() or inside.is_absolute() or ".." in inside.parts:
            raise tarfile.ReadError(f"{member.name} is outside the folder, or is no plain file")
    if hasattr(tarfile, "data_filter"):  # since Python 3.11.4; it also removes rights to write of other users
        file.extraction_filter = tarfile.data_filter
    file.extractall(folder, members)


def _move_group(path: Path) -> None:
    """Make one of Triton's lists of files name the files in its own folder, as far as they were copied."""
    files = json.loads(path.read_text())["child_paths"]
    here = {name: str(path.parent / Path(old).name) for name, old in files.items()}
    path.write_text(json.dumps({"child_paths": {name: new for name, new in here.items() if Path(new).exists()}}))


def main(arguments: list[str]) -> int:
    """Run the script; returns its exit code."""
    if len(arguments) != 3 or arguments[0] not in {"pack", "unpack"}:
        print("usage: python tests/gpu/parcel.py pack RESULTS ARCHIVE | unpack ARCHIVE RESULTS", file=sys.stderr)
        return 2
    source, target = map(Path, arguments[1:])
    try:
        if arguments[0] == "unpack":
            unpack(source, target)
            print(f"goes on with {source}")
            return 0
        num_bytes = pack(source, target)
    except ParcelError as error:
        print(f"{error}.", file=sys.stderr)
        return 2
    large = ", more than 16 MiB: it may not come back as one file" if num_bytes > MOST_BYTES else ""
    print(f"packed into {target}: {num_bytes / 2**20:.1f} MiB{large}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
