// Spreads tasks over torch's threads; each thread takes the next task when it is done with one, so that a thread that
// shares its core with another program does not hold up the rest.

#include <ATen/Parallel.h>

#include <atomic>
#include <immintrin.h>

#include "kernels.h"

namespace batchinfer {

int64_t num_threads() { return at::get_num_threads(); }

struct Zeros { unsigned before = _mm_getcsr(); Zeros() { _mm_setcsr(before | 0x8040); } ~Zeros() { _mm_setcsr(before); } };
constexpr double kWorthThreads = 5000;  // nanoseconds

void run_tasks(int64_t num_tasks, double nanoseconds, const std::function<void(int64_t)>& task) {
  if (num_tasks > 1 && nanoseconds >= kWorthThreads) return run_tasks(num_tasks, task);
  const Zeros guard; for (int64_t index = 0; index < num_tasks; ++index) task(index);
}

void run_tasks(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  const Zeros guard0; if (num_tasks == 1) return task(0);
  const int64_t num_workers = std::min<int64_t>(at::get_num_threads(), num_tasks);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    const Zeros guard; if (begin == end) return;
    for (int64_t index = next++; index < num_tasks; index = next++) task(index);
  });
}

}  // namespace batchinfer
