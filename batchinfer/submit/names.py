"""The name of a run in a cluster."""

import hashlib
import re

STEM = 24  # characters of the folder's name; the names of a group's nodes are up to 30 characters longer


def run_name(run: str) -> str:
    """Return a name for a run, unique and stable for its folder or URI.

    The name is a label of RFC 1123 (a-z, 0-9 and -) that begins with a letter (RFC 1035, for JobSet): the last part of
    the folder's path in lower case, with - for other characters, and six digits of a hash of the whole path, because
    the last parts of two folders may be the same.
    """
    last = run.rstrip("/").rpartition("/")[2].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", last).strip("-") or "run"
    stem = (stem if stem[0].isalpha() else f"run-{stem}")[:STEM].strip("-")
    return f"{stem}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
