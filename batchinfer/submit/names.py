"""A run's name in clusters."""

import hashlib
import re

STEM = 24  # characters of the folder's own name: a node of a group adds up to 30 more to the name that is made of it


def run_name(run: str) -> str:
    """Names a run by its folder or URI, always the same for the same run and not another run's.

    It is a label of RFC 1123 (a-z, 0-9 and -) that begins with a letter (RFC 1035, for JobSet): the last part of the
    folder's name in lower case, with a - for what is no letter or digit, and six digits of a hash of the whole, since
    other folders may end alike.
    """
    last = run.rstrip("/").rpartition("/")[2].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", last).strip("-") or "run"
    stem = (stem if stem[0].isalpha() else f"run-{stem}")[:STEM].strip("-")
    return f"{stem}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
