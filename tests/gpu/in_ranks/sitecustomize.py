"""Run by the interpreter of every process whose PYTHONPATH begins with this folder: profiles steps of ranks."""

import os
import sys

if "batchinfer.rank.main" in sys.orig_argv and "BATCHINFER_STEP_PROFILE" in os.environ:
    from step_profile import install

    install(os.environ["BATCHINFER_STEP_PROFILE"])
