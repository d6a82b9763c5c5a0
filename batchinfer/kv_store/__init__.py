"""KV blocks on disk, by name, shared by processes, hosts and runs.

blocks.py names them, reader.py reads ahead, writer.py writes behind, disk.py is the store itself, upkeep.py serves
`batchinfer kv`. Blocks come and go as bytes; no torch.
"""
