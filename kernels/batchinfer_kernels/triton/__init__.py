"""Operations in Triton for CUDA GPUs of compute capability 8.0 and up, in bfloat16 and with FP8 weights.

In: tensors on a GPU (or, in Triton's interpreter, on the CPU). Out: tensors. `ops` has the operations, `probe` says why
they cannot run; the library is imported by the first call of an operation that needs it and never on import of these.

Every sum has one order: tiles depend on the shapes of weights and on how far a request reaches, never on how many rows
there are. So a row keeps its bits in any company. That costs speed where few rows meet a small weight: nothing
splits the depth of a product further to fill the device (except in the router), and nothing is tuned by trying.
"""
