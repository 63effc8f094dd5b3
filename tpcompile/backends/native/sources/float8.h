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

  TPC_INLINE int64_t group() const { return group_; }

  // The columns that share the scale of the first one.
  TPC_INLINE int64_t left_of_group() const { return group_ - before_; }

  // The scale of a group of a row, counted from that of the first column.
  TPC_INLINE float scale(int64_t row, int64_t group) const {
    const int64_t place = row * groups_ + group;
    if (scale_type_ == TPC_DTYPE_F32) return number(reinterpret_cast<const f32*>(scales_) + place);
    if (scale_type_ == TPC_DTYPE_BF16)
      return number(reinterpret_cast<const bf16*>(scales_) + place);
    return number(reinterpret_cast<const f16*>(scales_) + place);
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
    values[lane] = float8(held)[0] * kFloat8 * rows.from(row, column + lane).scale(0, 0);
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
  static constexpr float kScale = kFloat8;

  static TPC_INLINE Registers weights(const uint8_t* row, int64_t column) {
    Registers loaded;
    for (int part = 0; part < kRegisters; ++part)
      loaded.each[part] = float8(row + column + part * kRegister);
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
  static constexpr float kScale = 1.0f;

  static TPC_INLINE __m512i weights(const uint8_t* row, int64_t column) {
    return float8_as_bf16(row + column);
  }
  static TPC_INLINE __m512i some_weights(const uint8_t* row, int64_t column, int64_t count) {
    return some_float8<Form>(row, column, count);
  }
};
#endif

template <class T>
constexpr bool kWidens<T, Float8> = std::is_same_v<typename Form<T, Float8>::Value, float>;

// The columns of a group in most checkpoints.
constexpr int64_t kUsualGroup = 128;

// Multiply one row by `kBatch` sequences. Compilers would take several times as long for one
// function with this code for each number of sequences.
template <class F, int kBatch>
[[gnu::noinline]] void scaled_dots(const Float8& weight, int64_t row, const char* ahead,
                                   const typename F::Value* x, int64_t stride, int64_t columns,
                                   float* out, int64_t out_stride, Sums& sums) {
  Registers totals[kBatch] = {};
  int64_t column = 0, group = 0;
  // Add the products of the next columns, which share a scale.
  const auto add = [&](auto count) TPC_ALWAYS {
    Registers even[kBatch] = {}, odd[kBatch] = {};
    add_products<F, kBatch>(weight.row(row) + column, ahead + column, x + column, stride, count,
                            even, odd);
    const float scale = weight.scale(row, group++) * F::kScale;
    for (int b = 0; b < kBatch; ++b)
      for (int part = 0; part < kRegisters; ++part)
        totals[b].each[part] =
            multiply_add(totals[b].each[part], even[b].each[part] + odd[b].each[part],
                         Register{} + scale);
    column += count;
  };
  const int64_t group_columns = weight.group(), left = weight.left_of_group();
  for (int64_t next = left; column < columns; next = group_columns)
    if (next == kUsualGroup && columns - column >= kUsualGroup)  // a constant is faster
      add(std::integral_constant<int64_t, kUsualGroup>());
    else
      add(next < columns - column ? next : columns - column);
  for (int b = 0; b < kBatch; ++b) sums.add(lanes(totals[b]), out + b * out_stride);
}

template <class F>
inline Operand<F> operand(Sequences<F> values, int64_t batch, int64_t columns, int64_t leaves,
                          const Float8&, Scratch&) {
  return {values, batch, columns, leaves, nullptr};
}

// Columns of a weight whose products have a sum of their own.
struct Leaf {
  Float8 weight;
  int64_t first, columns;
};

inline void find_leaves(const Float8& weight, int64_t columns, int64_t count, Leaf* leaves) {
  const int64_t least = columns / count, longer = columns % count;
  for (int64_t leaf = 0, first = 0; leaf < count; ++leaf) {
    const int64_t width = least + (leaf < longer);
    leaves[leaf] = {weight.from(0, first), first, width};
    first += width;
  }
}

// Multiply rows by all sequences: `out[row + sequence * out_stride]`.
template <class F>
[[gnu::noinline]] void dots(const Float8& weight, int64_t rows, const Operand<F>& x, float* out,
                            int64_t out_stride, Scratch& scratch) {
  Sums sums;
  const bool split = x.leaves > 1;
  float* terms = scratch.take<float>(x.leaves * x.batch);
  auto* leaves = scratch.take<Leaf>(x.leaves);
  find_leaves(weight, x.columns, x.leaves, leaves);
  const int64_t far = rows_ahead(weight.stride());
  for (int64_t row = 0; row < rows; ++row) {
    const char* ahead =
        ahead_of(weight.address(row), weight.stride(), far, rows - row, scratch.next_weights);
    weight.fetch_scales(row + far);
    for (int64_t number = 0; number < x.leaves; ++number) {
      const Leaf& leaf = leaves[number];
      in_runs<8>(x.batch, [&](auto count, int64_t b) TPC_ALWAYS {
        float* destination = split ? terms + number * x.batch + b : out + row + b * out_stride;
        scaled_dots<F, decltype(count)::value>(leaf.weight, row, ahead + leaf.first,
                                               x.values.first + leaf.first + b * x.values.stride,
                                               x.values.stride, leaf.columns, destination,
                                               split ? 1 : out_stride, sums);
      });
    }
    if (!split) continue;
    sums.flush();
    const int64_t stored = join_leaves(x, terms, x.batch);
    for (int64_t leaf = 0; leaf < stored; ++leaf)
      for (int64_t b = 0; b < x.batch; ++b)
        out[row + leaf * x.apart + b * out_stride] = terms[leaf * x.batch + b];
  }
  sums.flush();
}
