"""Imported last by the server that processes of tests are forked from: what a first tokenizer has to learn.

What is there by then is no garbage and stays: a forked process that looked through it would copy all of its memory.
"""

import gc
import os
from pathlib import Path

from batchinfer import own_process
from batchinfer.data.tokenizer import load_tokenizer

own_process.configure_interpreter()
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads, which no forked process would have
load_tokenizer(Path(__file__).parents[2] / "sample_data" / "model").encode_prompts(["a word"])
gc.collect()
gc.freeze()
