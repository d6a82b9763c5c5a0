#include "speculation.h"

#include <algorithm>
#include <cstring>

namespace batchinfer::tensors {
namespace {

constexpr int64_t kPageTokens = 64;

Tensor longs(const std::vector<int64_t>& values) {
  const Tensor out = empty({static_cast<int64_t>(values.size())}, at::kLong);
  if (!values.empty()) std::memcpy(out.mutable_data_ptr(), values.data(), values.size() * sizeof(int64_t));
  return out;
}

std::vector<int64_t> list_of(const Tensor& values) {
  check_indices(values, "tokens");
  return {read<int64_t>(values), read<int64_t>(values) + values.numel()};
}

// As `uniforms` of batchinfer/model/sampling.py.
double uniform(uint64_t key, int64_t position) {
  uint64_t state = key + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  state ^= state >> 31;
  return static_cast<double>(state >> 11) * 0x1p-53;
}

}  // namespace

std::vector<int64_t> Totals::as_list() const {
  std::vector<int64_t> list{num_steps, num_rows, num_drafted};
  list.insert(list.end(), tried.begin(), tried.end());
  list.insert(list.end(), right.begin(), right.end());
  return list;
}

Speculation::Speculation(const Tensor& requests, const Tensor& page_table, const std::vector<Tensor>& kept,
                         const std::vector<Tensor>& settings, const std::vector<Tensor>& ends,
                         const std::vector<Tensor>& angles, const std::vector<int64_t>& limits)
    : page_table_(page_table), started_(Clock::now()) {
  TORCH_CHECK(kept.size() == 4 && settings.size() == 5 && ends.size() == 2 && angles.size() == 2 && limits.size() == 4,
              "kept, settings, ends, angles and limits are 4, 5, 2, 2 and 4");
  TORCH_CHECK(requests.scalar_type() == at::kByte && requests.is_contiguous() &&
                  requests.numel() % static_cast<int64_t>(sizeof(RequestRow)) == 0,
              "requests are rows of ", sizeof(RequestRow), " bytes");
  rows_ = reinterpret_cast<RequestRow*>(write<uint8_t>(requests));
  num_requests_ = requests.numel() / static_cast<int64_t>(sizeof(RequestRow));
  check_indices(page_table, "page_table");
  TORCH_CHECK(page_table.dim() == 2 && page_table.size(0) == num_requests_, "one row of pages per request");
  table_pages_ = page_table.size(1);
  states_ = kept[0], state_tokens_ = kept[1], draft_pages_ = kept[3];
  check_contiguous(states_, 2, "states");
  check_indices(state_tokens_, "tokens of states");
  check_indices(kept[2], "marks");
  TORCH_CHECK(kept[2].dim() == 2 && kept[2].size(0) == 4, "marks are first, end, base and filled");
  num_slots_ = kept[2].size(1);
  TORCH_CHECK(num_slots_ > 0 && states_.size(0) % num_slots_ == 0 && state_tokens_.numel() == states_.size(0) &&
                  draft_pages_.size(0) % num_slots_ == 0,
              "states, their tokens and pages for each of ", num_slots_, " slots");
  context_ = states_.size(0) / num_slots_;
  pages_of_slot_ = draft_pages_.size(0) / num_slots_;
  first_ = write<int64_t>(kept[2]);
  end_ = first_ + num_slots_, base_ = end_ + num_slots_, filled_ = base_ + num_slots_;
  temperature_ = settings[0], top_k_ = settings[1], top_p_ = settings[2], min_p_ = settings[3];
  for (const Tensor* values : {&temperature_, &top_p_, &min_p_}) {
    TORCH_CHECK(values->scalar_type() == at::kDouble && values->is_contiguous() && values->numel() == num_requests_,
                "settings must be contiguous float64, one value per request");
  }
  check_indices(top_k_, "top_k");
  check_indices(settings[4], "keys");
  TORCH_CHECK(top_k_.numel() == num_requests_ && settings[4].numel() == num_requests_, "one per request");
  keys_ = read<int64_t>(settings[4]);
  eos_ = list_of(ends[0]), stops_ = list_of(ends[1]);
  cos_ = angles[0], sin_ = angles[1];
  most_guesses_ = limits[0], most_steps_ = limits[1], least_running_ = limits[3];
  most_time_ = std::chrono::microseconds(limits[2]);
  TORCH_CHECK(most_guesses_ > 0 && most_guesses_ < pages_of_slot_ * kPageTokens - context_, "guesses: ", most_guesses_);
  totals_.tried.resize(most_guesses_), totals_.right.resize(most_guesses_);
  taken_.resize(num_requests_);
  asks_.resize(num_requests_), finite_.resize(num_requests_, true);
  for (int64_t number = 0; number < num_requests_; ++number) {
    const RequestRow& row = rows_[number];
    TORCH_CHECK(0 <= row.slot && row.slot < num_slots_, "slot ", row.slot, " of ", num_slots_);
    TORCH_CHECK(0 < row.kv_tokens && row.kv_tokens + row.max_tokens - row.num_new - 1 <= kPageTokens * table_pages_,
                "a request has too few pages");
    running_.push_back({number, {}, 0});
  }
}

bool Speculation::goes_on() {
  if (totals_.num_steps > 0) {
    std::erase_if(running_, [&](const Running& request) { return asks_[request.number]; });
    if (totals_.num_steps >= most_steps_ || static_cast<int64_t>(running_.size()) < std::max<int64_t>(1, least_running_) ||
        Clock::now() - started_ >= most_time_) {
      return false;
    }
  }
  step_started_ = Clock::now();
  return !running_.empty();
}

StepRows Speculation::first_link() {
  drafting_.clear();
  std::vector<int64_t> tokens, positions, places, kv_slots, from, last_rows;
  for (size_t i = 0; i < running_.size(); ++i) {
    Running& request = running_[i];
    const RequestRow& row = row_of(request);
    const int64_t slot = row.slot, end = row.kv_tokens - 1;
    request.guesses.clear();
    request.most_guesses = std::min(most_guesses_, row.max_tokens - row.num_new - 1);
    if (end_[slot] != end) request.most_guesses = 0;  // nothing is known of its latest token
    if (request.most_guesses <= 0) continue;
    const int64_t oldest = std::max(first_[slot], end - context_);
    if (filled_[slot] < oldest || end - base_[slot] + most_guesses_ - 1 > pages_of_slot_ * kPageTokens) {
      base_[slot] = filled_[slot] = oldest;
    }
    for (int64_t position = filled_[slot]; position < end; ++position) {
      const int64_t state = slot * context_ + position % context_;
      from.push_back(state);
      tokens.push_back(read<int64_t>(state_tokens_)[state]);
      positions.push_back(position);
      places.push_back(position - base_[slot]);
      kv_slots.push_back(slot);
    }
    filled_[slot] = end;
    drafting_.push_back(i);
    last_rows.push_back(static_cast<int64_t>(tokens.size()) - 1);
  }
  StepRows rows = rows_of(tokens, positions, places, kv_slots, last_rows);
  if (tokens.empty()) return rows;
  rows.states = gathered(states_, longs(from));
  if (last_rows.size() < tokens.size()) rows.last_rows = longs(last_rows);
  return rows;
}

StepRows Speculation::next_link(const Tensor& states) {
  std::vector<int64_t> tokens, positions, places, kv_slots, from, all_rows;
  std::vector<size_t> going_on;
  for (size_t place = 0; place < drafting_.size(); ++place) {
    const Running& request = running_[drafting_[place]];
    const int64_t count = static_cast<int64_t>(request.guesses.size());
    if (count >= request.most_guesses) continue;
    const int64_t slot = row_of(request).slot, position = end_[slot] + count - 1;
    going_on.push_back(drafting_[place]);
    from.push_back(static_cast<int64_t>(place));
    tokens.push_back(request.guesses.back());
    positions.push_back(position);
    places.push_back(position - base_[slot]);
    kv_slots.push_back(slot);
    all_rows.push_back(static_cast<int64_t>(all_rows.size()));
  }
  const bool all_go_on = going_on.size() == drafting_.size();
  drafting_ = going_on;
  StepRows rows = rows_of(tokens, positions, places, kv_slots, all_rows);
  if (!tokens.empty()) rows.states = all_go_on ? states : gathered(states, longs(from));
  return rows;
}

// Rows in the pages of slots, of which `last_rows` attend to all keys before them.
StepRows Speculation::rows_of(const std::vector<int64_t>& tokens, const std::vector<int64_t>& positions,
                              const std::vector<int64_t>& places, const std::vector<int64_t>& kv_slots,
                              const std::vector<int64_t>& last_rows) const {
  StepRows rows;
  rows.tokens = longs(tokens);
  const int64_t count = rows.tokens.numel(), num_last = static_cast<int64_t>(last_rows.size());
  if (count == 0) return rows;
  const Tensor numbers = longs(positions);
  rows.cos = gathered(cos_, numbers), rows.sin = gathered(sin_, numbers);
  rows.slots = empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    write<int64_t>(rows.slots)[i] = kv_slots[i] * pages_of_slot_ * kPageTokens + places[i];
  }
  const int64_t num_pages = *std::max_element(places.begin(), places.end()) / kPageTokens + 1;
  rows.positions = empty({num_last}, at::kLong), rows.kv_tokens = empty({num_last}, at::kLong);
  rows.page_table = empty({num_last, num_pages}, at::kLong);
  for (int64_t i = 0; i < num_last; ++i) {
    write<int64_t>(rows.positions)[i] = places[last_rows[i]];
    write<int64_t>(rows.kv_tokens)[i] = places[last_rows[i]] + 1;
    int64_t* const pages = write<int64_t>(rows.page_table) + i * num_pages;
    for (int64_t page = 0; page < num_pages; ++page) pages[page] = kv_slots[last_rows[i]] * pages_of_slot_ + page;
  }
  return rows;
}

void Speculation::draw_guesses(const Tensor& tokens, const Tensor& logits, const Tensor& is_finite) const {
  std::vector<std::pair<int64_t, int64_t>> of_rows;
  for (const size_t i : drafting_) {
    const Running& request = running_[i];
    of_rows.emplace_back(request.number, row_of(request).num_new + static_cast<int64_t>(request.guesses.size()));
  }
  draw(of_rows, tokens, logits, is_finite);
}

void Speculation::take_guesses(const Tensor& tokens) {
  for (size_t place = 0; place < drafting_.size(); ++place) {
    Running& request = running_[drafting_[place]];
    const int64_t token = read<int64_t>(tokens)[place];
    if (is_end(row_of(request), token)) {  // nothing comes behind it, so no row is run for it
      request.most_guesses = static_cast<int64_t>(request.guesses.size());
      continue;
    }
    request.guesses.push_back(token);
    ++totals_.num_drafted;
  }
}

void Speculation::has_guessed() {
  guessed_ = Clock::now();
  draft_s_ += std::chrono::duration<double>(guessed_ - step_started_).count();
}

StepRows Speculation::rows_to_run() {
  std::vector<int64_t> tokens, kv_tokens, of_row;
  int64_t most_kv = 1;
  for (const Running& request : running_) {
    const RequestRow& row = row_of(request);
    for (int64_t depth = 0; depth <= static_cast<int64_t>(request.guesses.size()); ++depth) {
      tokens.push_back(depth == 0 ? row.last_token : request.guesses[depth - 1]);
      kv_tokens.push_back(row.kv_tokens + depth);
      of_row.push_back(request.number);
      most_kv = std::max(most_kv, row.kv_tokens + depth);
    }
  }
  StepRows rows;
  const int64_t count = static_cast<int64_t>(tokens.size()), num_pages = (most_kv + kPageTokens - 1) / kPageTokens;
  rows.tokens = longs(tokens), rows.kv_tokens = longs(kv_tokens);
  rows.positions = empty({count}, at::kLong), rows.slots = empty({count}, at::kLong);
  rows.page_table = empty({count, num_pages}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = kv_tokens[i] - 1;
    const int64_t* const pages = read<int64_t>(page_table_) + of_row[i] * table_pages_;
    write<int64_t>(rows.positions)[i] = position;
    write<int64_t>(rows.slots)[i] = pages[position / kPageTokens] * kPageTokens + position % kPageTokens;
    std::memcpy(write<int64_t>(rows.page_table) + i * num_pages, pages, num_pages * sizeof(int64_t));
  }
  rows.cos = gathered(cos_, rows.positions), rows.sin = gathered(sin_, rows.positions);
  totals_.num_rows += count;
  return rows;
}

void Speculation::draw_into(const Tensor& tokens, const Tensor& logits, const Tensor& is_finite) const {
  std::vector<std::pair<int64_t, int64_t>> of_rows;
  for (const Running& request : running_) {
    for (size_t depth = 0; depth <= request.guesses.size(); ++depth) {
      of_rows.emplace_back(request.number, row_of(request).num_new + static_cast<int64_t>(depth));
    }
  }
  draw(of_rows, tokens, logits, is_finite);
}

// Replaces the most likely tokens of those rows that are drawn, as `sample` of batchinfer/model/sampling.py does.
void Speculation::draw(const std::vector<std::pair<int64_t, int64_t>>& requests_and_places, const Tensor& tokens,
                       const Tensor& logits, const Tensor& is_finite) const {
  std::vector<int64_t> drawn, requests;
  std::vector<double> numbers;
  for (size_t row = 0; row < requests_and_places.size(); ++row) {
    const auto [request, place] = requests_and_places[row];
    if (!(read<double>(temperature_)[request] > 0) || !read<bool>(is_finite)[row]) continue;
    drawn.push_back(static_cast<int64_t>(row));
    requests.push_back(request);
    numbers.push_back(uniform(static_cast<uint64_t>(keys_[request]), place));
  }
  if (drawn.empty()) return;
  const int64_t count = static_cast<int64_t>(drawn.size());
  const auto of_rows = [&](const Tensor& values) {
    const Tensor out = empty({count}, values.scalar_type());
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(static_cast<uint8_t*>(out.mutable_data_ptr()) + 8 * i,
                  static_cast<const uint8_t*>(values.const_data_ptr()) + 8 * requests[i], 8);
    }
    return out;
  };
  const Tensor uniforms = empty({count}, at::kDouble);
  std::memcpy(uniforms.mutable_data_ptr(), numbers.data(), count * sizeof(double));
  const Tensor some = count == logits.size(0) ? logits : gathered(logits, longs(drawn));
  const Tensor found = tensors::draw(some, of_rows(temperature_), of_rows(top_k_), of_rows(top_p_), of_rows(min_p_),
                                     uniforms);
  for (int64_t i = 0; i < count; ++i) write<int64_t>(tokens)[drawn[i]] = read<int64_t>(found)[i];
}

bool Speculation::is_end(const RequestRow& row, int64_t token) const {
  return (!row.ignores_eos && std::find(eos_.begin(), eos_.end(), token) != eos_.end()) ||
         std::find(stops_.begin(), stops_.end(), token) != stops_.end();
}

bool Speculation::may_end(const RequestRow& row, int64_t token, bool is_finite, int64_t num_taken) const {
  return !is_finite || row.num_new + num_taken >= row.max_tokens || is_end(row, token);
}

void Speculation::accept(const Tensor& tokens, const Tensor& is_finite, const Tensor& states) {
  check_like(states, 2, states_, "states");
  TORCH_CHECK(states.size(1) == states_.size(1), "states are ", states.size(1), " wide");
  int64_t first_row = 0;
  for (const Running& request : running_) {
    RequestRow& row = row_of(request);
    const int64_t* const new_tokens = read<int64_t>(tokens) + first_row;
    const int64_t count = take(request, new_tokens, read<bool>(is_finite) + first_row);
    keep(row, count, new_tokens, states, first_row);
    row.kv_tokens += count;
    row.num_new += count;
    row.last_token = new_tokens[count - 1];
    first_row += 1 + static_cast<int64_t>(request.guesses.size());
  }
  ++totals_.num_steps;
  step_s_ += std::chrono::duration<double>(Clock::now() - guessed_).count();
}

// How many of its new tokens a request takes.
int64_t Speculation::take(const Running& request, const int64_t* tokens, const bool* is_finite) {
  const RequestRow& row = row_of(request);
  const int64_t num_guesses = static_cast<int64_t>(request.guesses.size());
  int64_t count = 1;
  bool ends = may_end(row, tokens[0], is_finite[0], 1);
  while (!ends && count <= num_guesses) {
    ++totals_.tried[count - 1];
    if (tokens[count - 1] != request.guesses[count - 1]) break;
    ++totals_.right[count - 1];
    ends = may_end(row, tokens[count], is_finite[count], count + 1);
    ++count;
  }
  std::vector<int64_t>& taken = taken_[request.number];
  taken.insert(taken.end(), tokens, tokens + count);
  asks_[request.number] = ends || row.is_watched;
  finite_[request.number] = is_finite[count - 1];
  return count;
}

void Speculation::keep(const RequestRow& row, int64_t count, const int64_t* tokens, const Tensor& states,
                       int64_t first_row) {
  const int64_t slot = row.slot, start = row.kv_tokens - 1, row_bytes = states.size(1) * states.element_size();
  if (end_[slot] != start) first_[slot] = start, filled_[slot] = -1;
  end_[slot] = start + count;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = slot * context_ + (start + i) % context_;
    std::memcpy(static_cast<uint8_t*>(states_.mutable_data_ptr()) + place * row_bytes,
                static_cast<const uint8_t*>(states.const_data_ptr()) + (first_row + i) * row_bytes, row_bytes);
    write<int64_t>(state_tokens_)[place] = tokens[i];
  }
}

Tensor Speculation::outcome() const {
  size_t width = 0;
  for (const auto& tokens : taken_) width = std::max(width, tokens.size());
  const int64_t columns = 3 + static_cast<int64_t>(width);
  const Tensor out = empty({num_requests_, columns}, at::kLong);
  for (int64_t number = 0; number < num_requests_; ++number) {
    int64_t* const row = write<int64_t>(out) + number * columns;
    const auto& tokens = taken_[number];
    row[0] = static_cast<int64_t>(tokens.size()), row[1] = asks_[number], row[2] = finite_[number];
    std::fill(std::copy(tokens.begin(), tokens.end(), row + 3), row + columns, -1);
  }
  return out;
}

}  // namespace batchinfer::tensors
