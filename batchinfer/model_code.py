"""Digest of the Python sources that decide the bits of a model's results."""

import functools
import hashlib
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def model_code() -> str:
    """Return a digest of the sources of the model, of its parallel layers and of the operations.

    C++ sources are not in it: the name of the operations has them (`batchinfer_kernels.cpu.build.numerics`).
    """
    operations = find_spec("batchinfer_kernels")
    assert operations is not None
    assert operations.origin is not None
    own = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=4)
    for folder in (own / "model", own / "parallel", Path(operations.origin).parent):
        for source in sorted(folder.rglob("*.py")):
            content = source.read_bytes()
            digest.update(f"{source.relative_to(folder.parent)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
