// Weights of 8-bit floating point, with a scale per group of columns or per row. Included by
// dots.h.
//
// The products of a group are added like those of a row of plain numbers. Their sums, still in
// lanes, are multiplied by the scale of the group, and added to the sums of the groups before it.

class Float8 {
 public:
  using Row = const uint8_t*;

  Float8(const Memory& memory, int32_t weight) {
    const tpc_buffer& buffer = memory.buffers[weight];
    const int64_t first = buffer.first;
    row_ = reinterpret_cast<Row>(buffer.address);
    stride_ = buffer.shape[1];
    scales_ = reinterpret_cast<const char*>(buffer.scales);
    scale_type_ = tpc::scales_of(buffer.format);
    group_ = tpc::group_of(buffer.format) ? tpc::group_of(buffer.format) : INT64_MAX;
    groups_ = (first + stride_ - 1) / group_ + 1 - first / group_;
    before_ = first % group_;
  }

  // The rows from one on, with their columns from one on.
  TPC_INLINE Float8 from(int64_t row, int64_t column) const {
    Float8 part = *this;
    part.row_ += row * stride_ + column;
    part.scales_ += (row * groups_ + (before_ + column) / group_) * scale_bytes();
    part.before_ = (before_ + column) % group_;
    return part;
  }

  TPC_INLINE Row row(int64_t row) const { return row_ + row * stride_; }

  TPC_INLINE const char* address(int64_t row) const {
    return reinterpret_cast<const char*>(this->row(row));
  }

  TPC_INLINE int64_t stride() const { return stride_; }

  static constexpr int64_t bytes(int64_t columns) { return columns; }

  // The columns of a group, the groups of a row, and the one that a column belongs to.
  int64_t group() const { return group_; }
  int64_t groups() const { return groups_; }
  int64_t group_of(int64_t column) const { return (before_ + column) / group_; }

  // The columns from one on that share its scale.
  int64_t left_of_group(int64_t column) const { return group_ - (before_ + column) % group_; }

  // The scales of `count` groups from one of a row on: where they are, or in fp32 at `held`.
  const float* scales(int64_t row, int64_t group, int64_t count, float* held) const {
    const char* first = scales_ + (row * groups_ + group) * scale_bytes();
    if (scale_type_ == TPC_DTYPE_F32) return reinterpret_cast<const f32*>(first);
    if (scale_type_ == TPC_DTYPE_BF16) convert(reinterpret_cast<const bf16*>(first), count, held);
    else convert(reinterpret_cast<const f16*>(first), count, held);
    return held;
  }

  TPC_INLINE void fetch_scales(int64_t row) const {
    __builtin_prefetch(scales_ + row * groups_ * scale_bytes());
  }

 private:
  int64_t scale_bytes() const { return scale_type_ == TPC_DTYPE_F32 ? 4 : 2; }

  Row row_;
  const char* scales_;
  int64_t stride_, group_, groups_, scale_type_;
  int64_t before_;  // the columns before the first one that share its scale
};

inline Lanes numbers(const Float8& rows, int64_t row, int64_t column, int64_t count) {
  Lanes values{};
  for (int64_t lane = 0; lane < kLanes && lane < count; ++lane) {
    uint8_t held[kRegister] = {rows.row(row)[column + lane]};
    float scale;
    values[lane] = float8(held)[0] * kFloat8 *
                   *rows.scales(row, rows.group_of(column + lane), 1, &scale);
  }
  return values;
}

// Load fewer numbers than a chunk.
template <class F>
TPC_INLINE typename F::Loaded some_float8(const uint8_t* row, int64_t column, int64_t count) {
  uint8_t held[F::kChunk] = {};
  std::memcpy(held, row + column, static_cast<size_t>(count));
  return F::weights(held, 0);
}

template <class T>
struct Form<T, Float8> : Form<f32, Plain<f32>> {
  using Weights = Float8;

  static TPC_INLINE Registers weights(const uint8_t* row, int64_t column) {
    Registers loaded;
    for (int part = 0; part < kRegisters; ++part)
      loaded.each[part] = float8(row + column + part * kRegister);
    return loaded;
  }
  static TPC_INLINE Registers large_weights(const LargeFloat8& large, const uint8_t* bytes) {
    Registers loaded;
    for (int part = 0; part < kRegisters; ++part)
      loaded.each[part] = large.load(bytes + part * kRegister);
    return loaded;
  }
  static TPC_INLINE Registers some_weights(const uint8_t* row, int64_t column, int64_t count) {
    return some_float8<Form>(row, column, count);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Form<bf16, Float8> : Form<bf16, Plain<bf16>> {
  using Weights = Float8;

  static TPC_INLINE __m512i weights(const uint8_t* row, int64_t column) {
    return float8_as_bf16(row + column);
  }
  static TPC_INLINE __m512i large_weights(const LargeFloat8& large, const uint8_t* bytes) {
    return large.load_bf16(bytes);
  }
  static TPC_INLINE __m512i some_weights(const uint8_t* row, int64_t column, int64_t count) {
    return some_float8<Form>(row, column, count);
  }
};
#endif

template <class T>
constexpr bool kWidens<T, Float8> = std::is_same_v<typename Form<T, Float8>::Value, float>;

// Increase the sums of even and odd chunks by the products of `kMany` columns, as `add_products`
// does.
template <class F, int kBatch>
TPC_INLINE void add_many(const LargeFloat8& large, const uint8_t* row, const char* ahead,
                         const typename F::Value* x, int64_t stride, Registers* even,
                         Registers* odd) {
  constexpr int64_t kChunk = F::kChunk;
  if (__builtin_expect(!large.are(row), 0)) {
    const auto many = std::integral_constant<int64_t, kMany>();
    return add_products<F, kBatch>(row, ahead, x, stride, many, even, odd);
  }
  for (int64_t line = 0; line < kMany; line += 64) __builtin_prefetch(ahead + line, 0, 2);
#pragma GCC unroll 4
  for (int64_t column = 0; column < kMany; column += 2 * kChunk) {
    const auto first = F::large_weights(large, row + column);
    const auto second = F::large_weights(large, row + column + kChunk);
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      const auto* sequence = x + b * stride + column;
      even[b] = F::add(even[b], first, F::values(sequence));
      odd[b] = F::add(odd[b], second, F::values(sequence + kChunk));
    }
  }
}

// Columns of a weight whose products have a sum of their own.
struct Leaf {
  int64_t first, columns;
  int64_t group, left;  // the group of the first column, and its columns from there on
};

// The rows that stay in the nearest cache while some sequences after others are multiplied by them.
constexpr int kFloat8Rows = 8;

// Some rows, as they are multiplied, and the places that loads read later.
struct Float8Rows {
  int64_t count, group;  // the columns of a group
  const uint8_t* first[kFloat8Rows];
  const char* ahead[kFloat8Rows];
  const float* scales[kFloat8Rows];
};

// Multiply rows by `kBatch` sequences: `out[leaf][sequence][row]`. Compilers would take several
// times as long for one function with this code for each number of sequences.
template <class F, int kBatch>
[[gnu::noinline]] void scaled_dots(const Float8Rows& rows, const Leaf* leaves, int64_t count,
                                   const typename F::Value* x, int64_t stride, float* out,
                                   int64_t leaf_stride, Sums& sums) {
  const LargeFloat8 large;
  for (int64_t row = 0; row < rows.count; ++row)
    for (int64_t number = 0; number < count; ++number) {
      const Leaf& leaf = leaves[number];
      Registers totals[kBatch] = {};
      const float* scale = rows.scales[row] + leaf.group;
      const int64_t end = leaf.first + leaf.columns;
      int64_t column = leaf.first;
      for (int64_t next = leaf.left; column < end; next = rows.group) {
        Registers even[kBatch] = {}, odd[kBatch] = {};
        const int64_t stop = next < end - column ? column + next : end;
        for (; column + kMany <= stop; column += kMany)
          add_many<F, kBatch>(large, rows.first[row] + column, rows.ahead[row] + column,
                              x + column, stride, even, odd);
        if (column < stop)
          add_products<F, kBatch>(rows.first[row] + column, rows.ahead[row] + column, x + column,
                                  stride, stop - column, even, odd);
        column = stop;
        const Register factor = everywhere(*scale++);
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b)
          for (int part = 0; part < kRegisters; ++part)
            totals[b].each[part] = multiply_add(
                totals[b].each[part], even[b].each[part] + odd[b].each[part], factor);
      }
#pragma GCC unroll 8
      for (int b = 0; b < kBatch; ++b) {
        for (Register& part : totals[b].each) part *= kFloat8;
        sums.add(totals[b], out + number * leaf_stride + b * kFloat8Rows + row);
      }
    }
}

inline const Leaf* leaves_of(const Float8& weight, int64_t columns, int64_t count,
                             Scratch& scratch) {
  Leaf* leaves = scratch.take<Leaf>(count);
  for (int64_t leaf = 0, first = 0; leaf < count; ++leaf) {
    const int64_t width = columns / count + (leaf < columns % count);
    leaves[leaf] = {first, width, weight.group_of(first), weight.left_of_group(first)};
    first += width;
  }
  return leaves;
}

template <class F>
inline Operand<F> operand(Sequences<F> values, int64_t batch, int64_t columns, int64_t leaves,
                          const Float8&, Scratch&) {
  return {values, batch, columns, leaves, nullptr};
}

#if defined(__AMX_BF16__)
#include "float8_tiles.h"
#endif

// Multiply rows by all sequences: `out[row + sequence * out_stride]`.
template <class F>
[[gnu::noinline]] void dots(const Float8& weight, int64_t rows, const Operand<F>& x, float* out,
                            int64_t out_stride, Scratch& scratch) {
#if defined(__AMX_BF16__)
  if constexpr (kHasTiles<F>)
    return float8_tile_dots(weight, rows, x, out, out_stride, scratch);
#endif
  Sums sums;
  const int64_t groups = weight.groups(), far = rows_ahead(weight.stride());
  const Leaf* leaves = leaves_of(weight, x.columns, x.leaves, scratch);
  float* terms = scratch.take<float>(x.leaves * x.batch * kFloat8Rows);
  float* held_scales = scratch.take<float>(groups * kFloat8Rows);
  for (int64_t first = 0; first < rows; first += kFloat8Rows) {
    const int64_t left = rows - first;
    Float8Rows panel{left < kFloat8Rows ? left : kFloat8Rows, weight.group(), {}, {}, {}};
    const float* scales = weight.scales(first, 0, panel.count * groups, held_scales);
    for (int64_t place = 0; place < panel.count; ++place) {
      const int64_t row = first + place;
      weight.fetch_scales(row + far);
      panel.first[place] = weight.row(row);
      panel.scales[place] = scales + place * groups;
      panel.ahead[place] =
          ahead_of(weight.address(row), weight.stride(), far, rows - row, scratch.next_weights);
    }
    in_runs<kOfRow>(x.batch, [&](auto together, int64_t b) TPC_ALWAYS {
      scaled_dots<F, decltype(together)::value>(
          panel, leaves, x.leaves, x.values.first + b * x.values.stride, x.values.stride,
          terms + b * kFloat8Rows, x.batch * kFloat8Rows, sums);
    });
    sums.flush();
    const int64_t stored = join_leaves(x, terms, x.batch * kFloat8Rows);
    for (int64_t leaf = 0; leaf < stored; ++leaf)
      for (int64_t b = 0; b < x.batch; ++b)
        std::memcpy(out + first + leaf * x.apart + b * out_stride,
                    terms + (leaf * x.batch + b) * kFloat8Rows,
                    sizeof(float) * static_cast<size_t>(panel.count));
  }
}
