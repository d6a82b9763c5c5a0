"""KV in memory: the pages of device memory, the tokens whose KV they hold, and KV on its way between ranks.

Pages and the prefix tree know page numbers only; the tensors stay with the rank.
"""
