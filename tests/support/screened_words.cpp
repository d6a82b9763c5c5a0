// Words by screening, greedy and drawn, next to those of the exact product, in bfloat16 and float32: a digest per dtype, or a
// failure.
// It needs no tensor library, so it can be built for other processors and emulated.

#include <cstdio>
#include <vector>

#include "processor.h"
#include "screen.h"

namespace batchinfer {

int64_t num_threads() { return 1; }
void run_tasks(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  for (int64_t index = 0; index < num_tasks; ++index) task(index);
}
void run_tasks(int64_t num_tasks, double, const std::function<void(int64_t)>& task) { run_tasks(num_tasks, task); }

}  // namespace batchinfer

using namespace batchinfer;

namespace {

constexpr int64_t kShapes[][3] = {{1, 1500, 64}, {17, 1001, 130}, {40, 900, 256}, {100, 520, 96}};  // rows, words, depth

bf16 narrow(float value, bf16) { return static_cast<bf16>(std::bit_cast<uint32_t>(value) >> 16); }
float narrow(float value, float) { return value; }

uint64_t next(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

template <class Value>
std::vector<Value> values(uint64_t& state, int64_t count) {
  std::vector<Value> made(count);
  for (Value& value : made) {
    float sum = 0;  // nearly normal
    for (int i = 0; i < 4; ++i) {
      sum += static_cast<float>(static_cast<int64_t>(next(state) % 1025) - 512) / 512;
    }
    value = narrow(sum, Value{});
  }
  return made;
}

// The word of a row, from its candidates alone.
int64_t word_of(const std::vector<Candidate>& found, bool is_drawn) {
  const auto count = static_cast<int64_t>(found.size());
  std::vector<float> products;
  for (const Candidate& each : found) products.push_back(each.product);
  const double temperature = 0.7, one = 1.0, none = 0.0, uniform = 0.6;
  const int64_t top_k = 5;
  int64_t place = 0;
  bool is_finite;
  if (is_drawn) {
    draw(products.data(), {&temperature, &top_k, &one, &none, &uniform}, 1, count, &place);
  } else {
    argmax(products.data(), 1, count, &place, &is_finite);
  }
  return found[place].column;
}

// False where a certain row has another word than its exact products, or few rows are certain. Odd rows draw from 5 words.
template <class Value>
bool agrees(int64_t rows, int64_t words, int64_t depth, uint64_t& digest) {
  uint64_t state = 88172645463325252u + rows;
  const std::vector<Value> plain = values<Value>(state, words * depth), x = values<Value>(state, rows * depth);
  Weight weight{nullptr, kKindOf<Value>, words, depth};
  std::vector<uint8_t> packed(weight.bytes() + 64);
  uint8_t* const data = packed.data() + 63 - (reinterpret_cast<uintptr_t>(packed.data()) + 63) % 64;
  weight.data = data;
  pack(Parts<Value>{{plain.data()}, words, depth}, weight, data);
  std::vector<uint8_t> screened(weight.num_panels() * Screen::panel_bytes(depth));
  std::vector<float> columns(weight.num_panels() * Screen::kParts * kPanelColumns), exact(rows * words);
  make_screen(weight, screened.data(), columns.data());
  const Screen screen{screened.data(), columns.data(), 1e6f};
  std::vector<int64_t> expected(rows), drawn(rows), top_k(rows, 5);
  std::vector<double> temperature(rows, 0.7), one(rows, 1.0), none(rows, 0.0), uniform(rows, 0.6);
  std::vector<Wanted> wanted(rows);
  for (int64_t row = 0; row < rows; ++row) wanted[row] = Wanted::of(row % 2 ? 0.7 : 0.0, row % 2 ? 5 : 0, 1.0, 0.0);
  std::vector<uint8_t> certain(rows), finite(rows);
  const Rows<Value> of_x{x.data(), depth};
  linear<Rows<Value>, float>(of_x, weight, nullptr, exact.data(), rows);
  // all words, then words of which about an eighth may come, and none in the last row
  const int64_t row_words = Allowed::words_for(words);
  std::vector<uint32_t> bits(rows * row_words);
  std::vector<int64_t> numbers(rows);
  for (int64_t i = 0; i < (rows - 1) * row_words; ++i) {
    bits[i] = 0xFFFFFFFF;
    for (int j = 0; j < 3; ++j) bits[i] &= static_cast<uint32_t>(next(state) >> 16);
  }
  for (int64_t row = 0; row < rows; ++row) numbers[row] = row;
  for (const Allowed& allowed : {Allowed{nullptr, 0}, Allowed{bits.data(), row_words}}) {
    if (allowed.words) apply_token_bitmask(exact.data(), numbers.data(), allowed, rows, words);
    argmax(exact.data(), rows, words, expected.data(), reinterpret_cast<bool*>(finite.data()));
    draw(exact.data(), {temperature.data(), top_k.data(), one.data(), none.data(), uniform.data()}, rows, words, drawn.data());
    const auto found = candidates(of_x, weight, screen, wanted.data(), allowed, rows, reinterpret_cast<bool*>(certain.data()));
    int64_t num_certain = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (certain[row] && !found[row].empty() && word_of(found[row], row % 2) != (row % 2 ? drawn : expected)[row]) return false;
      num_certain += certain[row];
      digest = (digest ^ static_cast<uint64_t>((row % 2 ? drawn : expected)[row])) * 1099511628211u;
    }
    if (10 * num_certain < 8 * rows) return false;
  }
  return true;
}

template <class Value>
bool print_digest() {
  uint64_t digest = 14695981039346656037u;
  for (const auto& [rows, words, depth] : kShapes) {
    if (!agrees<Value>(rows, words, depth, digest)) {
      std::printf("%d rows, %d words: not the word of the exact product\n", static_cast<int>(rows), static_cast<int>(words));
      return false;
    }
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(digest));
  return true;
}

}  // namespace

int main() {
  set_control(control() | kSubnormalsAreZero);  // as in tasks.cpp
  return print_digest<bf16>() && print_digest<float>() ? 0 : 1;
}
