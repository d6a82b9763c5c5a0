"""Operations in C++ for processors with AMX, AVX-512 or AVX2 and for 64-bit Arm, in float32, bfloat16, 8 and 4 bits.

In: tensors on the CPU. Out: tensors. `ops` has the operations, `build` makes and loads the library they call, on the
first probe or call and never on import.
"""
