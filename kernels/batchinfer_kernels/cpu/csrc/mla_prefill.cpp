// Attention of several requests' chunks in the plain form (DeepSeek-V2 report section 2.1): every head has its own keys
// and values. They are made from the latents once per page, however many chunks look at it.
//
// A task makes the keys and values of one page and head; then a task is one head and up to 64 queries of a chunk.

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "attention.h"
#include "tile.h"

namespace batchinfer {
namespace {

constexpr int64_t kMostBytes = int64_t{192} << 20;  // of keys and values at a time

// The pages of some chunks, each once.
struct Pages {
  std::vector<int64_t> ids, num_tokens;                // of each place
  std::unordered_map<int64_t, int64_t> places;         // by id
  std::vector<std::vector<int64_t>> places_of_chunks;  // of each chunk's pages in order
};

Pages pages_of(const PrefillChunk* chunks, int64_t num_chunks) {
  Pages pages;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    std::vector<int64_t>& places = pages.places_of_chunks.emplace_back();
    for (int64_t start = 0; start < chunks[chunk].context_tokens; start += kPageTokens) {
      const int64_t id = chunks[chunk].page_ids[start / kPageTokens];
      const auto [found, is_new] = pages.places.try_emplace(id, pages.ids.size());
      if (is_new) {
        pages.ids.push_back(id);
        pages.num_tokens.push_back(0);
      }
      int64_t& tokens = pages.num_tokens[found->second];
      tokens = std::max(tokens, std::min(kPageTokens, chunks[chunk].context_tokens - start));
      places.push_back(found->second);
    }
  }
  return pages;
}

// Keys [places, heads, 64, width] and values [places, heads, 64, value_room] of some heads; bfloat16 values interleaved.
template <class Value>
struct Expanded {
  const PrefillShape& shape;
  int64_t num_heads;
  Scratch<Value> keys, values;

  Expanded(const PrefillShape& shape, int64_t num_heads, int64_t num_places)
      : shape(shape),
        num_heads(num_heads),
        keys(num_places * num_heads * kPageTokens * width()),
        values(num_places * num_heads * kPageTokens * value_room()) {}
  int64_t width() const { return shape.nope_dim + shape.rotary_dim; }
  int64_t value_room() const { return (shape.value_dim + 15) / 16 * 16; }  // whole vectors
  Value* keys_at(int64_t place, int64_t head) const {
    return keys.data() + (place * num_heads + head) * kPageTokens * width();
  }
  PageValues<Value> values_at(int64_t place, int64_t head) const {
    return {values.data() + (place * num_heads + head) * kPageTokens * value_room(), kWordValues<Value> * value_room()};
  }
  Value* value_room_at(int64_t place, int64_t head) const { return const_cast<Value*>(values_at(place, head).data); }
};

// The latents of a page as rows of a product: with a zero behind each where a step would take the next value, too.
template <class Value>
Rows<Value> latents_of(const Value* page, int64_t row_step, int64_t latent_dim, int64_t num_tokens) {
  const int64_t depth = (latent_dim + kWordValues<Value> - 1) / kWordValues<Value> * kWordValues<Value>;
  if (depth == latent_dim) return {page, row_step};
  static thread_local std::vector<Value> padded;
  padded.assign(num_tokens * depth, Value{0});
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::copy_n(page + token * row_step, latent_dim, padded.data() + token * depth);
  }
  return {padded.data(), depth};
}

template <class Value>
void expand_page(const Expanded<Value>& expanded, const Weight& kv_up, const Value* page, int64_t num_tokens,
                 int64_t place, int64_t head) {
  const PrefillShape& shape = expanded.shape;
  const int64_t columns = shape.nope_dim + shape.value_dim;
  alignas(64) float sums[kPageTokens * kPanelColumns];
  static thread_local std::vector<Value> rounded;
  rounded.resize(kPageTokens * columns + 64);
  const Rows<Value> latents = latents_of(page, shape.row_step, shape.latent_dim, num_tokens);
  for (int64_t panel = 0; panel < kv_up.num_panels(); ++panel) {
    multiply_strip(latents, 0, num_tokens, kv_up, kv_up.panel(panel), num_chunks(kv_up, panel), sums);
    const int64_t column = panel * kPanelColumns, count = std::min(kPanelColumns, columns - column);
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int64_t c = 0; c < count; c += 16) {
        store_rounded(rounded.data() + token * columns + column + c, lanes(count - c),
                      load(sums + token * kPanelColumns + c));
      }
    }
  }
  Value* keys = expanded.keys_at(place, head);
  for (int64_t token = 0; token < kPageTokens; ++token) {
    Value* key = keys + token * expanded.width();
    if (token < num_tokens) {
      std::copy_n(rounded.data() + token * columns, shape.nope_dim, key);
      std::copy_n(page + token * shape.row_step + shape.latent_dim, shape.rotary_dim, key + shape.nope_dim);
    } else {
      std::fill_n(key, expanded.width(), Value{0});
    }
  }
  Value* values = expanded.value_room_at(place, head);
  const int64_t room = expanded.value_room();
  if constexpr (kWordValues<Value> == 2) {
    interleave_values({rounded.data() + shape.nope_dim, columns}, shape.value_dim, room, num_tokens, values);
  } else {
    for (int64_t token = 0; token < num_tokens; ++token) {
      Value* at = values + token * room;
      std::fill_n(std::copy_n(rounded.data() + token * columns + shape.nope_dim, shape.value_dim, at),
                  room - shape.value_dim, Value{0});
    }
  }
  const int64_t num_there = (num_tokens + kWordValues<Value> - 1) / kWordValues<Value> * kWordValues<Value>;
  std::fill_n(values + num_there * room, (kPageTokens - num_there) * room, Value{0});
}

// Some queries of one chunk at one head.
struct Part {
  int64_t chunk, first_row, num_rows;
};

std::vector<Part> parts_of(const PrefillChunk* chunks, int64_t num_chunks) {
  std::vector<Part> parts;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    // the last queries see the most keys: they go first, so that threads end together
    const int64_t num_rows = chunks[chunk].num_rows;
    for (int64_t row = (num_rows - 1) / kAttentionRows * kAttentionRows; row >= 0; row -= kAttentionRows) {
      parts.push_back({chunk, chunks[chunk].first_row + row, std::min(kAttentionRows, num_rows - row)});
    }
  }
  return parts;
}

}  // namespace

template <class Value>
void mla_prefill(const PrefillShape& shape, const PrefillChunk* chunks, int64_t num_chunks, const Value* q,
                 const Value* pages, const int64_t* positions, const Weight& kv_up, Value* out) {
  const Pages used = pages_of(chunks, num_chunks);
  const std::vector<Part> parts = parts_of(chunks, num_chunks);
  const int64_t num_places = used.ids.size(), num_parts = parts.size();
  const int64_t width = shape.nope_dim + shape.rotary_dim;
  const int64_t head_bytes = num_places * kPageTokens * (width + shape.value_dim) * int64_t{sizeof(Value)};
  const int64_t most_heads = std::clamp<int64_t>(kMostBytes / std::max<int64_t>(1, head_bytes), 1, shape.num_heads);
  for (int64_t first_head = 0; first_head < shape.num_heads; first_head += most_heads) {
    const int64_t num_heads = std::min(most_heads, shape.num_heads - first_head);
    const Expanded<Value> expanded(shape, num_heads, num_places);
    run_tasks(num_places * num_heads, [&](int64_t task) {
      const int64_t place = task / num_heads, head = task % num_heads;
      Weight weight = kv_up;
      weight.data += (first_head + head) * kv_up.bytes();
      expand_page(expanded, weight, pages + used.ids[place] * kPageTokens * shape.row_step, used.num_tokens[place], place,
                  head);
    });
    run_tasks(num_parts * num_heads, [&](int64_t task) {
      const Part& part = parts[task / num_heads];
      const int64_t head = task % num_heads;
      Attention<Value>& attention = Attention<Value>::begin(width, shape.value_dim, shape.scale, Lanes::kRows);
      attention.load_queries(0, part.num_rows, {q + (part.first_row * shape.num_heads + first_head + head) * width,
                                                shape.num_heads * width});
      int64_t last = 0;
      for (int64_t i = 0; i < part.num_rows; ++i) {
        attention.set_position(i, positions[part.first_row + i]);
        last = std::max(last, positions[part.first_row + i]);
      }
      const int64_t num_tokens = std::min(last + 1, chunks[part.chunk].context_tokens);
      for (int64_t start = 0; start < num_tokens; start += kPageTokens) {
        const int64_t place = used.places_of_chunks[part.chunk][start / kPageTokens];
        attention.add_page(0, part.num_rows, Rows<Value>{expanded.keys_at(place, head), width},
                           expanded.values_at(place, head), start, std::min(kPageTokens, num_tokens - start));
      }
      for (int64_t i = 0; i < part.num_rows; ++i) {
        const int64_t row = part.first_row + i;
        attention.finish(i, out + (row * shape.num_heads + first_head + head) * shape.value_dim);
      }
    });
  }
}

template void mla_prefill(const PrefillShape&, const PrefillChunk*, int64_t, const bf16*, const bf16*, const int64_t*,
                          const Weight&, bf16*);
template void mla_prefill(const PrefillShape&, const PrefillChunk*, int64_t, const float*, const float*,
                          const int64_t*, const Weight&, float*);

}  // namespace batchinfer
