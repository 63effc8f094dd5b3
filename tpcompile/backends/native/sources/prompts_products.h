// Products of tokens and weights, in fp32. Each is a sum over its columns in order, so its bits
// depend on nothing but its operands. Included by prompts_kernels.h.
#pragma once

namespace {

// The tokens of a panel, in whole vectors.
TPC_INLINE int64_t panel_width(int64_t left) {
  return left < kPanel ? (left + kLanes - 1) / kLanes * kLanes : kPanel;
}

// The tokens that an item packs, in whole panels.
constexpr int64_t kItem = 64;

void pack_panels(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Linear*>(arguments);
  auto* packed = static_cast<Packed*>(a.packed);
  const int64_t end = last * kItem < a.tokens ? last * kItem : a.tokens;
  for (int64_t begin = first * kItem; begin < end; begin += kLanes) {
    const bf16* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane)
      rows[lane] = begin + lane < a.tokens ? at(a.x, begin + lane, 0) : nullptr;
    pack_rows(rows, a.columns, packed + begin * (a.columns / kColumns), kLanes);
  }
}

// The columns that are multiplied at a time: those of some rows stay in the nearest cache while
// the tokens of an item pass by.
constexpr int64_t kBlock = 256;

// The integers of 16 columns of a row as bytes, those of 4 bits without their offset of 8.
template <int kBits>
TPC_INLINE __m128i bytes_at(const char* row, int64_t column) {
  if constexpr (kBits == 8) return load_bytes<__m128i>(row + column);
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + column / 2));
  const __m128i low = _mm_set1_epi8(15), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), low);
  return _mm_unpacklo_epi8(_mm_and_si128(pairs, low), high);
}

template <int kBits>
TPC_INLINE __m128i integers_at(const char* row, int64_t column) {
  const __m128i integers = bytes_at<kBits>(row, column);
  return kBits == 8 ? integers : _mm_sub_epi8(integers, _mm_set1_epi8(8));
}

// The first integers as a register of numbers.
TPC_INLINE Register numbers_of(__m128i integers) {
#if defined(__AVX512F__)
  return (Register)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(integers));
#else
  return (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(integers));
#endif
}

// The map from signed integers of a group to numbers: minus `offset`, times `scale`, plus `least`.
struct Group {
  float offset, scale, least;

  template <class V>
  TPC_INLINE V of(V integers) const {
    return multiply_add(V{} + least, integers - offset, V{} + scale);
  }
};

// The groups of a row. What they need of a linear is read once: compilers would read it for each
// group, since what is written may be a part of it.
class Groups {
 public:
  TPC_INLINE Groups(const Linear& a, int64_t row)
      : scale_type_(tpc::scales_of(a.format)),
        first_(a.first),
        half_(static_cast<float>(1 << (tpc::bits_of(a.format) - 1))) {
    const int64_t scale_bytes = a.super_scales ? 1 : scale_type_ == TPC_DTYPE_F32 ? 4 : 2;
    scales_ = part(a.scales, row * a.groups * scale_bytes);
    minima_ = part(a.minima, row * a.groups * scale_bytes);
    offsets_ = part(a.offsets, row * a.groups);
    super_scales_ = part(a.super_scales, row * a.supers * int64_t{sizeof(f16)});
    super_minima_ = part(a.super_minima, row * a.supers * int64_t{sizeof(f16)});
  }

  // The group with this number, which has this column of the rank.
  TPC_INLINE Group at(int64_t group, int64_t column) const {
    const float offset = minima_ ? -half_ : offsets_ ? number_at<int8_t>(offsets_, group) : 0.0f;
    if (super_scales_) {
      const int64_t super = (first_ + column) / tpc::kSuper - first_ / tpc::kSuper;
      const auto times = [&](const char* small, const char* supers) TPC_ALWAYS {
        return number_at<f16>(supers, super) * number_at<int8_t>(small, group);
      };
      return {offset, times(scales_, super_scales_),
              minima_ ? -times(minima_, super_minima_) : 0.0f};
    }
    const float scale = scale_type_ == TPC_DTYPE_BF16  ? number_at<bf16>(scales_, group)
                        : scale_type_ == TPC_DTYPE_F32 ? number_at<f32>(scales_, group)
                                                       : number_at<f16>(scales_, group);
    return {offset, scale, minima_ ? number_at<f16>(minima_, group) : 0.0f};
  }

 private:
  static TPC_INLINE const char* part(const void* first, int64_t bytes) {
    return first ? static_cast<const char*>(first) + bytes : nullptr;
  }

  template <class S>
  static TPC_INLINE float number_at(const char* first, int64_t place) {
    return static_cast<float>(number(reinterpret_cast<const S*>(first) + place));
  }

  int64_t scale_type_, first_;
  float half_;
  const char *scales_, *minima_, *offsets_, *super_scales_, *super_minima_;
};

// The columns before a row whose highest bits are in the same 32-bit word as those of its first
// column.
TPC_INLINE int64_t columns_before(const Linear& a) {
  return a.high ? a.first % (32 / (tpc::bits_of(a.format) - 4)) : 0;
}

#if defined(__AVX512BF16__)
// Look up 32 columns at a time among the 16 values of a group. Return the first remaining column.
TPC_INLINE int64_t look_up(const char* row, int64_t column, int64_t end, const Group& group,
                           Packed*& held) {
  const Lanes integers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  const __m512i values = _mm512_castsi256_si512(narrow(group.of(integers)));
  const __m512i low = _mm512_set1_epi32(0x000f000f);
  for (; column + 32 <= end; column += 32, held += 32 / kColumns) {
    const __m512i pairs = _mm512_cvtepu8_epi32(load_bytes<__m128i>(row + column / 2));
    const __m512i places = (pairs | _mm512_slli_epi32(pairs, 12)) & low;
    const __m512i numbers = _mm512_permutexvar_epi16(places, values);
    std::memcpy(held, &numbers, sizeof numbers);
  }
  return column;
}
#endif

// The integers of 16 columns of a row, whose highest bits are apart. The places of `high` begin
// with a column before the row.
template <int kBits>
TPC_INLINE __m128i integers_at(const char* row, const char* high, int64_t column, int64_t before) {
  if constexpr (kBits == 4 || kBits == 8) {
    return integers_at<kBits>(row, column);
  } else {
    constexpr int kHigh = kBits - 4;
    // A column that begins 16 begins a byte.
    uint32_t bits = 0;
    std::memcpy(&bits, high + (column + before) * kHigh / 8, kLanes * kHigh / 8);
    IntLanes places;
    for (int lane = 0; lane < kLanes; ++lane) places[lane] = lane * kHigh;
    typedef int8_t Octets __attribute__((vector_size(kLanes)));
    const IntLanes upper =
        ((IntLanes{} + static_cast<int32_t>(bits)) >> places) & ((1 << kHigh) - 1);
    const __m128i low = bytes_at<4>(row, column);
    const auto whole = _mm_or_si128(low, (__m128i)__builtin_convertvector(upper << 4, Octets));
    return _mm_sub_epi8(whole, _mm_set1_epi8(1 << (kBits - 1)));
  }
}

// Write the columns from `column` to `end` of a row, which share a scale, to `held`.
template <int kBits>
TPC_INLINE void hold_group(const char* row, const char* high, int64_t before, int64_t column,
                           int64_t end, const Group& group, Packed* held) {
#if defined(__AVX512BF16__)
  if constexpr (kBits == 4) column = look_up(row, column, end, group, held);
#endif
  for (; column < end; column += kLanes, held += kLanes / kColumns) {
    const __m128i integers = integers_at<kBits>(row, high, column, before);
    hold(group.of(numbers_of(integers)), held);
    if constexpr (kRegister < kLanes)
      hold(group.of(numbers_of(_mm_srli_si128(integers, kRegister))), held + kRegister / kColumns);
  }
}

// The same of 8-bit floating point.
inline void hold_floats(const char* row, const char*, int64_t, int64_t column, int64_t end,
                        const Group& group, Packed* held) {
  for (; column < end; column += kRegister, held += kRegister / kColumns)
    hold(float8(reinterpret_cast<const uint8_t*>(row) + column) * (group.scale * kFloat8), held);
}

// The same for the columns from `first` to `last` of a row of several groups. Groups and blocks have
// multiples of 16 columns.
template <auto kHoldGroup>
void hold_row(const Linear& a, int64_t row, int64_t first, int64_t last, Packed* held) {
  const char* bytes = static_cast<const char*>(a.weight) + row * a.row_bytes;
  const char* high = static_cast<const char*>(a.high) + row * a.high_bytes;
  const int64_t width = tpc::group_of(a.format) ? tpc::group_of(a.format) : INT64_MAX;
  const int64_t before = columns_before(a);
  const Groups groups(a, row);
  int64_t group = (a.first + first) / width - a.first / width;
  int64_t left = width - (a.first + first) % width;
  for (int64_t column = first, end; column < last; column = end, left = width, ++group) {
    end = left < last - column ? column + left : last;
    kHoldGroup(bytes, high, before, column, end, groups.at(group, column),
               held + (column - first) / kColumns);
  }
}

TPC_INLINE const bf16* bf16_row(const Linear& a, int64_t row) {
  return static_cast<const bf16*>(a.weight) + row * a.columns;
}

// Write the columns from `first` to `last` of a row of any weight.
TPC_INLINE void hold_columns(const Linear& a, int64_t row, int64_t first, int64_t last,
                             Packed* held) {
  if (a.scales == nullptr) {
    hold(bf16_row(a, row) + first, last - first, held);
    return;
  }
  const int bits = tpc::bits_of(a.format);
  const auto run = tpc::kind_of(a.format) == TPC_KIND_FP8 ? hold_row<hold_floats>
                   : bits == 4                            ? hold_row<hold_group<4>>
                   : bits == 5                            ? hold_row<hold_group<5>>
                   : bits == 6                            ? hold_row<hold_group<6>>
                                                          : hold_row<hold_group<8>>;
  run(a, row, first, last, held);
}

// Some rows of the result, and some tokens. Items of the same tokens follow one another, so that
// packed tokens stay in the second-level cache.
struct Item {
  int64_t row, rows, token, end;
};

TPC_INLINE Item item_of(const Linear& a, int64_t number) {
  const int64_t parts = (a.rows + a.part_rows - 1) / a.part_rows;
  const int64_t row = number % parts * a.part_rows, token = number / parts * a.part_tokens;
  const int64_t rows = a.rows - row, tokens = a.tokens - token;
  return {row, rows < a.part_rows ? rows : a.part_rows, token,
          tokens < a.part_tokens ? a.tokens : token + a.part_tokens};
}

// Columns of some rows of the weight.
struct Block {
  int64_t row, rows, first, last;
};

// The columns from `first` on of an item's rows: of gates, or of the values that they multiply.
TPC_INLINE Block block_of(const Linear& a, const Item& item, int64_t side, int64_t first) {
  const int64_t last = first + kBlock < a.columns ? first + kBlock : a.columns;
  return {side * a.rows + item.row, item.rows, first, last};
}

// Write a block to an operand, its rows followed by zeros up to a multiple of kRows.
TPC_INLINE void hold_block(const Linear& a, const Block& block, Packed* held, int64_t stride) {
  int64_t row = 0;
  for (; row < block.rows; ++row)
    hold_columns(a, block.row + row, block.first, block.last, held + row * stride);
  const auto bytes = sizeof(Packed) * static_cast<size_t>((block.last - block.first) / kColumns);
  for (; row % kRows; ++row) std::memset(held + row * stride, 0, bytes);
}

// Fetch kStrip rows of a block of few bits.
TPC_INLINE void fetch_rows(const Linear& a, const Block& block, int64_t row) {
  const int64_t bits = tpc::bits_of(a.format) == 8 ? 8 : 4;
  for (const int64_t end = row + kStrip; row < end && row < block.rows; ++row) {
    const char* values = static_cast<const char*>(a.weight) + (block.row + row) * a.row_bytes;
    for (int64_t byte = block.first * bits / 8; byte < block.last * bits / 8; byte += 64)
      __builtin_prefetch(values + byte, 0, 2);
  }
}

// Replace the sums of gates of a panel by results.
inline void apply_swiglu(const Linear& a, const Item& item, int64_t width, float* gates,
                         const float* others) {
  for (int64_t row = 0; row < item.rows; ++row) {
    const bf16* bias = a.bias ? from(a.bias) + item.row + row : nullptr;
    const float of_gate = bias ? number(bias) : 0.0f;
    const float of_other = bias ? number(bias + a.rows) : 0.0f;
    for (int64_t place = row * kPanel; place < row * kPanel + width; place += kLanes) {
      const Lanes gate = rounded(load(gates + place) + of_gate);
      store(gates + place, rounded(silu(gate)) * rounded(load(others + place) + of_other));
    }
  }
}

// Write the sums of a panel, `[row][token]`, with the bias, or their SwiGLU. `others` are the sums
// that gates multiply.
inline void put_panel(const Linear& a, const Item& item, int64_t begin, float* sums,
                      const float* others) {
  const int64_t width = panel_width(item.end - begin);
  const uint16_t* bias = a.swiglu ? nullptr : a.bias;
  if (a.swiglu) apply_swiglu(a, item, width, sums, others);
  for (int64_t lane = 0; lane < width; lane += kLanes) {
    const int64_t left = item.end - begin - lane;
    int64_t row = 0;
#if defined(__AVX512BF16__)
    for (; row + 2 * kLanes <= item.rows; row += 2 * kLanes) {
      Lanes block[kLanes];
      load_pairs(sums + row * kPanel + lane, kPanel, bias ? from(bias) + item.row + row : nullptr,
                 block);
      transpose(block);
      for (int64_t line = 0; line < kLanes && line < left; ++line)
        std::memcpy(to(a.out, (begin + lane + line) * a.rows + item.row + row), block + line,
                    sizeof(Lanes));
    }
#endif
    for (; row < item.rows; row += kLanes) {
      const int64_t count = item.rows - row < kLanes ? item.rows - row : kLanes;
      const Lanes added = bias ? load_some(from(bias) + item.row + row, count) : Lanes{};
      Lanes block[kLanes];
      load_transposed(sums + row * kPanel + lane, kPanel, block);
      for (int64_t line = 0; line < kLanes && line < left; ++line)
        put_some(to(a.out, (begin + lane + line) * a.rows + item.row + row), block[line] + added,
                 count);
    }
  }
}

constexpr int64_t kHeldStride = kBlock / kColumns + kLanes;  // not a power of two

// Add the products of a block and the tokens of an item to sums, `[panel][row][token]`, which the
// first columns set. Meanwhile fetch the block that this thread probably decodes next.
inline void multiply_block(const Linear& a, const Item& item, const Block& block,
                           const Block& next, Packed* held, float* sums) {
  using Multiply = decltype(&multiply<1, false>);
  constexpr Multiply kFirst[] = {multiply<1, false>, multiply<2, false>, multiply<3, false>,
                                 multiply<4, false>};
  constexpr Multiply kOther[] = {multiply<1, true>, multiply<2, true>, multiply<3, true>,
                                 multiply<4, true>};
  const auto* run = block.first ? kOther : kFirst;
  const int64_t steps = a.columns / kColumns, first = block.first / kColumns;
  const auto* packed = static_cast<const Packed*>(a.packed) + first * kLanes;
  // Rows are copied if they must be decoded, or followed by zeros up to a multiple of kRows.
  const bool as_stored = !a.scales && block.rows % kRows == 0;
  const Packed* rows = as_stored ? as_packed(bf16_row(a, block.row) + block.first) : nullptr;
  const int64_t stride = rows ? steps : kHeldStride;
  if (!rows) {
    hold_block(a, block, held, stride);
    rows = held;
  }
  for (int64_t strip = 0; strip < block.rows; strip += kStrip) {
    const int64_t end = strip + kStrip < block.rows ? strip + kStrip : block.rows;
    if (a.scales) fetch_rows(a, next, strip);
    for (int64_t begin = item.token; begin < item.end; begin += kPanel)
      for (int64_t row = strip; row < end; row += kRows)
        run[panel_width(item.end - begin) / kLanes - 1](
            rows + row * stride, stride, packed + begin * steps, kLanes, kLanes * steps,
            block.last / kColumns - first,
            sums + (begin - item.token) * a.part_rows + row * kPanel, kPanel);
  }
}

void linear(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const Linear*>(arguments);
  const int64_t sides = a.swiglu ? 2 : 1, side_sums = a.part_rows * a.part_tokens;
  float* sums = scratch.take<float>(sides * side_sums);
  Packed* held = scratch.take<Packed>(a.part_rows * kHeldStride);
  [[maybe_unused]] const Tiles tiles;
  for (int64_t number = first; number < last; ++number) {
    const Item item = item_of(a, number), after = item_of(a, number + a.threads);
    for (int64_t column = 0; column < a.columns; column += kBlock)
      for (int64_t side = 0; side < sides; ++side) {
        Block next{};  // the rows of another item, unless it has the same ones
        if (column + kBlock < a.columns) next = block_of(a, item, side, column + kBlock);
        else if (after.row != item.row) next = block_of(a, after, side, 0);
        multiply_block(a, item, block_of(a, item, side, column), next, held,
                       sums + side * side_sums);
      }
    for (int64_t begin = item.token; begin < item.end; begin += kPanel) {
      float* panel = sums + (begin - item.token) * a.part_rows;
      put_panel(a, item, begin, panel, panel + side_sums);
    }
  }
}

}  // namespace
