// A digest of grouped-query attention in each form, of values that any processor computes alike: heads on their way into
// pages, decode and prefill over them, in bfloat16 and float32. It needs no tensor library, so it can be built for other
// processors and emulated.

#include <cstdio>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "processor.h"

namespace batchinfer {

int64_t num_threads() { return 1; }
void run_tasks(int64_t num_tasks, const std::function<void(int64_t)>& task) {
  for (int64_t index = 0; index < num_tasks; ++index) task(index);
}
void run_tasks(int64_t num_tasks, double, const std::function<void(int64_t)>& task) { run_tasks(num_tasks, task); }

}  // namespace batchinfer

using namespace batchinfer;

namespace {

struct Case {
  int64_t num_heads, num_kv_heads, width, rotary, window;
  bool has_sinks, has_norms;
};
// one query head or several to a key head, few and many rows, odd widths
constexpr Case kCases[] = {{4, 2, 16, 16, 100, true, true},   {16, 8, 128, 128, 0, false, true},
                           {9, 3, 23, 8, 17, false, false},   {32, 2, 96, 48, 0, true, true},
                           {70, 1, 16, 16, 1, true, false},   {8, 1, 64, 32, 0, false, true},
                           {12, 4, 40, 40, 64, true, true}};
constexpr int64_t kPage = 64;

struct Random {
  uint64_t state = 88172645463325252u;

  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
  // From -2 to 2, the same in every dtype.
  float value() { return static_cast<float>(static_cast<int64_t>(next() % 1025) - 512) / 256; }
};

bf16 narrow(float value, bf16) { return static_cast<bf16>(std::bit_cast<uint32_t>(value) >> 16); }
float narrow(float value, float) { return value; }

template <class Value>
std::vector<Value> values(Random& random, int64_t count) {
  std::vector<Value> made(count);
  for (Value& value : made) value = narrow(random.value(), Value{});
  return made;
}

template <class Value>
void add(uint64_t& digest, const std::vector<Value>& some) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(some.data());
  for (size_t i = 0; i < some.size() * sizeof(Value); ++i) digest = (digest ^ bytes[i]) * 1099511628211u;
}

template <class Value>
uint64_t digest_of(const Case& given) {
  Random random;
  uint64_t digest = 1469598103934665603u;
  const int64_t heads = given.num_heads, kv_heads = given.num_kv_heads, width = given.width;
  const int64_t row = 2 * kv_heads * width, table_pages = 4;
  const std::vector<int64_t> tokens{1, 63, 64, 65, 200, 256, 199};  // the last two share their first pages
  const int64_t requests = tokens.size();
  std::vector<int64_t> table(requests * table_pages);
  std::iota(table.rbegin(), table.rend(), 0);
  std::copy_n(&table[5 * table_pages], 3, &table[6 * table_pages]);
  std::vector<Value> pages = values<Value>(random, (requests * table_pages + 1) * kPage * row);
  std::vector<float> sinks(heads);
  for (float& sink : sinks) sink = random.value();

  // each request's last token gets its keys and values
  const std::vector<Value> projected = values<Value>(random, requests * (heads + 2 * kv_heads) * width);
  const std::vector<Value> norm_q = values<Value>(random, width), norm_k = values<Value>(random, kv_heads * width);
  std::vector<float> cos(requests * given.rotary / 2), sin(cos.size());
  for (float& value : cos) value = random.value();
  for (float& value : sin) value = random.value();
  std::vector<int64_t> slots(requests), positions(requests);
  for (int64_t i = 0; i < requests; ++i) {
    positions[i] = tokens[i] - 1;
    slots[i] = table[i * table_pages + positions[i] / kPage] * kPage + positions[i] % kPage;
  }
  std::vector<Value> q(requests * heads * width), out(q.size());
  const HeadNorms<Value> norms{given.has_norms ? norm_q.data() : nullptr, given.has_norms ? norm_k.data() : nullptr, false,
                               kv_heads > 1, 1e-6f};
  write_heads(Rows<Value>{projected.data(), (heads + 2 * kv_heads) * width}, heads, kv_heads, width, norms,
              Rotary{cos.data(), sin.data(), given.rotary, false}, slots.data(), q.data(), pages.data(), row, requests);
  add(digest, q);
  add(digest, pages);

  const GroupedHeads form{heads, kv_heads, width, row, kv_heads * width, width, 1 / std::sqrt(static_cast<float>(width)),
                          given.window, given.has_sinks ? sinks.data() : nullptr};
  paged_decode(DecodeShape{form, requests, 1, table_pages}, q.data(), pages.data(), table.data(), tokens.data(),
               positions.data(), out.data());
  add(digest, out);

  std::vector<PrefillChunk> chunks;
  std::vector<int64_t> seen;
  for (int64_t i = 0; i < requests; ++i) {  // the last third of each prompt
    const int64_t count = (tokens[i] + 2) / 3;
    chunks.push_back({static_cast<int64_t>(seen.size()), count, tokens[i], &table[i * table_pages]});
    for (int64_t token = tokens[i] - count; token < tokens[i]; ++token) seen.push_back(token);
  }
  const std::vector<Value> rows = values<Value>(random, seen.size() * heads * width);
  std::vector<Value> attended(rows.size());
  gqa_prefill(form, chunks.data(), requests, rows.data(), pages.data(), seen.data(), attended.data());
  add(digest, attended);
  return digest;
}

}  // namespace

int main() {
  set_control(control() | kSubnormalsAreZero);  // as in tasks.cpp
  for (const Case& given : kCases) {
    std::printf("%016llx %016llx\n", static_cast<unsigned long long>(digest_of<bf16>(given)),
                static_cast<unsigned long long>(digest_of<float>(given)));
  }
}
