"""One of several processes that use one KV store at once, for tests: reads, checks every byte, writes what is missing.

With an odd seed through background threads, with an even one directly.

    python kv_process.py FOLDER MAX_BYTES SEED NUM_STEPS

Ends with 0, and with what it counted as one line of JSON; with a traceback when a byte was wrong.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from batchinfer.kv_store.reader import Reader
from batchinfer.kv_store.writer import Writer
from support.kv_stores import chain_of, content_of, open_store, read_intact

CHAINS = [[f"{tree}-{branch}-{place}" for place in range(5)] for tree in "pq" for branch in range(8)]


def main() -> None:
    folder, max_bytes, seed, num_steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
    rng = np.random.default_rng(seed)
    with (
        closing(open_store(folder, max_bytes=max_bytes)) as store,
        closing(Reader(store)) as reader,
        closing(Writer(store, num_threads=1)) as writer,
    ):
        print("started", flush=True)
        for step in range(num_steps):
            # the first two blocks of a tree's chains are common
            parts = CHAINS[rng.integers(len(CHAINS))]
            chain = chain_of(parts[0][0], parts[1][0], *parts[2:])[: rng.integers(1, 6)]
            if rng.random() < 0.3:
                store.set_next_uses({block: step + int(rng.integers(1, 20)) for block in chain})
            if rng.random() < 0.2:
                store.refresh()
            if seed % 2:
                content = reader.ask(chain).wait()
                num_found = len(content)
                assert np.array_equal(content, content_of(chain[:num_found]))
                writer.put(chain, num_found, content_of(chain[num_found:]))
            else:
                num_found = read_intact(store, chain)
                store.write(chain, num_found, content_of(chain[num_found:]))
        assert store.take_problem() is None
        print(json.dumps(store.counters.as_dict()), flush=True)


if __name__ == "__main__":
    main()
