// Products of tokens that are rounded to int8 and weights of few bits. Included by
// prompts_kernels.h.
//
// The columns are cut into blocks. In each of them a token has a factor and a row has a scale, and
// the sum of products of integers is exact. The blocks are added in order, in fp32, so the bits of
// a result depend on nothing but its operands.
#pragma once

#include "rounding.h"

namespace {

// Four integers of a row, which products take together.
using Word = int32_t;
constexpr int64_t kWord = 4;

// The words of a row, with zeros up to a whole transposition.
TPC_INLINE int64_t words_of(const Linear& a) {
  return (a.columns + kLanes * kWord - 1) / (kLanes * kWord) * kLanes;
}

// The blocks of columns. They begin at multiples of a block in the whole weight.
class ColumnBlocks {
 public:
  explicit ColumnBlocks(const Linear& a)
      : first_(a.first),
        columns_(a.columns),
        group_(tpc::group_of(a.format) ? tpc::group_of(a.format) : INT64_MAX),
        block_(group_ < kMostBlock ? group_ : kMostBlock),
        before_(first_ % block_),
        count_((before_ + columns_ - 1) / block_ + 1) {}

  int64_t count() const { return count_; }

  int64_t begin(int64_t block) const { return block ? block * block_ - before_ : 0; }

  int64_t end(int64_t block) const {
    const int64_t column = begin(block + 1);
    return column < columns_ ? column : columns_;
  }

  // The place of its scale among those of a row.
  int64_t group(int64_t block) const {
    return (first_ + begin(block)) / group_ - first_ / group_;
  }

 private:
  int64_t first_, columns_, group_, block_;
  int64_t before_;  // columns of the first block that are not here
  int64_t count_;
};

// Round a token. Its factors and sums are `width` apart.
inline void round_token(const Linear& a, const ColumnBlocks& blocks, int64_t token,
                        int8_t* integers, float* factors, int32_t* sums, int64_t width) {
  float values[kMostBlock];
  alignas(64) int32_t whole[kMostBlock];
  const bf16* x = at(a.x, token, 0);
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t begin = blocks.begin(block), columns = blocks.end(block) - begin;
    for (int64_t column = 0; column < columns; column += kLanes)
      store(values + column, load(x + begin + column));
    factors[block * width] = rounded_to_bytes(values, columns, whole, sums[block * width]);
    for (int64_t column = 0; column < columns; column += kLanes)
      narrow(load_ints(whole + column), integers + begin + column);
  }
}

// Lay out 16 rows as `[word][row]`, with `stride` between words.
inline void pack_words(const Word* rows, int64_t words, Word* packed, int64_t stride) {
  for (int64_t word = 0; word < words; word += kRegister)
    for (int64_t first = 0; first < kLanes; first += kRegister) {
      Square block[kRegister];
#pragma GCC unroll 16
      for (int64_t line = 0; line < kRegister; ++line)
        block[line] = load_bytes<Square>(rows + (first + line) * words + word);
      transpose(block);
#pragma GCC unroll 16
      for (int64_t line = 0; line < kRegister; ++line)
        std::memcpy(packed + (word + line) * stride + first, block + line, sizeof(Square));
    }
}

void pack_rounded(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const Linear*>(arguments);
  const ColumnBlocks blocks(a);
  const int64_t words = words_of(a), count = blocks.count();
  const int64_t end = last * kItem < a.tokens ? last * kItem : a.tokens;
  auto* rows = scratch.take<Word>(kLanes * words);
  std::memset(rows, 0, sizeof(Word) * static_cast<size_t>(kLanes * words));
  for (int64_t begin = first * kItem; begin < end; begin += kPanel) {
    const int64_t width = panel_width(a.tokens - begin);
    float* factors = a.factors + begin * count;
    int32_t* sums = a.sums + begin * count;
    for (int64_t token = 0; token < width; token += kLanes) {
      // After the last token, panels have what was there before: no result depends on it.
      for (int64_t lane = 0; lane < kLanes && begin + token + lane < a.tokens; ++lane)
        round_token(a, blocks, begin + token + lane, reinterpret_cast<int8_t*>(rows + lane * words),
                    factors + token + lane, sums + token + lane, width);
      pack_words(rows, words, static_cast<Word*>(a.packed) + begin * words + token, width);
    }
  }
}

// Some rows of a weight, `stride` words apart: raised integers, and what those of a block become,
// `count` rows of a block after those of the one before it.
struct HeldRows {
  const Word* integers;
  int64_t stride;
  const Group* groups;
  int64_t count;
  int32_t raised;
  bool has_offsets, has_least;  // whether those of groups are not all 0
};

// Some tokens, `width` apart.
struct RoundedPanel {
  const Word* integers;
  const float* factors;
  const int32_t* sums;
  int64_t width;
};

#if defined(__AMX_INT8__)
#include "prompts_rounded_tiles.h"
#else
// The offset that is added to integers with this number of bits.
constexpr int32_t raised_by(int bits) { return raised_bytes(bits); }

// Multiply 6 rows with 16·kVectors tokens.
template <bool kSigned, int kVectors>
TPC_INLINE void multiply_rounded(const HeldRows& rows, const RoundedPanel& x,
                                 const ColumnBlocks& blocks, float* out) {
  constexpr int kCount = kVectors * kRegisters;
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const int64_t end = blocks.end(block) / kWord;
    IntRegister totals[kRows][kCount];
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) {
      const auto sums = load_bytes<IntRegister>(x.sums + block * x.width + kRegister * v);
#pragma GCC unroll 6
      for (int64_t row = 0; row < kRows; ++row) totals[row][v] = sums * -rows.raised;
    }
    for (int64_t word = blocks.begin(block) / kWord; word < end; ++word) {
      ShortRegister tokens[kCount];
#pragma GCC unroll 8
      for (int v = 0; v < kCount; ++v)
        tokens[v] = load_shorts(x.integers + word * x.width + kRegister * v);
#pragma GCC unroll 6
      for (int64_t row = 0; row < kRows; ++row) {
        const auto weight = everywhere<1>(rows.integers + row * rows.stride + word);
#pragma GCC unroll 8
        for (int v = 0; v < kCount; ++v)
          totals[row][v] = multiply_bytes<kSigned>(totals[row][v], weight, tokens[v]);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) {
      const int64_t place = block * x.width + kRegister * v;
      const Register factors = load_register(x.factors + place);
      const auto sums =
          __builtin_convertvector(load_bytes<IntRegister>(x.sums + place), Register);
#pragma GCC unroll 6
      for (int64_t row = 0; row < kRows; ++row) {
        const Group& group = rows.groups[block * rows.count + row];
        Register values = __builtin_convertvector(totals[row][v], Register);
        if (rows.has_offsets) values -= sums * group.offset;
        float* destination = out + row * kPanel + kRegister * v;
        const Register before = block ? load_register(destination) : Register{};
        values = multiply_add(before, values * factors, everywhere(group.scale));
        if (rows.has_least) values = multiply_add(values, sums * factors, everywhere(group.least));
        std::memcpy(destination, &values, sizeof values);
      }
    }
  }
}

template <bool kSigned, int kVectors>
void multiply_rounded_panel(HeldRows rows, int64_t count, const RoundedPanel& x,
                            const ColumnBlocks& blocks, float* out) {
  for (int64_t row = 0; row < count; row += kRows) {
    multiply_rounded<kSigned, kVectors>(rows, x, blocks, out + row * kPanel);
    rows.integers += kRows * rows.stride;
    rows.groups += kRows;
  }
}
#endif

// Copy a row of a weight, raised.
template <int kBits>
void hold_raised(const Linear& a, int64_t row, Word* held) {
  const char* bytes = static_cast<const char*>(a.weight) + row * a.row_bytes;
  const char* high = static_cast<const char*>(a.high) + row * a.high_bytes;
  const int64_t before = columns_before(a);
  const __m128i raised = _mm_set1_epi8(static_cast<char>(raised_by(kBits)));
  for (int64_t column = 0; column < a.columns; column += kLanes) {
    const __m128i integers = _mm_add_epi8(integers_at<kBits>(bytes, high, column, before), raised);
    std::memcpy(held + column / kWord, &integers, sizeof integers);
  }
}

// Fetch rows that this thread probably decodes next, a part with each panel of an item.
TPC_INLINE void fetch_part(const Linear& a, int64_t row, int64_t rows, const Item& item,
                           int64_t begin) {
  const int64_t bytes = rows * a.row_bytes, tokens = item.end - item.token;
  const auto place = [&](int64_t token) { return bytes * (token - item.token) / tokens; };
  const int64_t end = begin + kPanel < item.end ? place(begin + kPanel) : bytes;
  const char* values = static_cast<const char*>(a.weight) + row * a.row_bytes;
  for (int64_t offset = place(begin); offset < end; offset += 64)
    __builtin_prefetch(values + offset, 0, 2);
}

template <int kBits>
void linear_rounded_of(const Linear& a, int64_t first, int64_t last, Scratch& scratch) {
  constexpr bool kSigned = kBits == 8 && kSignedBytes;
  constexpr decltype(&multiply_rounded_panel<kSigned, 1>) kWidths[] = {
      multiply_rounded_panel<kSigned, 1>, multiply_rounded_panel<kSigned, 2>,
      multiply_rounded_panel<kSigned, 3>, multiply_rounded_panel<kSigned, 4>};
  const ColumnBlocks blocks(a);
  const int64_t words = words_of(a), stride = words + kLanes, count = blocks.count();
  const int64_t sides = a.swiglu ? 2 : 1, side_sums = a.part_rows * kPanel;
  float* sums = scratch.take<float>(sides * side_sums);
  Word* held = scratch.take<Word>(sides * a.part_rows * stride);
  Group* groups = scratch.take<Group>(sides * a.part_rows * count);
  const bool has_least = a.minima != nullptr, has_offsets = has_least || a.offsets != nullptr;
  for (int64_t number = first; number < last; ++number) {
    const Item item = item_of(a, number), next = item_of(a, number + a.threads);
    HeldRows rows[2];
    for (int64_t side = 0; side < sides; ++side) {
      const int64_t first_row = side * a.rows + item.row;
      Word* integers = held + side * a.part_rows * stride;
      Group* side_groups = groups + side * a.part_rows * count;
      for (int64_t row = 0; row < item.rows; ++row) {
        hold_raised<kBits>(a, first_row + row, integers + row * stride);
        const Groups own(a, first_row + row);
        for (int64_t block = 0; block < count; ++block)
          side_groups[block * a.part_rows + row] = own.at(blocks.group(block), blocks.begin(block));
      }
      rows[side] = {integers,          stride,      side_groups, a.part_rows,
                    raised_by(kBits), has_offsets, has_least};
    }
    for (int64_t begin = item.token; begin < item.end; begin += kPanel) {
      const int64_t width = panel_width(item.end - begin);
      const RoundedPanel x{static_cast<const Word*>(a.packed) + begin * words,
                           a.factors + begin * count, a.sums + begin * count, width};
      for (int64_t side = 0; side < sides; ++side) {
        if (next.row != item.row) fetch_part(a, side * a.rows + next.row, next.rows, item, begin);
        // Rows after the last one are multiplied too, with what was there before.
        kWidths[width / kLanes - 1](rows[side], item.rows, x, blocks, sums + side * side_sums);
      }
      put_panel(a, item, begin, sums, sums + side_sums);
    }
  }
}

void linear_rounded(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const Linear*>(arguments);
  switch (tpc::bits_of(a.format)) {
    case 4: return linear_rounded_of<4>(a, first, last, scratch);
    case 5: return linear_rounded_of<5>(a, first, last, scratch);
    case 6: return linear_rounded_of<6>(a, first, last, scratch);
    default: return linear_rounded_of<8>(a, first, last, scratch);
  }
}

}  // namespace
