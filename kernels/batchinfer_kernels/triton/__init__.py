"""Operations in Triton for CUDA GPUs of compute capability 8.0 and up, in bfloat16 and with FP8 weights.

In: tensors on a GPU (or, in Triton's interpreter, on the CPU). Out: tensors. `ops` has the operations, `probe` gives
the reasons why they cannot run. Triton is imported by the first call of an operation that needs it, never on import.

Every sum has one order: tiles depend on the shapes of weights and on the length of a request, never on the number of
rows. So a row keeps its bits in any batch. That costs speed where few rows meet a small weight: nothing splits the
depth of a product further to fill the device (except in the router), and nothing is autotuned.
"""
