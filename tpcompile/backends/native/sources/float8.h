// Weights of 8-bit floating point, with a scale per group of columns or per row. Included by dots.h.
//
// The products of a group are added like those of a row of plain numbers. Their sums, still in lanes,
// are multiplied by the scale of the group, and added to those of the groups before.

class Float8 {
 public:
  using Row = const uint8_t*;

  Float8(const Memory& memory, int32_t weight) {
    const tpc_buffer& buffer = memory.buffers[weight];
    first_ = begin_ = buffer.first;
    row_ = reinterpret_cast<Row>(buffer.address);
    stride_ = buffer.shape[1];
    scales_ = reinterpret_cast<const char*>(buffer.scales);
    scale_type_ = tpc::scales_of(buffer.format);
    group_ = tpc::group_of(buffer.format) ? tpc::group_of(buffer.format) : INT64_MAX;
    groups_ = (first_ + stride_ - 1) / group_ + 1 - first_ / group_;
  }

  // The rows from one on, with their columns from one on.
  TPC_INLINE Float8 from(int64_t row, int64_t column) const {
    Float8 found = *this;
    found.row_ += row * stride_ + column;
    found.scales_ += row * groups_ * scale_bytes();
    found.begin_ += column;
    return found;
  }

  TPC_INLINE Row row(int64_t row) const { return row_ + row * stride_; }

  TPC_INLINE const char* address(int64_t row) const {
    return reinterpret_cast<const char*>(this->row(row));
  }

  TPC_INLINE int64_t stride() const { return stride_; }

  static constexpr int64_t bytes(int64_t columns) { return columns; }

  // The columns from one on that share its scale.
  TPC_INLINE int64_t left_of_group(int64_t column) const {
    return group_ - (begin_ + column) % group_;
  }

  TPC_INLINE float scale(int64_t row, int64_t column) const {
    const int64_t at = row * groups_ + (begin_ + column) / group_ - first_ / group_;
    if (scale_type_ == TPC_DTYPE_F32) return number(reinterpret_cast<const f32*>(scales_) + at);
    if (scale_type_ == TPC_DTYPE_BF16) return number(reinterpret_cast<const bf16*>(scales_) + at);
    return number(reinterpret_cast<const f16*>(scales_) + at);
  }

  TPC_INLINE void fetch_scales(int64_t row) const {
    __builtin_prefetch(scales_ + row * groups_ * scale_bytes());
  }

 private:
  int64_t scale_bytes() const { return scale_type_ == TPC_DTYPE_F32 ? 4 : 2; }

  Row row_;
  const char* scales_;
  int64_t stride_, first_, begin_, group_, groups_, scale_type_;
};

inline Lanes numbers(const Float8& rows, int64_t row, int64_t column, int64_t count) {
  Lanes found{};
  for (int64_t own = 0; own < kLanes && own < count; ++own) {
    uint8_t held[kRegister] = {rows.row(row)[column + own]};
    found[own] = float8(held)[0] * kFloat8 * rows.scale(row, column + own);
  }
  return found;
}

// Load fewer numbers than a chunk.
template <class F>
TPC_INLINE typename F::Loaded some_float8(const uint8_t* row, int64_t at, int64_t count) {
  uint8_t held[F::kChunk] = {};
  std::memcpy(held, row + at, static_cast<size_t>(count));
  return F::weights(held, 0);
}

template <class T>
struct Form<T, Float8> : Form<f32, Plain<f32>> {
  using Weights = Float8;
  static constexpr float kScale = kFloat8;

  static TPC_INLINE Registers weights(const uint8_t* row, int64_t at) {
    Registers found;
    for (int own = 0; own < kRegisters; ++own) found.each[own] = float8(row + at + own * kRegister);
    return found;
  }
  static TPC_INLINE Registers some_weights(const uint8_t* row, int64_t at, int64_t count) {
    return some_float8<Form>(row, at, count);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Form<bf16, Float8> : Form<bf16, Plain<bf16>> {
  using Weights = Float8;
  static constexpr float kScale = 1.0f;

  static TPC_INLINE __m512i weights(const uint8_t* row, int64_t at) {
    return float8_as_bf16(row + at);
  }
  static TPC_INLINE __m512i some_weights(const uint8_t* row, int64_t at, int64_t count) {
    return some_float8<Form>(row, at, count);
  }
};
#endif

// Multiply one row by `kBatch` sequences.
template <class F, int kBatch>
TPC_INLINE void scaled_dots(const Float8& weight, int64_t row, const char* ahead,
                            const typename F::Value* x, int64_t stride, int64_t columns, float* out,
                            int64_t out_stride, Sums& sums) {
  Registers totals[kBatch] = {};
  for (int64_t at = 0, end; at < columns; at = end) {
    const int64_t left = weight.left_of_group(at);
    end = left < columns - at ? at + left : columns;
    Registers even[kBatch] = {}, odd[kBatch] = {};
    add_products<F, kBatch>(weight.row(row) + at, ahead + at, x + at, stride, end - at, even, odd);
    const float scale = weight.scale(row, at) * F::kScale;
    for (int b = 0; b < kBatch; ++b)
      for (int own = 0; own < kRegisters; ++own)
        totals[b].each[own] = multiply_add(totals[b].each[own], even[b].each[own] + odd[b].each[own],
                                           Register{} + scale);
  }
  for (int b = 0; b < kBatch; ++b) sums.add(lanes(totals[b]), out + b * out_stride);
}

template <class F>
inline Operand<F> operand(Sequences<F> values, int64_t batch, int64_t columns, int64_t leaves,
                          const Float8&, Scratch&) {
  return {values, batch, columns, leaves, nullptr};
}

// Multiply rows by all sequences: `out[row + sequence * out_stride]`.
template <class F>
[[gnu::noinline]] void dots(const Float8& weight, int64_t rows, const Operand<F>& x, float* out,
                            int64_t out_stride, Scratch& scratch) {
  Sums sums;
  float* terms = scratch.take<float>(x.leaves * x.batch);
  const int64_t each = x.columns / x.leaves, longer = x.columns % x.leaves;
  const int64_t far = rows_ahead(weight.stride());
  for (int64_t row = 0; row < rows; ++row) {
    const char* ahead =
        ahead_of(weight.address(row), weight.stride(), far, rows - row, scratch.next_weights);
    weight.fetch_scales(row + far);
    int64_t first = 0;
    for (int64_t leaf = 0; leaf < x.leaves; ++leaf) {
      const int64_t width = each + (leaf < longer);
      const Float8 own = weight.from(0, first);
      in_eights(x.batch, [&](auto count, int64_t b) TPC_ALWAYS {
        scaled_dots<F, decltype(count)::value>(own, row, ahead + first,
                                               x.values.first + first + b * x.values.stride,
                                               x.values.stride, width, terms + leaf * x.batch + b,
                                               1, sums);
      });
      first += width;
    }
    sums.flush();
    fold_sums(terms, x.leaves, x.batch);
    for (int64_t b = 0; b < x.batch; ++b) out[row + b * out_stride] = terms[b];
  }
}
