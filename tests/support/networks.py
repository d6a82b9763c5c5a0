"""Whether a test can have a network of its own."""

import shutil
import subprocess

HAS_NETWORKS = (
    all(map(shutil.which, ("ip", "unshare")))
    and not subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode
)
