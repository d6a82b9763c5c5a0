"""The order of eviction when room is needed: a pure function of the facts about each file.

Damaged files go first, then files that no live run needs, least recently used first, then files that a live run needs,
the farthest next use first (Belady). Of files equal in this, the later one in its chain goes first: it is useless
without the earlier ones, so a use of a block also counts for the blocks before it.
"""

from collections.abc import Callable, Iterable, Mapping

from batchinfer.kv_store.block_file import FileName
from batchinfer.kv_store.store_dir import StoredFile

Worth = tuple[int, float, int]  # kind, last use or minus the next use, minus the index in the chain: lowest goes first
NextUse = Callable[[bytes], int | None]  # of a block by its short name, over all live runs; None: not needed


def worth_of(name: FileName, next_use: int | None, last_use_s: float) -> Worth:
    """Return the worth of a file without regard to its descendants."""
    if next_use is None:
        return 0, last_use_s, -name.first
    return 1, -float(next_use), -name.first


def rank_files(
    files: Iterable[StoredFile], last_use_s: Mapping[str, float], next_use: NextUse
) -> list[tuple[Worth, StoredFile]]:
    """Return all files in the order of eviction.

    Args:
        last_use_s: path -> Unix seconds; a file without an entry is gone.
    """
    # deepest first, so that a file's descendants have passed on their worth before its turn
    known = [(file, file.name) for file in files if file.name is not None and file.path in last_use_s]
    known.sort(key=lambda item: (-item[1].first, item[0].path))
    holder = {block: index for index, (_, name) in enumerate(known) for block in name.blocks}
    inherited: dict[int, Worth] = {}
    ranked: list[tuple[Worth, StoredFile]] = []
    for index, (file, name) in enumerate(known):
        worth = worth_of(name, earliest(name, next_use), last_use_s[file.path])
        if index in inherited and inherited[index] > worth:
            worth = (*inherited[index][:2], -name.first)
        ranked.append((worth, file))
        parent = holder.get(name.parent)
        if parent is not None:
            inherited[parent] = max(inherited.get(parent, worth), worth)
    ranked.sort(key=lambda item: (item[0], item[1].path))
    return ranked


def earliest(name: FileName, next_use: NextUse) -> int | None:
    """Return the earliest next use of a file's blocks; None if there is none."""
    return min((use for block in name.blocks if (use := next_use(block)) is not None), default=None)
