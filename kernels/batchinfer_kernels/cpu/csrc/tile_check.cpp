// Whether products in tiles have the bits that amx_tiles.h promises, on the processor at hand: asked once, before a
// library with tiles is used.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "lanes.h"
#include "amx_products.h"

#if defined(BATCHINFER_TILES) && !defined(BATCHINFER_TILES_IN_PLAIN)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace batchinfer {

#ifdef BATCHINFER_TILES
namespace {

#ifndef BATCHINFER_TILES_IN_PLAIN
// The kernel gives tiles to processes that ask (Linux, arch_prctl: ARCH_REQ_XCOMP_PERM for XTILEDATA); threads inherit it.
[[maybe_unused]] const int64_t kPermission = syscall(SYS_arch_prctl, 0x1023, 18);
#endif

constexpr int64_t kColumns = 64;

// One result, written out; with `is_one_chain` in the order that products without tiles have.
float pair_sum(const bf16* row, const bf16* panel, int64_t column, int64_t num_words, bool is_one_chain) {
  float sum = 0.0f;
  for (int64_t start = 0; start < num_words; start += kTileSide) {
    float even = 0.0f, odd = 0.0f;
    for (int64_t word = start; word < std::min(start + kTileSide, num_words); ++word) {
      const bf16* const values = panel + 2 * (word * kColumns + column);
      if (is_one_chain) {
        sum = std::fma(wide_of(row[2 * word + 1]), wide_of(values[1]), sum);
        sum = std::fma(wide_of(row[2 * word]), wide_of(values[0]), sum);
      } else {
        even = std::fma(wide_of(row[2 * word]), wide_of(values[0]), even);
        odd = std::fma(wide_of(row[2 * word + 1]), wide_of(values[1]), odd);
      }
    }
    if (!is_one_chain) sum = sum + (even + odd);
  }
  return sum;
}

bool pairs_agree(std::mt19937& random, int64_t num_rows, int64_t num_tiles, int64_t num_words, bool is_one_chain) {
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<bf16>& values) {
    for (bf16& value : values) value = static_cast<bf16>(std::bit_cast<uint32_t>(normal(random)) >> 16);
  };
  std::vector<bf16> rows(num_rows * (2 * num_words + 6)), panel(2 * num_words * kColumns + 2);
  fill(rows);
  fill(panel);
  std::vector<float> out(num_rows * kColumns, -1.0f);
  const int64_t stride = 2 * num_words + 6;
  multiply_pair_tiles(TileRows::apart(rows.data(), 2 * stride, num_rows), {panel.data(), 4 * kColumns}, num_tiles,
                      num_words, true, out.data(), kColumns);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t column = 0; column < kColumns; ++column) {
      const float expected =
          column < kTileSide * num_tiles
              ? pair_sum(rows.data() + row * stride, panel.data(), column, num_words, is_one_chain)
              : -1.0f;
      if (std::memcmp(&expected, &out[row * kColumns + column], sizeof(float)) != 0) return false;
    }
  }
  return true;
}

bool bytes_agree(std::mt19937& random, int64_t num_rows, int64_t num_tiles, int64_t num_blocks) {
  constexpr int64_t kBlockWords = kBlock / 4;
  std::uniform_int_distribution<int> byte(-128, 127);
  std::vector<int8_t> rows(num_rows * num_blocks * kBlock);
  std::vector<int8_t> panel(num_blocks * kBlock * kColumns);
  for (int8_t& value : rows) value = static_cast<int8_t>(byte(random));
  for (int8_t& value : panel) value = static_cast<int8_t>(byte(random));
  bool agree = true;
  int64_t num_seen = 0;
  multiply_byte_tiles(
      TileRows::apart(rows.data(), num_blocks * kBlock, num_rows), {panel.data(), 4 * kColumns}, num_tiles, kBlockWords,
      num_blocks, 2, Ahead::nothing(),
      [&](int64_t row, int64_t count, int64_t tile, int64_t number, int64_t first, int64_t both, const int32_t* sums) {
        for (int64_t block = first; block < first + both; ++block, sums += kScratchValues) {
          for (int64_t i = 0; i < count * kTileSide * number; ++i, ++num_seen) {
            const int64_t r = i / (kTileSide * number), c = i % (kTileSide * number), column = kTileSide * tile + c;
            int32_t expected = 0;
            for (int64_t k = 0; k < kBlock; ++k) {
              expected += int32_t{rows[((row + r) * num_blocks + block) * kBlock + k]} *
                          panel[((block * kBlockWords + k / 4) * kColumns + column) * 4 + k % 4];
            }
            agree = agree && expected == sums[r * kScratchColumns + c];
          }
        }
      });
  return agree && num_seen == num_rows * kTileSide * num_tiles * num_blocks;
}

}  // namespace

bool tiles_agree(bool is_one_chain) {
  const UsesTiles here;
  std::mt19937 random(1);
  for (const int64_t num_rows : {1, 2, 15, 16, 17, 31, 32, 33, 49, 64, 67}) {
    for (int64_t num_tiles = 1; num_tiles <= 4; ++num_tiles) {
      for (const int64_t num_words : {0, 1, 15, 16, 17, 40, 64}) {
        if (!pairs_agree(random, num_rows, num_tiles, num_words, is_one_chain)) return false;
      }
      if (!bytes_agree(random, num_rows, num_tiles, 3)) return false;
    }
  }
  return true;
}

#else

bool tiles_agree(bool) { return true; }

#endif

}  // namespace batchinfer
