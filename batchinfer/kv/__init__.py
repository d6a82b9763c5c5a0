"""KV in memory: which pages of device memory hold the KV of which tokens, and how it travels between ranks.

Pages and the prefix tree know page numbers only; the tensors stay with the rank.
"""
