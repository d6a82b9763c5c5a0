"""KV: which pages of device memory hold the KV of which tokens. Page numbers only; the tensors stay with the engine."""
