"""The numeric operations of the model, each with one or more implementations behind the same signature.

In: tensors. Out: tensors; no state, no communication, no files. `registry.select` decides which implementation runs and
`registry.explain` says why; `reference` has the plain PyTorch ones that every faster version is measured against.
This package imports torch and nothing of batchinfer around it.
"""
