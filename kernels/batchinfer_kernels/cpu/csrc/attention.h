// Softmax attention of up to 64 rows that share their keys; the inside of paged_decode.cpp and the prefills.
//
//   scores   keys x rows      keys · queriesᵀ; queries are interleaved once, so that lanes are rows
//   weights  keys x rows      exp(score - peak), rounded; a page that raises the peak shrinks earlier sums
//   sums     rows x values    weights · values, a step's keys at a time; bfloat16 values are interleaved first
//
// Where few rows share their keys (fewer than 8 heads), lanes are keys instead: keys are turned round, queries are not.
//
// A step of a product takes two bfloat16 values side by side or one float32: a word of 32 bits. Scratch memory holds words.
//
// A row meets its pages in ascending order. Keys that it may not see, behind its position or before its window, have weight
// zero: adding them changes no bit. Values that are not finite are left out, since zero times such a value is not zero. So a
// row has the same bits next to any other rows, and may share some pages with them and go on alone.

#pragma once

#include <algorithm>

#include "ahead.h"
#include "kernels.h"
#include "scratch.h"

namespace batchinfer {

constexpr int64_t kPageTokens = 64;
constexpr int64_t kAttentionRows = 64;  // at most, together
constexpr int64_t kFewHeads = 8;        // fewer than these: lanes are keys, whatever else is in the step
constexpr float kLeastPeak = -1e30f;    // of a row that may meet pages of which it sees nothing; scores are above it

template <class Value>
constexpr int64_t kWordValues = 4 / int64_t{sizeof(Value)};

enum class Lanes { kRows, kKeys };

// Values of a page's keys as products take them: a word of `stride` / value_dim keys after the other.
template <class Value>
struct PageValues {
  const Value* data;
  int64_t stride;  // values from one step to the next
};

template <class Value>
class Attention {
 public:
  // The calling thread's own, made ready for rows of `width` values and `value_dim` results.
  static Attention& begin(int64_t width, int64_t value_dim, float scale, Lanes lanes);

  // Rows [row, row + count), of 64, are these queries, which must stay where they are.
  void load_queries(int64_t row, int64_t count, Rows<Value> q);
  // Row `row` is of a token at `position`.
  void set_position(int64_t row, int64_t position) { positions_[row] = static_cast<int32_t>(position); }
  // It sees the last `window` of these keys alone, its own included.
  void set_window(int64_t row, int64_t window) {
    firsts_[row] = static_cast<int32_t>(std::max<int64_t>(0, positions_[row] - window + 1));
    peak_[row] = std::max(peak_[row], kLeastPeak);
  }
  // It sees one more key, with this score (times the scale) and the value zero.
  void set_sink(int64_t row, float sink, float scale) {
    peak_[row] = std::max(sink / scale, kLeastPeak);
    total_[row] = 1.0f;
  }

  // Rows [row_begin, row_end) meet `num_keys` keys of one page, which starts at position `start`. A whole page of keys
  // must be readable. `values` are the keys' values; a key that is not there has zeros where a step takes two.
  // The keys that come `next` (or none) are brought into the cache meanwhile.
  void add_page(int64_t row_begin, int64_t row_end, Rows<Value> keys, PageValues<Value> values, int64_t start,
                int64_t num_keys, Rows<Value> next = {});

  // What is brought into the cache during the next page, in about kTurns turns.
  static constexpr int64_t kTurns = 24;
  void look_ahead(const RowsAhead& ahead) { ahead_ = ahead; }

  // scores[key] = sum over the rows before `row_end` of weights[row] * max(0, key · q row), for keys of one page as in
  // add_page; added to the old scores if `adds`. Lanes are rows: 16 of them are added up side by side, then the lanes.
  void score_page(int64_t row_end, Rows<Value> keys, int64_t num_keys, const float* weights, bool adds,
                  Rows<Value> next, float* scores);

  // The values of a page for add_page, in this thread's scratch memory where they cannot stay where they are.
  PageValues<Value> values_of(Rows<Value> values, int64_t num_keys);

  // out = the weighted mean of the values that row `row` has seen; zeros when it has seen none.
  void finish(int64_t row, Value* out) const;

 private:
  template <class Step, int K, int C>
  void score(int64_t lane, Rows<Value> keys, int64_t num_keys, Rows<Value> next);
  template <class Step>
  void score_in_panels(int64_t row_begin, int64_t row_end, Rows<Value> keys, int64_t num_keys, Rows<Value> next);
  int32_t* query_at(int64_t row);
  void turn_queries(int64_t row, int64_t count, Rows<Value> q);
  void score_rows(int64_t row_begin, int64_t row_end, Rows<Value> keys, int64_t num_keys, Rows<Value> next);
  void weigh(int64_t lane, int64_t row_end, int64_t start, int64_t num_keys);
  void turn_keys(Rows<Value> keys, int64_t num_keys, Rows<Value> next);
  void weigh_row(int64_t row, int64_t start, int64_t num_keys);
  void sum(int64_t row_begin, int64_t row_end, PageValues<Value> values, int64_t num_keys);
  void sum_of_page(int64_t row_begin, int64_t row_end, PageValues<Value> values, int64_t start, int64_t num_keys);
  PageValues<Value> some_values(PageValues<Value> values, int64_t first, int64_t end);
  void score_in_tiles(int64_t row_begin, int64_t row_end, Rows<Value> keys, int64_t num_keys, Rows<Value> next);
  void sum_in_tiles(int64_t row_begin, int64_t row_end, PageValues<Value> values, int64_t num_steps);
  Rows<Value> whole_words(Rows<Value> keys, int64_t num_keys);

  static constexpr int64_t kPageWords = kPageTokens / kWordValues<Value>;
  static constexpr int64_t kMostWideKeys = 8;  // that go together
  // with lanes of keys [row][key] and [row][word]
  alignas(64) float scores_[kPageTokens][kAttentionRows];
  alignas(64) int32_t weights_[kPageWords][kAttentionRows];    // of pairs
  alignas(64) float wide_weights_[kPageTokens][kAttentionRows];  // of values in float32
  alignas(64) int32_t weight_rows_[kAttentionRows][kPageWords];  // the same turned round, for tiles
  // with room for whole vectors behind the last row
  alignas(64) float peak_[kAttentionRows + 16], total_[kAttentionRows + 16], shrink_[kAttentionRows + 16];
  alignas(64) int32_t firsts_[kAttentionRows + 16], positions_[kAttentionRows + 16];  // of the keys that a row sees
  RowsAhead ahead_;
  Lanes lanes_;
  int64_t width_, value_dim_, value_room_;  // whole words, values, whole vectors of values
  bool is_padded_;                // rows of keys and queries end within a word
  bool is_wide_;                  // rows of products are widened to float32, as pairs are slow here (pairs.cpp)
  float factor_;                  // scale / ln 2
  Scratch<int32_t> queries_;      // panels of [words of a row, some rows]; with lanes of keys [words, kPageTokens] of keys
  const Value* query_rows_[kAttentionRows];
  Scratch<float> sums_;        // [kAttentionRows, value_room_]
  Scratch<Value> values_;      // [kPageTokens, value_room_], in words
  Scratch<Value> some_values_;  // the same, of some keys alone
  Scratch<Value> padded_keys_, padded_queries_;
  Scratch<float> wide_rows_;   // [kMostWideKeys, width_] of keys; with lanes of keys [kAttentionRows, width_] of queries
};

// Rows [place, place + count) are those of a key head from row `first` of token `token` on: its query heads at this token,
// then at the next ones.
template <class Value>
void load_group(Attention<Value>& attention, const GroupedHeads& heads, const Value* q, const int64_t* positions,
                int64_t key_head, int64_t token, int64_t first, int64_t count, int64_t place);

// Words of two keys: the values at a column of keys 2 * pair and 2 * pair + 1 side by side. Of each whole 32 columns come the
// first, third, … first, then the others, as shifts put them there; Attention::finish brings them into order again. A key
// that is not there and columns behind the last one, up to `room`, have zeros.
void interleave_values(Rows<bf16> values, int64_t value_dim, int64_t room, int64_t num_keys, bf16* out);

}  // namespace batchinfer
