// See screen.h.

#include "screen.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "tile.h"
#include "words.h"

namespace batchinfer {
namespace {

constexpr float kMost = 127.0f;
constexpr float kTiny = 0x1p-100f;  // scales below it are taken for zero, products of subnormal numbers are below it
constexpr float kUp = 1 + 0x1p-10f;  // more than the roundings of a few operations
constexpr int64_t kRowGap = 64;      // bytes behind each row, so that rows do not meet in the same few places of a cache
constexpr int64_t kGivenUp = 8;      // a row is not certain where more than this part of the columns has to be scored

// At least the norm whose squares were summed in float32, where values below 2^-62 may have counted as zero.
inline float norm_above(float squares, int64_t depth) {
  return std::sqrt(squares) * (kUp + depth * 0x1p-22f) + depth * 0x1p-62f;
}

// The k-th values of 16 columns.
inline Floats values_of(const uint8_t* chunk, int64_t k, WeightKind kind) {
  if (kind == WeightKind::kFloat32) return load(reinterpret_cast<const float*>(chunk) + k * kPanelColumns);
  const Ints pairs = load_ints(chunk + k / 2 * (4 * kPanelColumns));
  return k % 2 ? high_values(pairs) : low_values(pairs);
}

void screen_chunk(const uint8_t* chunk, const Weight& weight, int8_t* values, float* columns) {
  Floats peak = floats(0.0f);
  for (int64_t k = 0; k < weight.depth; ++k) peak = larger(magnitude(values_of(chunk, k, weight.kind)), peak);
  const Mask is_there = is_greater(peak, floats(kTiny));
  const Floats scale = choose(is_there, peak / floats(kMost), floats(0.0f));
  const Floats factor = choose(is_there, floats(kMost) / peak, floats(0.0f));
  Floats squares = floats(0.0f), errors = floats(0.0f), sum = floats(0.0f);
  alignas(64) uint8_t bytes[4][16];
  for (int64_t word = 0; word < Screen::words(weight.depth); ++word) {
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t k = 4 * word + i;
      const Floats value = k < weight.depth ? values_of(chunk, k, weight.kind) : floats(0.0f);
      const Floats whole = nearest_whole(value * factor);
      const Floats off = subtract_product(value, scale, whole);
      squares = multiply_add(value, value, squares);
      errors = multiply_add(off, off, errors);
      sum = sum + whole;
      store_bytes(bytes[i], plus(nearest_ints(whole), ints(128)));
    }
    int8_t* const out = values + word * 4 * kPanelColumns;
    for (int64_t column = 0; column < 16; ++column) {
      for (int64_t i = 0; i < 4; ++i) out[4 * column + i] = static_cast<int8_t>(bytes[i][column] ^ 0x80);
    }
  }
  float of_columns[3][16];
  store(of_columns[0], squares);
  store(of_columns[1], errors);
  store(of_columns[2], sum);
  store(columns + Screen::kScale * kPanelColumns, scale);
  for (int64_t column = 0; column < 16; ++column) {
    // a column that is not finite has no bound that is, and no head with it is screened
    const float whole_sum = std::isfinite(of_columns[2][column]) ? of_columns[2][column] : 0.0f;
    const int32_t start = -128 * static_cast<int32_t>(whole_sum);
    columns[Screen::kNorm * kPanelColumns + column] = norm_above(of_columns[0][column], weight.depth);
    columns[Screen::kError * kPanelColumns + column] = norm_above(of_columns[1][column], weight.depth);
    std::memcpy(columns + Screen::kStart * kPanelColumns + column, &start, sizeof(start));
  }
}

// Rows in 8 bits, and how far their products with columns can be off.
class ScreenedRows {
 public:
  template <class Value>
  ScreenedRows(const Rows<Value>& x, const Weight& weight, const Screen& screen, int64_t num_rows)
      : stride_(4 * Screen::words(weight.depth) + kRowGap), bytes_(num_rows * stride_), rows_(num_rows) {
    const double nanoseconds = 1.0 * num_rows * weight.depth;
    run_tasks(num_rows, nanoseconds, [&](int64_t row) { round(x.at(row), weight.depth, screen.most, row); });
  }

  struct Row {
    float scale;
    float of_norm, of_error, rest;  // the bound of a column is of_norm * its norm + of_error * its error + rest
    bool is_bounded;
  };
  const Row& operator[](int64_t row) const { return rows_[row]; }
  const uint8_t* at(int64_t row) const { return bytes_.data() + row * stride_; }
  int64_t stride() const { return stride_; }

 private:
  template <class Value>
  void round(const Value* values, int64_t depth, float most, int64_t number) {
    Floats peaks = floats(0.0f);
    for (int64_t i = 0; i < depth; i += 16) peaks = larger(magnitude(load_wide(lanes(depth - i), values + i)), peaks);
    const float peak = largest_of(peaks);
    const bool is_there = peak > kTiny && peak < INFINITY;
    const float scale = is_there ? peak / kMost : 0.0f;
    const Floats factor = floats(is_there ? kMost / peak : 0.0f);
    Floats squares = floats(0.0f), errors = floats(0.0f);
    uint8_t* const bytes = bytes_.data() + number * stride_;
    for (int64_t i = 0; i < stride_ - kRowGap; i += 16) {
      const Floats value = i < depth ? load_wide(lanes(depth - i), values + i) : floats(0.0f);
      const Floats whole = nearest_whole(value * factor);
      const Floats off = subtract_product(value, floats(scale), whole);
      squares = multiply_add(value, value, squares);
      errors = multiply_add(off, off, errors);
      store_bytes(bytes + i, plus(nearest_ints(whole), ints(128)));
      if (kHasTiles) {
        for (int64_t k = i; k < i + 16; ++k) bytes[k] ^= 0x80;
      }
    }
    const float norm = norm_above(sum_of(squares), depth), error = norm_above(sum_of(errors), depth);
    // of the product's own sum, and of what follows from the rounded one
    const float roundings = (2 * depth + 64) * 0x1p-24f;
    rows_[number] = {scale, kUp * (error + roundings * (norm + error)) + kTiny, kUp * (norm + error),
                     depth * kTiny * (1 + norm), (norm + error + 1) * (most + 1) < 0x1p120f};
  }

  int64_t stride_;
  std::vector<uint8_t> bytes_;
  std::vector<Row> rows_;
};

#ifdef BATCHINFER_PARTS_AS_WORDS
// out = (or, unless it is the first part of a sum, +=) exact products of R rows as words with N groups of 16 columns.
template <class Columns, int R, int N>
__attribute__((noinline)) void screen_tile(const int32_t* words, Columns columns, const int32_t* starts, int64_t num_steps,
                                           bool is_first, int32_t* out, Ahead& ahead) {
  Ints sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = load_ints(is_first ? starts + 16 * n : out + r * kPanelColumns + 16 * n);
  }
  add_words<Columns, R, N>(sums, words, columns, num_steps, ahead);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_ints(out + r * kPanelColumns + 16 * n, sums[r][n]);
  }
}
#elif !defined(BATCHINFER_TILES)
// Exact sums of R rows with N groups of 16 columns.
template <int R, int N>
__attribute__((noinline)) void screen_tile(const uint8_t* row, int64_t stride, const int8_t* values, const int32_t* starts,
                                           int64_t num_words, int32_t* out, Ahead& ahead) {
  const int32_t* fours[R];
  Ints sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) fours[r] = reinterpret_cast<const int32_t*>(row + r * stride);
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const Ints start = load_ints(starts + 16 * n);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][n] = start;
  }
#pragma GCC unroll 1
  for (int64_t word = 0; word < num_words; ++word, values += 4 * kPanelColumns) {
    if (word % kTurnSteps == 0) ahead.turn();
#pragma GCC unroll 2
    for (int part = 0; part < kFourParts; ++part) {
      if (part > 0) load_again();
      FourPart columns[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) columns[n] = column_fours(values + 64 * n, part);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto four = row_four(fours[r][word], part);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) add_product(sums[r][n], four, columns[n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_ints(out + r * kPanelColumns + 16 * n, sums[r][n]);
  }
}
#endif

// sums [num_rows, 64]: exact products of rounded rows with the first `chunks` groups of a panel's columns.
void exact_sums(const ScreenedRows& x, int64_t first, int64_t num_rows, const int8_t* values, const int32_t* starts,
                int64_t num_words, int64_t chunks, int32_t* sums, Pass pass) {
  [[maybe_unused]] const int64_t panel_bytes = num_words * 4 * kPanelColumns;
#ifdef BATCHINFER_TILES
  const Ahead ahead = pass.next_panel(panel_bytes, num_tile_turns(num_rows, chunks, num_words));
  multiply_byte_tiles(TileRows::apart(x.at(first), x.stride(), num_rows), {values, 4 * kPanelColumns}, chunks, num_words, 1, 1,
                      ahead, [&](int64_t row, int64_t count, int64_t tile, int64_t number, int64_t, int64_t, const int32_t* exact) {
                        for (int64_t r = 0; r < count; ++r) {
                          std::memcpy(sums + (row + r) * kPanelColumns + 16 * tile, exact + r * kScratchColumns, 64 * number);
                        }
                      });
#elif defined(BATCHINFER_PARTS_AS_WORDS)
  for_parts(num_words, kWordSteps, [&](int64_t start, int64_t num_steps) {
    const int64_t end = start + num_steps, turns = num_turns(num_rows, num_steps), part_bytes = num_steps * ColumnBytes::kStep;
    const int8_t* const part = values + start * ColumnBytes::kStep;
    Ahead ahead = end == num_words ? pass.next_panel(part_bytes, turns) : pass.next_part(part + part_bytes, part_bytes, turns);
    for_word_tiles(num_rows, [&](int64_t row) { return x.at(first + row) + 4 * start; }, part, num_steps, chunks,
                   [&](int64_t row, auto rows, const int32_t* words, auto columns, int64_t chunk, auto groups) {
                     screen_tile<decltype(columns), rows, groups>(words, columns, starts + 16 * chunk, num_steps, start == 0,
                                                                  sums + row * kPanelColumns + 16 * chunk, ahead);
                   });
  });
#else
  Ahead ahead = pass.next_panel(panel_bytes, num_turns(num_rows, num_words));
  for_tiles(0, num_rows, [&](int64_t row, int64_t rows) {
    with_rows(rows, [&](auto count) {
      for_chunks<count>(chunks, [&](int64_t chunk, auto groups) {
        screen_tile<count, groups>(x.at(first + row), x.stride(), values + 64 * chunk, starts + 16 * chunk, num_words,
                                   sums + row * kPanelColumns + 16 * chunk, ahead);
      });
    });
  });
#endif
}

// 16 columns whose products may be among the largest of a row.
struct Found {
  int64_t row, chunk;
  float lower, upper;
};

// A value that several threads raise.
inline void raise(std::atomic<float>& most, float value) {
  float known = most.load(std::memory_order_relaxed);
  while (known < value && !most.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
  }
}

// The `count`-th largest of the values that several threads add; minus infinity before there are so many.
class NthLargest {
 public:
  void begin(int64_t count) { largest_.assign(count, -INFINITY); }
  float value() const { return least_.load(std::memory_order_relaxed); }

  void add(float value) {
    if (largest_.empty() || !(value > this->value())) return;
    while (is_busy_.test_and_set(std::memory_order_acquire)) {
    }
    if (value > largest_.front()) {  // the least of them
      std::ranges::pop_heap(largest_, std::greater<>());
      largest_.back() = value;
      std::ranges::push_heap(largest_, std::greater<>());
      least_.store(largest_.front(), std::memory_order_relaxed);
    }
    is_busy_.clear(std::memory_order_release);
  }

 private:
  std::vector<float> largest_;  // a heap
  std::atomic<float> least_ = -INFINITY;
  std::atomic_flag is_busy_;
};

// Weights of a draw (draw.cpp) are whole numbers up to 2^44, so tokens this many temperatures below the largest have none,
constexpr double kWeightless = 31.25;
// and products this far apart have different ones, at `below` temperatures below the largest.
inline double apart(double below, double temperature) {
  return below <= 28 ? 3.5 * 0x1p-44 * std::exp(below) * temperature : INFINITY;
}

template <class Value>
class Search {
 public:
  Search(const Rows<Value>& x, const Weight& weight, const Screen& screen, const Wanted* wanted, const Allowed& allowed,
         int64_t num_rows)
      : x_(x), weight_(weight), screen_(screen), wanted_(wanted), allowed_(allowed), num_rows_(num_rows),
        rows_(x, weight, screen, num_rows), most_(num_rows), last_(num_rows), candidates_(num_rows),
        is_asked_(weight.num_panels(), !allowed.words) {
    for (int64_t row = 0; row < num_rows; ++row) last_[row].begin(wanted[row].count);
    for (int64_t row = 0; allowed.words && row < num_rows; ++row) {
      for (int64_t word = 0; word < allowed.row_words; ++word) {
        is_asked_[word / 2] |= allowed.words[row * allowed.row_words + word] != 0;
      }
    }
  }

  std::vector<std::vector<Candidate>> run(bool* is_certain) {
    find();
    std::vector<std::vector<Found>> of_row(num_rows_);
    for (const std::vector<Found>& found : found_) {
      for (const Found& each : found) {
        if (!(each.upper < known(each.row))) of_row[each.row].push_back(each);
      }
    }
    std::vector<Found> first, others;
    std::vector<int64_t> num_first(num_rows_);
    for (int64_t row = 0; row < num_rows_; ++row) {
      std::vector<Found>& found = of_row[row];
      num_first[row] = std::min<int64_t>(std::max<int64_t>(wanted_[row].count, 1), found.size());
      std::ranges::nth_element(found, found.begin() + num_first[row], std::greater<>(), &Found::lower);
      first.insert(first.end(), found.begin(), found.begin() + num_first[row]);
    }
    score(first);
    const int64_t most_left = std::max<int64_t>(1, (weight_.num_columns + 15) / 16 / kGivenUp);
    std::vector<double> least(num_rows_);  // what is below it was not scored
    for (int64_t row = 0; row < num_rows_; ++row) {
      least[row] = last_wanted(row);
      const size_t before = others.size();
      for (auto each = of_row[row].begin() + num_first[row]; each != of_row[row].end(); ++each) {
        if (!(each->upper < least[row])) others.push_back(*each);
      }
      is_certain[row] = rows_[row].is_bounded && static_cast<int64_t>(others.size() - before) <= most_left;
      if (!is_certain[row]) others.resize(before, {});
    }
    score(others);
    for (int64_t row = 0; row < num_rows_; ++row) {
      const double last = last_wanted(row);
      is_certain[row] &= least[row] <= last && last_[row].value() <= last;
      std::erase_if(candidates_[row], [&](const Candidate& each) { return each.product < last; });
      std::ranges::sort(candidates_[row], {}, &Candidate::column);
    }
    return std::move(candidates_);
  }

 private:
  void find() {
    const int64_t num_words = Screen::words(weight_.depth), panel_bytes = Screen::panel_bytes(weight_.depth);
    const int64_t num_panels = weight_.num_panels();
    for (std::atomic<float>& most : most_) most.store(-INFINITY, std::memory_order_relaxed);
    const Cut cut = Cut::of(num_rows_, num_panels, panel_bytes, rows_.stride(), int64_t{384} << 10);
    const int64_t each = cut.block_panels, panel_blocks = (num_panels + each - 1) / each;
    const int64_t row_blocks = (num_rows_ + cut.block_rows - 1) / cut.block_rows;
    found_.resize(row_blocks * panel_blocks);
    const double nanoseconds = 1.0 * num_rows_ * weight_.num_columns * weight_.depth / 200 + num_panels * panel_bytes / 20.0;
    run_tasks(row_blocks * panel_blocks, nanoseconds, [&](int64_t task) {
      const auto first_panel = [&](int64_t number) { return number % panel_blocks * each; };
      const int64_t row_begin = task / panel_blocks * cut.block_rows;
      const int64_t row_end = std::min(row_begin + cut.block_rows, num_rows_);
      const int64_t begin = first_panel(task), end = std::min(begin + each, num_panels);
      alignas(64) int32_t sums[kStripRows * kPanelColumns];
      for (int64_t panel = begin; panel < end; ++panel) {
        if (!is_asked_[panel]) continue;
        const int64_t next = panel + 1 < end ? panel + 1 : first_panel(task_after(task)), chunks = num_chunks(weight_, panel);
        const float* const columns = screen_.columns + panel * Screen::kParts * kPanelColumns;
        for (int64_t row = row_begin; row < row_end; row += kStripRows) {
          const int64_t rows = std::min(kStripRows, row_end - row);
          exact_sums(rows_, row, rows, reinterpret_cast<const int8_t*>(screen_.values + panel * panel_bytes),
                     reinterpret_cast<const int32_t*>(columns + Screen::kStart * kPanelColumns), num_words, chunks, sums,
                     pass_of(row_begin, row_end, row, screen_.values + next * panel_bytes));
          for (int64_t r = 0; r < rows; ++r) look_at(row + r, panel, chunks, columns, sums + r * kPanelColumns, found_[task]);
        }
      }
    });
  }

  // A row's products below this are not wanted.
  float known(int64_t row) const {
    const double reached = most_[row].load(std::memory_order_relaxed) - wanted_[row].reach;
    return std::max(last_[row].value(), std::nextafter(static_cast<float>(reached), -INFINITY));
  }

  // The same, as the exact products know it. Those that weigh as much as the last one may come before it.
  double last_wanted(int64_t row) const {
    const auto [count, reach, temperature] = wanted_[row];
    std::vector<float> products;
    for (const Candidate& each : candidates_[row]) products.push_back(each.product);
    if (products.empty()) return -INFINITY;
    const double most = std::ranges::max(products);
    if (count == 0 || count > std::ssize(products)) return most - reach;
    std::ranges::nth_element(products, products.begin() + count - 1, std::greater<>());
    const double last = products[count - 1];
    const double below = temperature > 0 ? (most - last) / temperature : 0;
    return std::max(last - apart(below, temperature), most - reach);
  }

  // Notes which groups of a panel's columns may have one of the largest products of a row.
  void look_at(int64_t row, int64_t panel, int64_t chunks, const float* columns, const int32_t* sums,
               std::vector<Found>& found) {
    const ScreenedRows::Row& own = rows_[row];
    if (!own.is_bounded) return;
    float least = known(row), most = -INFINITY;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t bits = allowed_.bits(row, 4 * panel + chunk);
      if (bits == 0) continue;
      const auto part = [&](Screen::Part number) { return load(columns + number * kPanelColumns + 16 * chunk); };
      const First first = lanes(weight_.num_columns - panel * kPanelColumns - 16 * chunk);
      const Floats value = as_floats(load_ints(sums + 16 * chunk)) * (floats(own.scale) * part(Screen::kScale));
      const Floats bound = multiply_add(part(Screen::kError), floats(own.of_error),
                                        multiply_add(part(Screen::kNorm), floats(own.of_norm), floats(own.rest)));
      const Floats upper = value + bound;
      const Mask may_be_it = both(first, both(mask_of(bits), not_below(upper, floats(least))));
      if (!any(may_be_it)) continue;
      const float lower = largest_of(choose(may_be_it, value - bound, floats(-INFINITY)));
      found.push_back({row, 4 * panel + chunk, lower, largest_of(choose(may_be_it, upper, floats(-INFINITY)))});
      last_[row].add(lower);
      most = std::max(most, lower);
      least = std::max(least, last_[row].value());
    }
    raise(most_[row], most);
  }

  // Computes exact products of what was found, those of several rows with the same columns together.
  void score(std::vector<Found> found) {
    std::ranges::sort(found, {}, [](const Found& each) { return std::pair(each.chunk, each.row); });
    std::vector<int64_t> starts;
    for (int64_t i = 0; i < std::ssize(found); ++i) {
      if (i == 0 || found[i].chunk != found[i - 1].chunk) starts.push_back(i);
    }
    starts.push_back(std::ssize(found));
    std::vector<float> products(16 * found.size());
    run_tasks(std::ssize(starts) - 1, 4.0 * found.size() * weight_.depth, [&](int64_t task) {
      const int64_t begin = starts[task], count = starts[task + 1] - begin, chunk = found[begin].chunk;
      const int64_t width = weight_.kind == WeightKind::kBfloat16 ? (weight_.depth + 1) / 2 * 2 : weight_.depth;
      std::vector<Value> rows(count * width);
      for (int64_t i = 0; i < count; ++i) std::copy_n(x_.at(found[begin + i].row), width, rows.data() + i * width);
      linear_chunk(Rows<Value>{rows.data(), width}, weight_, chunk, products.data() + 16 * begin, count);
    });
    for (size_t i = 0; i < found.size(); ++i) {
      const auto [row, chunk, lower, upper] = found[i];
      const int64_t num_columns = std::min<int64_t>(16, weight_.num_columns - 16 * chunk);
      for (int64_t column = 0; column < num_columns; ++column) {
        if (allowed_.bits(row, chunk) >> column & 1) {
          candidates_[row].push_back({16 * chunk + column, products[16 * i + column]});
        }
      }
    }
  }

  const Rows<Value>& x_;
  const Weight& weight_;
  const Screen& screen_;
  const Wanted* const wanted_;
  const Allowed& allowed_;
  const int64_t num_rows_;
  const ScreenedRows rows_;
  std::vector<std::atomic<float>> most_;   // of each row a value that its largest product reaches,
  std::vector<NthLargest> last_;           // and one that as many products reach as are wanted
  std::vector<std::vector<Found>> found_;  // by task
  std::vector<std::vector<Candidate>> candidates_;
  std::vector<uint8_t> is_asked_;  // of each panel whether some row may take one of its columns
};

}  // namespace

void make_screen(const Weight& weight, uint8_t* values, float* columns) {
  const int64_t panel_bytes = Screen::panel_bytes(weight.depth);
  run_tasks(weight.num_panels(), [&](int64_t panel) {
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
      screen_chunk(weight.panel(panel) + 64 * chunk, weight,
                   reinterpret_cast<int8_t*>(values + panel * panel_bytes) + 64 * chunk,
                   columns + panel * Screen::kParts * kPanelColumns + 16 * chunk);
    }
  });
}

Wanted Wanted::of(double temperature, int64_t top_k, double top_p, double min_p) {
  if (temperature <= 0) return {1, 0, 0};
  temperature = std::max(temperature, DBL_MIN);  // as draw
  double reach = kWeightless;
  // a share of the largest weight; top_p is of a sum that has what min_p leaves out
  if (min_p > 0 && top_p >= 1) reach = std::min(reach, -std::log(min_p) + 2 * 0x1p-44 / min_p + 0x1p-20);
  return {top_k, reach * temperature, temperature};
}

template <class Value>
std::vector<std::vector<Candidate>> candidates(const Rows<Value>& x, const Weight& weight, const Screen& screen,
                                               const Wanted* wanted, const Allowed& allowed, int64_t num_rows,
                                               bool* is_certain) {
  return Search<Value>(x, weight, screen, wanted, allowed, num_rows).run(is_certain);
}

template std::vector<std::vector<Candidate>> candidates(const Rows<bf16>&, const Weight&, const Screen&, const Wanted*,
                                                        const Allowed&, int64_t, bool*);
template std::vector<std::vector<Candidate>> candidates(const Rows<float>&, const Weight&, const Screen&, const Wanted*,
                                                        const Allowed&, int64_t, bool*);

bool screening_pays() {
#ifdef BATCHINFER_PARTS_AS_WORDS
  return true;
#else
  return kHasTiles || kFourParts == 1;
#endif
}

}  // namespace batchinfer
