"""The numeric operations of the model, each with one or more implementations behind the same signature.

In: tensors. Out: tensors; no state, no communication, no files. `backend.select` names the implementation to use and
`backend.explain` says why; `reference` is the plain PyTorch one that every faster version is measured against.
This package imports torch and nothing of the engine around it.
"""
