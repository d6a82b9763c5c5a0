// Decode steps with guesses: which rows each runs, which tokens are taken of it, and what is kept for the next one. The
// model's layers are run by layers.cpp. What batchinfer/rank/ does in Python between two steps, here without the way
// back: batchinfer/rank/draft_states.py and drafts.py say what is kept of a request and how rows stand.

#pragma once

#include <chrono>
#include <vector>

#include "tensors.h"

namespace batchinfer::tensors {

// A row of a rank's table of running requests, as numpy holds it (batchinfer/rank/decode_table.py).
struct RequestRow {
  int64_t kv_tokens;  // that the next step attends to, its own new token included
  int64_t num_new;    // tokens generated
  int64_t max_tokens;
  int64_t last_token;
  int64_t slot;  // of what is kept of it for guesses
  int64_t first_held;
  bool ignores_eos;
  bool is_watched;  // it has to be asked whenever it has a new token
  bool has_rules;
};

// Rows of a decode step. Those of guesses have a state each. In the first link a request may have several: pages,
// kv_tokens and positions are then of its last row alone, which `last_rows` names; where each has one it is not there.
struct StepRows {
  Tensor tokens, states, last_rows, cos, sin, positions, slots, page_table, kv_tokens;
};

// Sums over the steps of one call.
struct Totals {
  int64_t num_steps = 0, num_rows = 0, num_drafted = 0;
  std::vector<int64_t> tried, right;  // first, second, … guesses that were looked at, and of these the right ones

  std::vector<int64_t> as_list() const;
};

// The state of one call of Stack::speculate. Memory of `requests` and `kept` is changed in place.
class Speculation {
 public:
  // requests: bytes of RequestRow's. page_table: [S, P]. kept: states [slots * C, D] and tokens [slots * C] of the latest
  // C places of each slot, marks [4, slots] (first, end, base, filled), pages [slots * G, 64, width].
  // settings: temperature, top_k, top_p, min_p, key, one value per request. ends: tokens that end a request unless it
  // ignores them, tokens that may end some. angles: cos and sin of all positions that may come.
  // limits: guesses per request, steps, microseconds after which no step begins, least requests that go on.
  Speculation(const Tensor& requests, const Tensor& page_table, const std::vector<Tensor>& kept,
              const std::vector<Tensor>& settings, const std::vector<Tensor>& ends, const std::vector<Tensor>& angles,
              const std::vector<int64_t>& limits);

  // Whether there is another step to run.
  bool goes_on();

  // The rows that give first guesses, and those of the next ones, from the layer's own states; without rows: no more.
  StepRows first_link();
  StepRows next_link(const Tensor& states);
  void draw_guesses(const Tensor& tokens, const Tensor& logits, const Tensor& is_finite) const;
  void take_guesses(const Tensor& tokens);
  void has_guessed();
  const Tensor& draft_pages() const { return draft_pages_; }

  // The tokens that are due, each with the guesses behind it.
  StepRows rows_to_run();
  void draw_into(const Tensor& tokens, const Tensor& logits, const Tensor& is_finite) const;
  // Takes the tokens of each request up to the first that was not guessed or may end it.
  void accept(const Tensor& tokens, const Tensor& is_finite, const Tensor& states);

  Tensor outcome() const;
  const Totals& totals() const { return totals_; }
  double draft_s() const { return draft_s_; }
  double step_s() const { return step_s_; }

 private:
  using Clock = std::chrono::steady_clock;

  // A request on its way through one step.
  struct Running {
    int64_t number;                // in the table
    std::vector<int64_t> guesses;  // of this step
    int64_t most_guesses;
  };

  RequestRow& row_of(const Running& request) const { return rows_[request.number]; }
  StepRows rows_of(const std::vector<int64_t>& tokens, const std::vector<int64_t>& positions,
                   const std::vector<int64_t>& places, const std::vector<int64_t>& kv_slots,
                   const std::vector<int64_t>& last_rows) const;
  bool may_end(const RequestRow& row, int64_t token, bool is_finite, int64_t num_taken) const;
  bool is_end(const RequestRow& row, int64_t token) const;
  int64_t take(const Running& request, const int64_t* tokens, const bool* is_finite);
  void keep(const RequestRow& row, int64_t count, const int64_t* tokens, const Tensor& states, int64_t first_row);
  void draw(const std::vector<std::pair<int64_t, int64_t>>& requests_and_places, const Tensor& tokens,
            const Tensor& logits, const Tensor& is_finite) const;

  Tensor page_table_, states_, state_tokens_, draft_pages_, temperature_, top_k_, top_p_, min_p_, cos_, sin_;
  RequestRow* rows_;
  int64_t num_requests_, table_pages_, num_slots_, context_, pages_of_slot_;
  int64_t *first_, *end_, *base_, *filled_;
  const int64_t* keys_;
  std::vector<int64_t> eos_, stops_;
  int64_t most_guesses_, most_steps_, least_running_;
  std::chrono::microseconds most_time_;

  std::vector<Running> running_;
  std::vector<size_t> drafting_;  // of these, those that get a guess in the link that runs
  std::vector<std::vector<int64_t>> taken_;  // tokens of each request
  std::vector<bool> asks_, finite_;
  Totals totals_;
  Clock::time_point started_, step_started_, guessed_;
  double draft_s_ = 0, step_s_ = 0;
};

}  // namespace batchinfer::tensors
