// What the tests of the C++ threads (test_threads.py) cannot do in Python: calls of run_tasks with tasks of many kinds.
// Built against the library that is in use and called through ctypes, so without Python's lock.

#include <immintrin.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

using batchinfer::run_tasks;

namespace {

constexpr std::chrono::seconds kLongest{60};  // that anything here waits for what should come at once

// Waits until the condition holds; throws when it never does.
template <class Condition>
void wait_until(Condition holds, const char* what) {
  const auto end = std::chrono::steady_clock::now() + kLongest;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error(std::string("waited in vain for ") + what);
    std::this_thread::yield();
  }
}

// Calls and says in `message` what was thrown, if anything.
template <class Call>
void note(char* message, int64_t room, Call call) {
  message[0] = 0;
  try {
    call();
  } catch (const std::exception& error) {
    strncpy(message, error.what(), room - 1);
  }
}

bool takes_subnormals_for_zero() {
  volatile float smallest_normal = 1.17549435e-38f, half = 0.5f, subnormal = 1e-40f, many = 1e20f;
  return smallest_normal * half == 0.0f && subnormal * many == 0.0f;
}

std::atomic<int> num_held{0};
std::atomic<bool> is_released{false};

void hold(int) {
  ++num_held;
  while (!is_released) usleep(1000);
  --num_held;
}

}  // namespace

extern "C" {

// Every task counts itself; returns how many threads ran tasks. With `all_at_once` tasks wait for each other: they
// need a thread each.
int64_t count_tasks(int64_t num_tasks, int64_t* counts, bool all_at_once, char* message, int64_t room) {
  std::vector<pthread_t> threads(num_tasks);
  std::atomic<int64_t> num_inside{0};
  note(message, room, [&] {
    run_tasks(num_tasks, [&](int64_t task) {
      threads[task] = pthread_self();
      reinterpret_cast<std::atomic<int64_t>*>(counts)[task]++;
      ++num_inside;
      if (all_at_once) wait_until([&] { return num_inside == num_tasks; }, "a thread for each task");
    });
  });
  return std::set<pthread_t>(threads.begin(), threads.end()).size();
}

// One worker's task goes on until all other tasks are done.
void one_slow_worker(int64_t num_tasks, char* message, int64_t room) {
  std::atomic<int64_t> num_done{0};
  std::atomic<bool> is_slow{false};
  const pthread_t caller = pthread_self();
  note(message, room, [&] {
    run_tasks(num_tasks, [&](int64_t) {
      if (pthread_self() == caller) {
        wait_until([&] { return is_slow.load(); }, "a worker");
      } else if (!is_slow.exchange(true)) {
        wait_until([&] { return num_done == num_tasks - 1; }, "the tasks of others");
      }
      ++num_done;
    });
  });
}

// Every task calls for tasks in turn; returns how many of those ran.
int64_t nested(int64_t num_outer, int64_t num_inner, char* message, int64_t room) {
  std::atomic<int64_t> num_done{0};
  note(message, room, [&] {
    run_tasks(num_outer, [&](int64_t) { run_tasks(num_inner, [&](int64_t) { ++num_done; }); });
  });
  return num_done;
}

// While tasks of a call run and wait for it, another thread makes a call of its own.
int64_t call_within_call(int64_t num_tasks, char* message, int64_t room) {
  std::atomic<int64_t> num_done{0};
  note(message, room, [&] {
    std::atomic<bool> is_other_done{false}, has_begun{false};
    std::thread other([&] {
      while (!has_begun) std::this_thread::yield();
      run_tasks(num_tasks, [&](int64_t) { ++num_done; });
      is_other_done = true;
    });
    run_tasks(num_tasks, [&](int64_t) {
      has_begun = true;
      wait_until([&] { return is_other_done.load(); }, "the other thread's call");
    });
    other.join();
  });
  return num_done;
}

// Tasks `first`, `first` + `step`, … throw their number; returns how many others ran.
int64_t throwing(int64_t num_tasks, int64_t first, int64_t step, bool only_on_workers, char* message, int64_t room) {
  std::atomic<int64_t> num_done{0};
  std::atomic<bool> has_worker{false};
  const pthread_t caller = pthread_self();
  note(message, room, [&] {
    run_tasks(num_tasks, [&](int64_t task) {
      const bool is_caller = pthread_self() == caller;
      has_worker = has_worker || !is_caller;
      if (only_on_workers && is_caller) {
        wait_until([&] { return has_worker.load(); }, "a worker");
      } else if (task >= first && (task - first) % step == 0) {
        throw std::runtime_error("task " + std::to_string(task));
      }
      ++num_done;
    });
  });
  return num_done;
}

// How many tasks saw subnormal numbers as zero. The call is made in one of three ways: over threads, as one that is
// too short for threads, or from within a task.
int64_t zeros(int64_t num_tasks, int64_t way, bool throws, char* message, int64_t room) {
  std::atomic<int64_t> num_zeros{0};
  const auto look = [&](int64_t task) {
    num_zeros += takes_subnormals_for_zero();
    if (throws && task == num_tasks - 1) throw std::runtime_error("thrown");
  };
  note(message, room, [&] {
    if (way == 0) run_tasks(num_tasks, look);
    if (way == 1) run_tasks(num_tasks, 1.0, look);
    if (way == 2) run_tasks(1, [&](int64_t) { run_tasks(num_tasks, look); });
  });
  return num_zeros;
}

// The calling thread's own setting.
bool caller_takes_subnormals_for_zero() { return takes_subnormals_for_zero(); }

// A thread that gets this signal goes no further until `release`.
void hold_on(int signal_number) {
  is_released = false;
  signal(signal_number, hold);
}
int64_t num_threads_held() { return num_held; }
void release() { is_released = true; }

// Makes calls for ever.
void call_for_ever(int64_t num_tasks) {
  for (;;) run_tasks(num_tasks, [](int64_t) {});
}

}  // extern "C"
