// Carries out the instructions of AMX on processors that have none, as Intel's manual describes them: for a program that is
// linked with this, or has it preloaded.
//
// A processor without AMX raises SIGILL; the handler reads the instruction where it stands in the code, does its work on
// tiles of its own, one set for each thread, and goes on behind it. What is not as the manual wants it ends the process.

#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Tile {
  int num_rows, row_bytes;
  uint8_t bytes[kMostRows][kMostBytes];
};
thread_local Tile tiles[kTiles];
thread_local bool is_configured = false;

[[noreturn]] void refuse(const char* why) {
  if (write(STDERR_FILENO, why, std::strlen(why)) < 0) _exit(3);
  _exit(2);
}

void check(bool holds, const char* why) {
  if (!holds) refuse(why);
}

void load_configuration(const uint8_t* at) {
  check(at[0] == 1 && at[1] == 0, "palette 1 from row 0 on\n");
  for (int i = 2; i < 16; ++i) check(at[i] == 0, "reserved bytes are zero\n");
  for (int tile = 0; tile < 16; ++tile) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, at + 16 + 2 * tile, sizeof(row_bytes));
    const int num_rows = at[48 + tile];
    check(tile < kTiles ? num_rows <= kMostRows && row_bytes <= kMostBytes && (num_rows == 0) == (row_bytes == 0)
                        : num_rows == 0 && row_bytes == 0,
          "tiles of 16 rows of 64 bytes at most, and 8 of them\n");
    if (tile < kTiles) tiles[tile] = {num_rows, row_bytes, {}};
  }
  is_configured = true;
}

// The bytes behind the prefix, and what general registers hold.
struct Operands {
  const uint8_t* code;
  const greg_t* registers;
  uint8_t low_prefix;  // its bits R, X and B, inverted

  int reg() const { return code[0] >> 3 & 7; }
  int rm() const { return code[0] & 7; }
  bool is_memory() const { return code[0] >> 6 != 3; }

  int64_t general(int number) const {
    static constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                     REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[kOrder[number]];
  }

  // Of memory: base, what the index adds to it from row to row, and the bytes that say so.
  int64_t base, stride;
  int length;

  void read() {
    const int mode = code[0] >> 6;
    const bool has_index = rm() == 4;
    int base_number = rm() | (low_prefix & 0x20 ? 0 : 8);
    length = 1;
    stride = 0;
    if (has_index) {
      const uint8_t sib = code[length++];
      base_number = (sib & 7) | (low_prefix & 0x20 ? 0 : 8);
      const int index = (sib >> 3 & 7) | (low_prefix & 0x40 ? 0 : 8);
      if (index != 4) stride = general(index) << (sib >> 6);
    }
    check(mode != 0 || (base_number & 7) != 5, "an address without base is not expected\n");
    base = general(base_number);
    if (mode == 1) {
      base += static_cast<int8_t>(code[length]);
      length += 1;
    } else if (mode == 2) {
      int32_t displacement;
      std::memcpy(&displacement, code + length, sizeof(displacement));
      base += displacement;
      length += 4;
    }
  }
  uint8_t* row(int number) const { return reinterpret_cast<uint8_t*>(base + number * stride); }
};

float wide(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  const uint32_t wide_bits = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide_bits, sizeof(value));
  return value;
}

// sums [rows, columns] += x [rows, words] · w [words, columns]; a word is two bfloat16 or four bytes.
void multiply(Tile& sums, const Tile& x, const Tile& w, bool is_pairs, bool x_is_signed, bool w_is_signed) {
  check(x.row_bytes == 4 * w.num_rows && sums.row_bytes == w.row_bytes && sums.num_rows == x.num_rows,
        "the shapes of three tiles do not fit\n");
  for (int row = 0; row < sums.num_rows; ++row) {
    for (int column = 0; column < sums.row_bytes / 4; ++column) {
      uint8_t* const at = sums.bytes[row] + 4 * column;
      if (is_pairs) {
        float sum, even = 0.0f, odd = 0.0f;
        std::memcpy(&sum, at, sizeof(sum));
        for (int word = 0; word < w.num_rows; ++word) {
          const uint8_t *const a = x.bytes[row] + 4 * word, *const b = w.bytes[word] + 4 * column;
          even = std::fma(wide(a), wide(b), even);
          odd = std::fma(wide(a + 2), wide(b + 2), odd);
        }
        sum += even + odd;
        std::memcpy(at, &sum, sizeof(sum));
      } else {
        uint32_t sum;
        std::memcpy(&sum, at, sizeof(sum));
        for (int i = 0; i < x.row_bytes; ++i) {
          const uint8_t a = x.bytes[row][i], b = w.bytes[i / 4][4 * column + i % 4];
          const int left = x_is_signed ? static_cast<int8_t>(a) : a, right = w_is_signed ? static_cast<int8_t>(b) : b;
          sum += static_cast<uint32_t>(left * right);
        }
        std::memcpy(at, &sum, sizeof(sum));
      }
    }
  }
}

// One instruction C4, prefixes, opcode, operands; returns how many bytes it has.
int carry_out(const uint8_t* code, const greg_t* registers) {
  check(code[0] == 0xC4 && (code[1] & 0x1F) == 2 && (code[2] & 0x84) == 0, "no instruction of AMX\n");
  const int kind = code[2] & 3;  // no prefix, 66, F3, F2
  const int opcode = code[3];
  Operands operands{code + 4, registers, code[1], 0, 0, 1};
  if (operands.is_memory()) operands.read();
  if (opcode == 0x49 && kind == 0 && operands.is_memory()) {
    load_configuration(operands.row(0));
  } else if (opcode == 0x49 && kind == 0 && operands.code[0] == 0xC0) {
    is_configured = false;
  } else {
    check(is_configured, "tiles are used that have no shapes\n");
    Tile& tile = tiles[operands.reg()];
    if (opcode == 0x49 && kind == 3 && !operands.is_memory()) {
      std::memset(tile.bytes, 0, sizeof(tile.bytes));
    } else if (opcode == 0x4B && kind == 3) {
      std::memset(tile.bytes, 0, sizeof(tile.bytes));
      for (int row = 0; row < tile.num_rows; ++row) std::memcpy(tile.bytes[row], operands.row(row), tile.row_bytes);
    } else if (opcode == 0x4B && kind == 2) {
      for (int row = 0; row < tile.num_rows; ++row) std::memcpy(operands.row(row), tile.bytes[row], tile.row_bytes);
    } else if (opcode == 0x5C || opcode == 0x5E) {
      check(opcode == 0x5E || kind == 2, "products of pairs other than of bfloat16\n");
      const Tile &x = tiles[operands.rm()], &w = tiles[~(code[2] >> 3) & 7];
      multiply(tile, x, w, opcode == 0x5C, kind == 3 || kind == 2, kind == 3 || kind == 1);
    } else {
      refuse("an instruction that is not known here\n");
    }
  }
  return 4 + operands.length;
}

void on_unknown_instruction(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  _mm_setcsr(_mm_getcsr() | 0x8040);  // subnormal numbers are zero
  registers[REG_RIP] += carry_out(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
}

__attribute__((constructor)) void begin() {
  struct sigaction action = {};
  action.sa_sigaction = on_unknown_instruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  check(sigaction(SIGILL, &action, nullptr) == 0, "SIGILL cannot be handled\n");
}

}  // namespace
