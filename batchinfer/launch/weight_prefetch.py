"""Weights on their way from disk to the kernel's page cache while ranks still import.

Ranks map the files and take weights from there: what is not in memory yet they would wait for, a few pages at a time.
"""

import os
import threading
from pathlib import Path

from batchinfer.host_info import free_memory_bytes
from batchinfer.model.packed_folder import read_packed
from batchinfer.records import ModelError

WINDOW_BYTES = 4 << 20  # the kernel takes up no more than a few MB of one piece of advice
MOST_OF_FREE_MEMORY = 0.5  # beyond that what was read first might be gone before it is used
MOST_IF_MAPPED = 0.95  # of a converted folder, whose files are the memory of its weights


def read_ahead(folder: Path) -> threading.Thread:
    """Ask the kernel, on a thread, to read a model folder's *.safetensors, unless they fill most of the free memory.

    Files that cannot be read are left to the ranks, which say so.
    """
    thread = threading.Thread(target=_advise, args=(folder,), name="read weights ahead", daemon=True)
    thread.start()
    return thread


def _advise(folder: Path) -> None:
    try:
        sizes = {path: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
        most = MOST_OF_FREE_MEMORY if read_packed(folder) is None else MOST_IF_MAPPED
        if sum(sizes.values()) > most * free_memory_bytes():
            return
        for path, num_bytes in sizes.items():
            file = os.open(path, os.O_RDONLY)
            try:
                for start in range(0, num_bytes, WINDOW_BYTES):
                    os.posix_fadvise(file, start, WINDOW_BYTES, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)
    except (OSError, AttributeError, ModelError):  # unreadable, or a system without such advice: nothing was promised
        return
