// Dot products with weights of few bits, whose columns share scales in groups.
//
// Included by dots.h. Weights are integers, and an arithmetic defines the representation of values.
// Integers of 16 or 8 bits have a common factor in each block of columns, so that the sum of a
// block is exact in 32 bits. A block is a group, or 128 columns of a wider one, less the columns of
// other leaves and ranks. Its sum is multiplied by its factor and its scale in fp32. 16 lanes add
// these products, each lane those of every 16th block, and a fixed tree adds the lanes. So a result
// does not depend on the batch, on the rows of the instruction, or on the worker.
// Weights are loaded 64 bytes at a time, which begin at multiples of 64 bytes of the whole row. The
// integers of a load are taken apart by shifts and masks: if values have 16 bits, into the first
// integers of all lanes of 16 bits, then the second ones, and so on. Values are laid out in this
// order.

constexpr int64_t kLoad = 64;

// The bits of each integer that are loaded together, and those that are stored apart.
template <int kBits>
constexpr int kLow = kBits == 8 ? 8 : 4;
template <int kBits>
constexpr int kHigh = kBits - kLow<kBits>;

// The columns of a load of integers of `kBits` bits.
template <int kBits>
constexpr int64_t kColumns = 8 * kLoad / kLow<kBits>;

// Rows of integers of 8 or 4 bits, or of 5 or 6, of which the bits above four are apart.
class Grouped {
 public:
  Grouped(const Memory& memory, int32_t weight) {
    const tpc_buffer& buffer = memory.buffers[weight];
    bits_ = tpc::bits_of(buffer.format);
    first_ = begin_ = buffer.first;
    row_ = reinterpret_cast<const char*>(buffer.address);
    const int64_t columns = buffer.shape[1], last = first_ + columns - 1;
    rows_ = buffer.shape[0];
    stride_ = bits_ == 8 ? columns : (columns + 7) / 8 * 4;
    scales_ = reinterpret_cast<const char*>(buffer.scales);
    minima_ = reinterpret_cast<const char*>(buffer.minima);
    offsets_ = reinterpret_cast<const int8_t*>(buffer.offsets);
    scale_type_ = tpc::scales_of(buffer.format);
    const int64_t group = tpc::group_of(buffer.format);
    group_ = group ? group : INT64_MAX;
    first_group_ = first_ / group_;
    groups_ = last / group_ + 1 - first_group_;
    if (const int high = bits_ == 8 ? 0 : bits_ - 4) {
      const int64_t per_word = 32 / high;
      high_ = reinterpret_cast<const char*>(buffer.high);
      high_stride_ = (last / per_word + 1 - first_ / per_word) * 4;
      first_high_ = first_ / per_word * per_word;
    }
    if (tpc::has_supers(buffer.format)) {
      super_scales_ = reinterpret_cast<const f16*>(buffer.super_scales);
      super_minima_ = reinterpret_cast<const f16*>(buffer.super_minima);
      first_super_ = first_ / tpc::kSuper;
      super_shift_ = __builtin_ctzll(static_cast<uint64_t>(tpc::kSuper / group_));
      supers_ = last / tpc::kSuper + 1 - first_super_;
    }
  }

  // The rows from one on. Leaves choose their columns.
  TPC_INLINE Grouped from(int64_t row, int64_t column) const {
    Grouped part = *this;
    part.row_ += row * stride_;
    part.rows_ -= row;
    part.scales_ += row * groups_ * scale_bytes();
    if (minima_) part.minima_ += row * groups_ * scale_bytes();
    if (offsets_) part.offsets_ += row * groups_;
    if (high_) part.high_ += row * high_stride_;
    if (super_scales_) part.super_scales_ += row * supers_;
    if (super_minima_) part.super_minima_ += row * supers_;
    part.begin_ += column;
    return part;
  }

  TPC_INLINE const char* address(int64_t row) const { return row_ + row * stride_; }

  TPC_INLINE int64_t stride() const { return stride_; }

  // The first scale of a row.
  const char* scales_address(int64_t row) const { return scales_ + row * groups_ * scale_bytes(); }

  // The column with which sums begin, among those of the whole weight.
  int64_t begin() const { return begin_; }

  int bits() const { return bits_; }

  int64_t block() const { return group_ < kMostBlock ? group_ : kMostBlock; }

  // The bytes from the start of a row to a column at a multiple of a load, maybe before the row.
  int64_t offset(int64_t column) const { return (column - first_) * (bits_ == 8 ? 8 : 4) / 8; }

  // The same of the bits that are apart, and where they are.
  int64_t high_offset(int64_t column) const { return (column - first_high_) * (bits_ - 4) / 8; }
  TPC_INLINE const char* high(int64_t row) const { return high_ + row * high_stride_; }
  TPC_INLINE int64_t high_stride() const { return high_stride_; }

  // Where a row has what belongs to its blocks from one on.
  struct Place {
    const char *scales, *minima;
    const f16 *super_scales, *super_minima;
  };

  TPC_INLINE Place place(int64_t row, int64_t block) const {
    const int64_t offset = (row * groups_ + block - first_group_) * scale_bytes();
    const int64_t super = row * supers_ + (block >> super_shift_) - first_super_;
    const auto of = [](auto* first, int64_t place) TPC_ALWAYS {
      return first ? first + place : nullptr;
    };
    return {scales_ + offset, of(minima_, offset), of(super_scales_, super),
            of(super_minima_, super)};
  }

  // Whether a row has so many blocks from one on, each with a scale. If there are superblocks, one
  // must begin there.
  bool has_blocks(int64_t block, int64_t count) const {
    const int64_t group = block - first_group_;
    const bool begins = !super_scales_ || (block & ((int64_t{1} << super_shift_) - 1)) == 0;
    return group_ <= kMostBlock && group >= 0 && group + count <= groups_ && begins;
  }

  // Whether blocks of a row have no scales of their own, but one together.
  bool has_row_scales() const { return groups_ == 1 && group_ > kMostBlock; }

  // How many of the first rows have scales of 16 bits, for each block of a run or for all of a row,
  // and nothing else, its loads, and memory for whole registers of scales.
  template <class Run>
  int64_t steady_rows(int64_t rows, const Run& run) const {
    const int64_t group = group_of(run.block), start = offset(run.start);
    const bool several = high_ || super_scales_ || minima_ || offsets_;
    if (several || scale_type_ == TPC_DTYPE_F32) return 0;
    if (start < 0 || start + run.loads * kLoad > stride_) return 0;
    if (has_row_scales()) return rows;
    if (group_ > kMostBlock || group < 0) return 0;
    const int64_t after = group + run.rounds * kLanes - groups_;  // the scales after a row
    const int64_t last = after <= 0 ? 0 : (after + groups_ - 1) / groups_;
    return rows_ - last < rows ? (rows_ > last ? rows_ - last : 0) : rows;
  }

  // Whether all rows have the superblocks of k-quants, with all blocks of a run and its loads.
  template <class Run>
  bool has_alike_supers(const Run& run) const {
    const int64_t start = offset(run.start), high_start = high_ ? high_offset(run.start) : 0;
    const int64_t high_bytes = high_ ? run.loads * kLoad * (bits_ - 4) / 4 : 0;
    return run.whole && super_blocks() == (has_minima() ? 8 : 16) && start >= 0 &&
           start + run.loads * kLoad <= stride_ && high_start >= 0 &&
           high_start + high_bytes <= high_stride_;
  }

  // The number of scales of a row, and that of the one of a block.
  int64_t groups() const { return groups_; }
  int64_t group_of(int64_t block) const { return block - first_group_; }

  int64_t scale_type() const { return scale_type_; }

  // The scales and minima of a register of such blocks, so many blocks after a place, without
  // superblocks.
  TPC_INLINE Register scales(const Place& place, int64_t after) const {
    if (scale_type_ == TPC_DTYPE_BF16)
      return load_register(reinterpret_cast<const bf16*>(place.scales) + after);
    if (scale_type_ == TPC_DTYPE_F32)
      return load_register(reinterpret_cast<const f32*>(place.scales) + after);
    return load_register(reinterpret_cast<const f16*>(place.scales) + after);
  }

  TPC_INLINE Register minima(const Place& place, int64_t after) const {
    return load_register(reinterpret_cast<const f16*>(place.minima) + after);
  }

  // The numbers of a register of blocks, times those of their superblocks, of `kEach` blocks each.
  // One superblock begins with the place.
  template <int kEach>
  static TPC_INLINE Register of_whole_supers(const char* small, const f16* supers, int64_t after) {
    const f16* first = supers + after / kEach;
    Register factors = everywhere(first);
    if constexpr (kRegister > kEach) factors = spliced(factors, everywhere(first + 1), kEach);
    return __builtin_convertvector(load_register(reinterpret_cast<const int8_t*>(small) + after),
                                   Register) *
           factors;
  }

  // The same, and offsets, of any register of blocks.
  TPC_INLINE Register scales(int64_t row, int64_t block) const {
    if (super_scales_) return of_supers(scales_, super_scales_, row, block);
    if (scale_type_ == TPC_DTYPE_BF16)
      return of_blocks(reinterpret_cast<const bf16*>(scales_), row, block);
    if (scale_type_ == TPC_DTYPE_F32)
      return of_blocks(reinterpret_cast<const f32*>(scales_), row, block);
    return of_blocks(reinterpret_cast<const f16*>(scales_), row, block);
  }

  // What is added to the products of integers without a sign.
  TPC_INLINE Register minima(int64_t row, int64_t block) const {
    if (super_minima_) return -of_supers(minima_, super_minima_, row, block);
    return of_blocks(reinterpret_cast<const f16*>(minima_), row, block);
  }

  bool has_minima() const { return minima_; }
  bool has_supers() const { return super_scales_; }
  // The blocks of a superblock, or 0.
  int64_t super_blocks() const { return super_scales_ ? int64_t{1} << super_shift_ : 0; }

  TPC_INLINE IntRegister offsets(int64_t row, int64_t block) const {
    return offsets_ ? of_blocks(offsets_, row, block) : IntRegister{};
  }

  bool has_offsets() const { return offsets_; }

  // The number at a column of a row, rounded like those of `Format.decoded`.
  float number_at(int64_t row, int64_t column) const {
    const int64_t place = first_ + column, group = row * groups_ + place / group_ - first_group_;
    const int64_t super = row * supers_ + place / tpc::kSuper - first_super_;
    float scale = scale_number(group), least = 0.0f;
    if (super_scales_) scale *= number(super_scales_ + super);
    if (super_minima_) least = -number(super_minima_ + super) * static_cast<float>(minima_[group]);
    else if (minima_) least = number(reinterpret_cast<const f16*>(minima_) + group);
    const int32_t offset = offsets_ ? offsets_[group] : minima_ ? -(1 << (bits_ - 1)) : 0;
    float product = static_cast<float>(integer_at(row, column) - offset) * scale;
#if defined(__SSE2__)
    __asm__("" : "+x"(product));  // compilers would fuse it with the sum
#endif
    return minima_ ? product + least : product;
  }

  // Fetch what a row has beside its loads.
  TPC_INLINE void fetch_scales(int64_t row) const {
    __builtin_prefetch(scales_ + row * groups_ * scale_bytes());
    for (int64_t offset = 0; offset < high_stride_; offset += kLoad)
      __builtin_prefetch(high_ + row * high_stride_ + offset, 0, 2);
    if (scale_type_ <= TPC_DTYPE_F16) return;
    if (minima_) __builtin_prefetch(minima_ + row * groups_ * scale_bytes());
    if (super_scales_) __builtin_prefetch(super_scales_ + row * supers_);
    if (super_minima_) __builtin_prefetch(super_minima_ + row * supers_);
  }

 private:
  int32_t integer_at(int64_t row, int64_t column) const {
    const auto* octets = reinterpret_cast<const uint8_t*>(address(row));
    if (bits_ == 8) return static_cast<int8_t>(octets[column]);
    int32_t integer = octets[column / 2] >> column % 2 * 4 & 15;
    if (high_) {
      const int64_t apart = bits_ - 4, bit = (first_ + column - first_high_) * apart;
      const int32_t upper = static_cast<uint8_t>(high(row)[bit / 8]) >> bit % 8;
      integer |= (upper & ((1 << apart) - 1)) << 4;
    }
    return integer - (1 << (bits_ - 1));
  }

  float scale_number(int64_t group) const {
    if (super_scales_) return reinterpret_cast<const int8_t*>(scales_)[group];
    if (scale_type_ == TPC_DTYPE_BF16) return number(reinterpret_cast<const bf16*>(scales_) + group);
    if (scale_type_ == TPC_DTYPE_F32) return reinterpret_cast<const f32*>(scales_)[group];
    return number(reinterpret_cast<const f16*>(scales_) + group);
  }

  int64_t scale_bytes() const {
    return super_scales_ ? 1 : scale_type_ == TPC_DTYPE_F32 ? 4 : 2;
  }

  // The numbers of a register of blocks, times those of their superblocks.
  TPC_INLINE Register of_supers(const char* small, const f16* supers, int64_t row,
                                int64_t block) const {
    const int64_t group = block - first_group_, place = (block >> super_shift_) - first_super_;
    const int64_t blocks = int64_t{1} << super_shift_;
    const bool begins = (block & (blocks - 1)) == 0 || kRegister <= (-block & (blocks - 1));
    if (group < 0 || groups_ - group < kRegister || !begins)
      return of_any_supers(small, supers, row, block);
    const f16* first = supers + row * supers_ + place;
    Register factors = Register{} + number(first);
    if (kRegister > blocks) factors = spliced(factors, Register{} + number(first + 1), blocks);
    const auto* numbers = reinterpret_cast<const int8_t*>(small) + row * groups_ + group;
    return __builtin_convertvector(load_register(numbers), Register) * factors;
  }

  // The same where a row ends, or a leaf begins within a superblock.
  [[gnu::noinline]] Register of_any_supers(const char* small, const f16* supers, int64_t row,
                                           int64_t block) const {
    const f16* first = supers + row * supers_;
    const int64_t blocks = int64_t{1} << super_shift_;
    const auto factor_of = [&](int64_t index) TPC_ALWAYS {
      const int64_t place = (index >> super_shift_) - first_super_;
      return place >= 0 && place < supers_ ? number(first + place) : 0.0f;
    };
    Register factors = Register{} + factor_of(block);
    for (int64_t left = blocks - (block & (blocks - 1)); left < kRegister; left += blocks)
      factors = spliced(factors, Register{} + factor_of(block + left), left);
    return __builtin_convertvector(of_blocks(reinterpret_cast<const int8_t*>(small), row, block),
                                   Register) *
           factors;
  }

  // The numbers of a register of blocks, of those that begin at `first`; 0 after a row.
  template <class S>
  TPC_INLINE auto of_blocks(const S* first, int64_t row, int64_t block) const
      -> decltype(load_register(first)) {
    using Found = decltype(load_register(first));
    const S* numbers = first + row * groups_;
    if (groups_ == 1) return Found{} + number(numbers);
    const int64_t group = block - first_group_, left = groups_ - group;
    if (group_ <= kMostBlock && group >= 0) {
      if (left >= kRegister) return load_register(numbers + group);
      if ((rows_ - row) * groups_ - group >= kRegister)
        return first_lanes(load_register(numbers + group), left);
    }
    return one_by_one(numbers, block);
  }

  template <class S>
  [[gnu::noinline]] auto one_by_one(const S* numbers, int64_t first) const
      -> decltype(load_register(numbers)) {
    decltype(load_register(numbers)) values{};
    for (int lane = 0; lane < kRegister; ++lane) {
      const int64_t column = (first + lane) * block();
      const int64_t group = (column > first_ ? column : first_) / group_ - first_group_;
      if (group < groups_) values[lane] = number(numbers + group);
    }
    return values;
  }

  const char *row_, *scales_;
  const int8_t* offsets_;  // null if there are none, as of the following
  const char *minima_, *high_ = nullptr;
  const f16 *super_scales_ = nullptr, *super_minima_ = nullptr;
  int64_t rows_, stride_, first_, begin_, group_, first_group_, groups_, scale_type_;
  int64_t high_stride_ = 0, first_high_ = 0, first_super_ = 0, supers_ = 0;
  int bits_, super_shift_ = 0;  // the latter is the logarithm of the blocks of a superblock
};

inline Lanes numbers(const Grouped& rows, int64_t row, int64_t column, int64_t count) {
  Lanes values{};
  for (int64_t lane = 0; lane < kLanes && lane < count; ++lane)
    values[lane] = rows.number_at(row, column + lane);
  return values;
}

// Copy `count` bytes from `offset` on, which may begin before a row or end after it. Others are 0.
inline void copy_inside(const char* row, int64_t bytes, int64_t offset, int64_t count, char* out) {
  const int64_t low = offset < 0 ? 0 : offset;
  const int64_t high = offset + count < bytes ? offset + count : bytes;
  std::memset(out, 0, static_cast<size_t>(count));
  if (low < high) std::memcpy(out + (low - offset), row + low, static_cast<size_t>(high - low));
}

#include "grouped_arithmetic.h"
#include "grouped_values.h"

// Call `run` with constants: the bits of the weight, the loads of a sum of lanes, and its blocks.
template <int kBits, class Run>
TPC_INLINE void by_block(const Grouped& weight, const Run& run) {
  constexpr int kWhole = kMostBlock / kColumns<kBits>;  // loads of the widest block
  const auto with = [&](auto loads, auto blocks) TPC_ALWAYS {
    run(std::integral_constant<int, kBits>(), loads, blocks);
  };
  using One = std::integral_constant<int, 1>;
  if constexpr (kBits == 6) with(One(), std::integral_constant<int, 8>());
  else if (weight.block() == 32 || kBits == 5) with(One(), std::integral_constant<int, 4 / kWhole>());
  else if (weight.block() == 64) with(One(), std::integral_constant<int, 2 / kWhole>());
  else with(std::integral_constant<int, kWhole>(), One());
}

template <class Run>
TPC_INLINE void by_form(const Grouped& weight, const Run& run) {
  switch (weight.bits()) {
    case 4: return by_block<4>(weight, run);
    case 5: return by_block<5>(weight, run);
    case 6: return by_block<6>(weight, run);
    default: return by_block<8>(weight, run);
  }
}

#include "grouped_rows.h"

#include "grouped_panels.h"

#include "grouped_together.h"

// Multiply rows by all sequences.
template <class A>
inline void grouped_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                         int64_t out_stride, Scratch& scratch) {
  const RowForm<A> form = row_form<A>(weight);
  auto run = x.leaves == 1 ? grouped_rows<A> : grouped_leaves<A>;
  // Rows that stay in the nearest cache serve one sequence after the other.
  int64_t held = x.batch == 1 ? rows : rows_ahead(weight.stride());
#if defined(__AVX2__)
  if (x.side_by_side()) {
    run = grouped_side_by_side<A>;
    held = held < kRegister ? kRegister : held;
  }
#endif
  for (int64_t row = 0; row < rows; row += held)
    for (int64_t b = 0; b < x.batch; ++b)
      run(weight.from(row, 0), form, rows - row < held ? rows - row : held, rows - row, x, b,
          out + row + b * out_stride, scratch);
}

template <class A>
[[gnu::noinline]] void dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                            int64_t out_stride, Scratch& scratch) {
  int64_t done = 0;
#if defined(__AVX2__)
  by_form(weight, [&](auto bits, auto loads, auto blocks) {
    constexpr int kBits = decltype(bits)::value, kLoads = decltype(loads)::value;
    constexpr int kBlocks = decltype(blocks)::value;
    if constexpr (!std::is_same_v<A, Wide> && kHigh<kBits> == 0)
      done = dots_together<A, kBits, kLoads, kBlocks>(weight, rows, x, out, out_stride, scratch);
  });
  if (done == rows) return;
#endif
  const Grouped remaining = weight.from(done, 0);
  auto multiply = grouped_dots<A>;
  if constexpr (!std::is_same_v<A, Wide>)
    if (in_panels<A>(x.batch)) multiply = weight.bits() == 8 ? panel_dots<A, 8> : panel_dots<A, 4>;
  multiply(remaining, rows - done, x, out + done, out_stride, scratch);
}

// Arrange values of several sequences as products need them.
template <class A>
[[gnu::noinline]] void arrange(const Grouped& weight, LaidValues<A>& x, Scratch& scratch) {
  if constexpr (!std::is_same_v<A, Wide>) {
#if defined(__AVX2__)
    by_form(weight, [&](auto bits, auto loads, auto blocks) {
      constexpr int kBits = decltype(bits)::value, kLoads = decltype(loads)::value;
      constexpr int kBlocks = decltype(blocks)::value;
      if constexpr (kHigh<kBits> == 0)
        if (takes_together(weight, x))
          x.together = all_together<A, kBits, kLoads, kBlocks>(x, scratch);
    });
    if (x.together) return;
#endif
    if (in_panels<A>(x.batch)) add_panels(weight, x, scratch);
  }
}

template <class F>
inline Operand<F> operand(Sequences<F> values, int64_t batch, int64_t columns, int64_t leaves,
                          const Grouped& weight, Scratch& scratch) {
  Operand<F> x = laid_operand(values, batch, columns, leaves, weight, scratch);
  arrange(weight, x, scratch);
  return x;
}

// Return the values of some sequences, which stay where they are.
template <class F>
inline Operand<F> selected(const Operand<F>& x, const int64_t* sequences, int64_t count,
                           const Grouped& weight, Scratch& scratch) {
  using A = typename F::Arithmetic;
  Operand<F> selection = x;
  auto* runs = scratch.take<LaidRun<A>>(x.runs);
  for (int64_t run = 0; run < x.runs; ++run) {
    auto* values = scratch.take<Laid<A>>(count);
    for (int64_t n = 0; n < count; ++n) values[n] = x.laid[run].values[sequences[n]];
    runs[run] = x.laid[run], runs[run].values = values;
  }
  selection.batch = count, selection.laid = runs;
  arrange(weight, selection, scratch);
  return selection;
}

#if defined(__AVX2__)
// Add the products of blocks of rows with a single sequence to `products`, `[row][block]`.
template <class A>
[[gnu::noinline]] void add_block_products(const Grouped& weight, int64_t rows,
                                          const LaidValues<A>& x, float* products,
                                          Scratch& scratch) {
  add_block_products<A>(weight, row_form<A>(weight), rows, rows, x, 0, products, scratch);
}

// Store the sums over leaves of such products, which have a multiple of 16 rows.
template <class A>
[[gnu::noinline]] void store_leaf_sums(const LaidValues<A>& x, const float* products, int64_t rows,
                                       float* out, Scratch& scratch) {
  const LeafSums<A> sums(x, scratch);
  for (int64_t row = 0; row < rows; row += kRegister)
    sums.store(products + row * x.blocks(), rows - row < kRegister ? rows - row : kRegister,
               out + row);
}
#endif
