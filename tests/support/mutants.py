"""Mutation testing of one room by cosmic-ray: `make mutants ROOM=balance`.

Of all small changes that cosmic-ray can make in the room's files a sample is drawn. Each changed copy of the tree runs
the tests of the room; changes that no test notices are printed. Some of these change nothing that could be noticed.
"""

import argparse
import os
import random
import shlex
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = """
[cosmic-ray]
module-path = "{path}"
timeout = 600.0
excluded-modules = []
test-command = '''{command}'''

[cosmic-ray.distributor]
name = "local"
"""


def keep_sample(session: Path, count: int, seed: int) -> int:
    """Keep at most `count` random mutations of a session; return their number."""
    with sqlite3.connect(session) as rows:
        places = "module_path, start_pos_row, start_pos_col, operator_name, operator_args, occurrence"
        jobs = [job for (job,) in rows.execute(f"SELECT job_id FROM mutation_specs ORDER BY {places}")]
        random.Random(seed).shuffle(jobs)
        for table in ("mutation_specs", "work_items"):
            rows.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(job,) for job in jobs[count:]])
    return min(count, len(jobs))


def main() -> None:
    """Copy the tree, draw mutations and judge them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", help="folder or file below batchinfer/, for example run/units")
    parser.add_argument("--tests", help="arguments of pytest; default: the tests of the same room")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tests = options.tests or f"tests/{options.room.removesuffix('.py').partition('/')[0]}"
    if not options.tests and not (ROOT / tests).is_dir():
        parser.error(f"there is no folder {tests}; name the tests of {options.room} with --tests")
    command = shlex.join([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)])
    with tempfile.TemporaryDirectory(prefix="batchinfer-mutants-") as folder:
        tree, config, session = Path(folder, "tree"), Path(folder, "config.toml"), Path(folder, "session.sqlite")
        tree.mkdir()
        archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "x", "-C", tree], input=archive.stdout, check=True)
        config.write_text(CONFIG.format(path=f"batchinfer/{options.room}", command=command))
        environment = os.environ | {"PYTHONPATH": f"{tree}:{tree / 'kernels'}"}

        def cosmic_ray(*arguments: str | Path) -> None:
            subprocess.run([*arguments], cwd=tree, env=environment, check=True)

        cosmic_ray("cosmic-ray", "init", config, session)
        count = keep_sample(session, options.count, options.seed)
        cosmic_ray("cosmic-ray", "baseline", config)  # the tests pass without a change
        cosmic_ray("cosmic-ray", "exec", config, session)
        cosmic_ray("cr-report", "--surviving-only", "--show-diff", session)
        print(f"{count} mutations of batchinfer/{options.room}; above are those that no test noticed")


if __name__ == "__main__":
    main()
