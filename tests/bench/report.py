"""Seconds and memory of `batchinfer report` on a made-up run of a million rows: panel, page and export.

python tests/bench/report.py [ROWS]
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.large_run import peak_bytes, write_large_run


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        run = write_large_run(Path(folder) / "large", num_rows)
        print(f"{num_rows:,} rows")
        for _ in range(3):
            peak_bytes("report", run)
        peak_bytes("report", run, "--html", Path(folder) / "page.html")
        peak_bytes("report", run, "--parquet", Path(folder) / "views")
        peak_bytes("report", run, "--sql", "SELECT status, avg(completion_tokens) FROM outputs GROUP BY status")


if __name__ == "__main__":
    main()
