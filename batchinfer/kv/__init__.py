"""KV: which pages of device memory hold the KV of which tokens, and the store of KV blocks on disk.

Pages and the prefix tree know page numbers only; the tensors stay with the engine. The store takes and gives whole
blocks as bytes: blocks.py names them, reader.py reads ahead, writer.py writes behind, disk.py is the store itself.
"""
