// A team of threads that share out the tasks of one call after the other (threads.cpp).

#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "processor.h"

namespace batchinfer {

// While it lives, this thread takes subnormal numbers for zero and rounds results that would be subnormal to zero.
//
// The bfloat16 products of AVX-512 (vdpbf16ps) do so whatever a thread has set, so only like this does every
// instruction set give the same bits.
class SubnormalsAreZero {
 public:
  SubnormalsAreZero();
  ~SubnormalsAreZero();
  SubnormalsAreZero(const SubnormalsAreZero&) = delete;
  SubnormalsAreZero& operator=(const SubnormalsAreZero&) = delete;

 private:
  const Control before_;
};

// A calling thread and workers, which start at once and stop after `end` or with the process.
//
// The next idle thread takes the next task. The caller takes tasks, too, and then waits only for tasks in progress: a
// worker that finds no core to run on delays no call.
class Team {
 public:
  // Throws std::runtime_error where the system gives no more threads.
  static std::shared_ptr<Team> start(int64_t num_workers);

  int64_t num_workers() const { return num_workers_; }

  // Calls task(0) … task(num_tasks - 1), each once; one call at a time, of at most kMostTasks. The first exception of
  // a task is thrown here, and tasks not begun by then are skipped.
  void run(int64_t num_tasks, const std::function<void(int64_t)>& task);
  static constexpr int64_t kMostTasks = UINT32_MAX;

  // There will be no more calls.
  void end();

 private:
  explicit Team(int64_t num_workers) : num_workers_(num_workers) {}
  void work();
  uint32_t run_open_tasks();
  void wait_for_call(uint32_t seen);
  void wait_for_workers();
  void wake_workers();

  const int64_t num_workers_;

  // The call's number in the upper half, the number of its tasks not taken yet in the lower half. Taking a task counts
  // down, which fails if another call has begun meanwhile; and a call's members change only when all its tasks are taken
  // and done. So a thread that has taken a task has read the members that belong to it.
  alignas(64) std::atomic<uint64_t> open_{0};
  std::atomic<uint32_t> num_tasks_{0};
  std::atomic<const std::function<void(int64_t)>*> task_{nullptr};

  alignas(64) std::atomic<uint32_t> num_unfinished_{0};  // tasks; the caller sleeps on it
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> has_failed_{false};
  std::mutex failing_;
  std::exception_ptr failure_;

  alignas(64) std::atomic<uint32_t> call_{0};  // its number; workers sleep on it
  std::atomic<int64_t> num_asleep_{0};
  std::atomic<bool> has_ended_{false};
};

}  // namespace batchinfer
