"""Operations in C++ for processors with AVX-512 and its bfloat16 products; float32 goes to the reference.

In: tensors on the CPU. Out: tensors. `ops` has the operations, `build` makes and loads the library they call, on the
first probe or call and never on import.
"""
