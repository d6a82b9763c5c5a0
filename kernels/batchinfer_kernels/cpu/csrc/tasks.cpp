// Spreads tasks over as many threads as torch has been given; each takes the next task when it is done with one, so
// that a thread that shares its core with another program does not hold up the rest.

#include <ATen/Parallel.h>
#include <pthread.h>

#include <atomic>
#include <memory>

#include "kernels.h"
#include "amx_tiles.h"
#include "threads.h"

namespace batchinfer {
namespace {

constexpr double kWorthThreads = 5000;  // nanoseconds

std::atomic_flag is_team_taken = ATOMIC_FLAG_INIT;
// Of the process's last call on several threads. Never destroyed: its workers wait for calls until the process ends.
std::shared_ptr<Team>& last_team = *new std::shared_ptr<Team>;

// A forked process has none of the threads but the one that forked; others may have been in the middle of a change.
void begin_anew() {
  std::construct_at(&last_team);
  is_team_taken.clear();
}
const int is_prepared_for_forks = pthread_atfork(nullptr, nullptr, begin_anew);

// The team with this many workers, for as long as this lives; or none where a call is under way: of another thread, or
// of this one, which then calls from within a task.
class TakenTeam {
 public:
  explicit TakenTeam(int64_t num_workers) : is_mine_(!is_team_taken.test_and_set()) {
    if (!is_mine_ || (last_team && last_team->num_workers() == num_workers)) return;
    try {
      if (last_team) last_team->end();
      last_team = Team::start(num_workers);
    } catch (...) {
      last_team.reset();
      is_team_taken.clear();
      throw;
    }
  }
  ~TakenTeam() {
    if (is_mine_) is_team_taken.clear();
  }
  TakenTeam(const TakenTeam&) = delete;
  TakenTeam& operator=(const TakenTeam&) = delete;

  Team* get() const { return is_mine_ ? last_team.get() : nullptr; }

 private:
  const bool is_mine_;
};

void run_here(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  const UsesTiles in_all_tasks;
  for (int64_t index = 0; index < num_tasks; ++index) task(index);
}

}  // namespace

int64_t num_threads() { return at::get_num_threads(); }

void run_tasks(int64_t num_tasks, double nanoseconds, const std::function<void(int64_t)>& task) {
  if (num_tasks > 1 && nanoseconds >= kWorthThreads) return run_tasks(num_tasks, task);
  const SubnormalsAreZero in_all_tasks;
  run_here(num_tasks, task);
}

void run_tasks(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  const SubnormalsAreZero in_all_tasks;
  const int64_t num_workers = num_threads() - 1;
  if (num_tasks < 2 || num_workers < 1 || num_tasks > Team::kMostTasks) return run_here(num_tasks, task);
  const TakenTeam team(num_workers);
  if (Team* const taken = team.get()) {
    taken->run(num_tasks, task);
  } else {
    run_here(num_tasks, task);
  }
}

}  // namespace batchinfer
