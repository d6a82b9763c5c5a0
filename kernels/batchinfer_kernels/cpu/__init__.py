"""Operations in C++ for x86-64 processors, with AVX-512 and its products or with AVX2; float32 goes to the reference.

In: tensors on the CPU. Out: tensors. `ops` has the operations, `build` makes and loads the library they call, on the
first probe or call and never on import.
"""
