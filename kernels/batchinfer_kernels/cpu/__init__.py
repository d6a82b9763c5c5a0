"""Operations in C++ for x86-64 processors, in float32, bfloat16 and 8 bits, with AMX, AVX-512 or AVX2.

In: tensors on the CPU. Out: tensors. `ops` has the operations, `build` makes and loads the library they call, on the
first probe or call and never on import.
"""
