// Processor instructions other than arithmetic: prefetch, pause, stores past the caches, treatment of subnormal numbers.

#pragma once

#include <cstdint>

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace batchinfer {

// Asks for the line of values that come soon, into the second level: the first has fewer reads from memory under way at a
// time. Asking for what is not there does no harm.
inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }
// The same into the first level, of what comes next.
inline void fetch_near(const void* at) { __builtin_prefetch(at, 0, 3); }

// A moment of a thread that waits awake.
inline void relax() {
#ifdef __aarch64__
  asm volatile("isb" ::: "memory");
#else
  _mm_pause();
#endif
}

// Others see what was stored past the caches.
inline void finish_past() {
#ifdef __aarch64__
  asm volatile("dmb ishst" ::: "memory");
#else
  _mm_sfence();
#endif
}

// A thread's floating-point control register: reading, writing, and its bit for subnormal numbers as zero.
#ifdef __aarch64__
using Control = uint64_t;
constexpr Control kSubnormalsAreZero = 1 << 24;
inline Control control() {
  Control value;
  asm volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
inline void set_control(Control value) { asm volatile("msr fpcr, %0" ::"r"(value)); }
#else
using Control = uint32_t;
constexpr Control kSubnormalsAreZero = 0x8000 | 0x0040;
inline Control control() { return _mm_getcsr(); }
inline void set_control(Control value) { _mm_setcsr(value); }
#endif

}  // namespace batchinfer
