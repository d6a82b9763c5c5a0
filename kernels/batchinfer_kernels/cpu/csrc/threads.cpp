// How the threads of a team wait: a moment awake, then asleep.

#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "amx_tiles.h"

namespace batchinfer {
namespace {

// How long a thread waits awake. Some microseconds pass between the operations of a step, and to wake a worker takes a
// caller 2 to 5; but the scheduler charges a thread for its spinning when other processes wait, and its team waits for
// it later. Milliseconds of a decode step of the model `tiny` of tests/bench, whose calls are so short that waiting shows;
// two threads on two cores of an AMD EPYC (Zen 5), medians, by how long workers stay awake:
//
//                              20 us   50 us   100 us   300 us
//   alone                        5.5     5.6      5.8      5.4
//   with one busy process       10.6    11.7     12.7     14.0
//   with a second job           11.2    12.1     13.3     13.8
//
// Longer when nothing else seems to run was tried, too: it gained nothing alone.
constexpr std::chrono::microseconds kAwake{20};

// Each woken worker wakes as many others, so that the caller of a large team goes to work soon.
constexpr int64_t kWokenAtOnce = 2;

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel looks at the number itself");

// Sleeps while the word is `expected`; returns whether another thread woke this one.
bool sleep_on(std::atomic<uint32_t>& word, uint32_t expected) {
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0) == 0;
}

// Wakes up to `count` of the threads that sleep on the word; returns how many it woke.
int64_t wake(std::atomic<uint32_t>& word, int64_t count) {
  const int most = static_cast<int>(count);
  return std::max<int64_t>(0, syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0));
}

// Whether the word changes while this thread stays awake for it.
bool changes_soon(const std::atomic<uint32_t>& word, uint32_t from) {
  const auto end = std::chrono::steady_clock::now() + kAwake;
  do {
    for (int i = 0; i < 8; ++i) {
      if (word.load() != from) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return word.load() != from;
}

}  // namespace

SubnormalsAreZero::SubnormalsAreZero() : before_(control()) { set_control(before_ | kSubnormalsAreZero); }

SubnormalsAreZero::~SubnormalsAreZero() { set_control(before_); }

std::shared_ptr<Team> Team::start(int64_t num_workers) {
  const std::shared_ptr<Team> team(new Team(num_workers));
  try {
    for (int64_t worker = 0; worker < num_workers; ++worker) {
      std::thread thread([team] { team->work(); });
      pthread_setname_np(thread.native_handle(), "batchinfer");
      thread.detach();
    }
  } catch (const std::system_error& error) {
    team->end();
    throw std::runtime_error("the C++ operations want " + std::to_string(num_workers) + " threads more: " +
                             error.what() + "; allow more threads, or set OMP_NUM_THREADS to fewer");
  }
  return team;
}

void Team::end() {
  has_ended_.store(true);
  call_.fetch_add(1);
  wake(call_, INT_MAX);
}

void Team::run(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  const uint32_t call = call_.load() + 1;
  task_.store(&task);
  num_tasks_.store(static_cast<uint32_t>(num_tasks));
  num_unfinished_.store(static_cast<uint32_t>(num_tasks));
  open_.store(uint64_t{call} << 32 | static_cast<uint32_t>(num_tasks));
  call_.store(call);
  wake_workers();
  const uint32_t num_done = run_open_tasks();
  if (num_unfinished_.fetch_sub(num_done) != num_done) wait_for_workers();
  if (has_failed_.exchange(false)) std::rethrow_exception(std::exchange(failure_, nullptr));
}

// Takes tasks until none is left to take; how many that were.
uint32_t Team::run_open_tasks() {
  const UsesTiles in_all_tasks;
  for (uint32_t num_done = 0;; ++num_done) {
    uint64_t open = open_.load();
    const std::function<void(int64_t)>* task = nullptr;
    uint32_t num_tasks = 0;
    do {
      if (static_cast<uint32_t>(open) == 0) return num_done;
      task = task_.load();
      num_tasks = num_tasks_.load();
    } while (!open_.compare_exchange_weak(open, open - 1));
    if (has_failed_.load()) continue;
    try {
      (*task)(num_tasks - static_cast<uint32_t>(open));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing_);
      if (!has_failed_.load()) failure_ = std::current_exception();
      has_failed_.store(true);
    }
  }
}

void Team::work() {
  const SubnormalsAreZero in_all_tasks;
  for (uint32_t seen = 0; !has_ended_.load();) {
    const uint32_t num_done = run_open_tasks();
    if (num_done > 0 && num_unfinished_.fetch_sub(num_done) == num_done && caller_sleeps_.load()) {
      wake(num_unfinished_, 1);
    }
    wait_for_call(seen);
    seen = call_.load();
  }
}

void Team::wait_for_call(uint32_t seen) {
  if (changes_soon(call_, seen)) return;
  num_asleep_.fetch_add(1);
  // The waking thread counts a worker as awake: it is not woken again while it waits for a core.
  if (sleep_on(call_, seen)) {
    wake_workers();
  } else {
    num_asleep_.fetch_sub(1);
  }
}

void Team::wait_for_workers() {
  while (const uint32_t left = num_unfinished_.load()) {
    if (changes_soon(num_unfinished_, left)) continue;
    caller_sleeps_.store(true);
    sleep_on(num_unfinished_, left);
    caller_sleeps_.store(false);
  }
}

// Wakes some workers if there are tasks for more than are awake.
void Team::wake_workers() {
  const int64_t num_asleep = num_asleep_.load();
  if (num_asleep == 0) return;
  const int64_t num_missing = static_cast<uint32_t>(open_.load()) - (num_workers_ - num_asleep);
  if (num_missing > 0) num_asleep_.fetch_sub(wake(call_, std::min(num_missing, kWokenAtOnce)));
}

}  // namespace batchinfer
