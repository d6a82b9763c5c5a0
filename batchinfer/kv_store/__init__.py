"""KV blocks on disk, by name, shared by processes, hosts and runs.

blocks.py names them, reader.py reads ahead, writer.py writes behind; disk.py is the store itself, with file_reader.py
and file_writer.py for its files, second_tier.py for files in a bucket, and session.py for one process's use of the
store; upkeep.py serves `batchinfer kv`.
Blocks come and go as bytes; no torch.
"""
