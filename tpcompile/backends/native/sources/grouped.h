// Dot products with weights of few bits, whose columns share scales in groups.
//
// Included by dots.h. Weights are integers, and an arithmetic says what values are. Integers of 16 or
// 8 bits have a common factor in each block of columns, so that the sum of a block is exact in 32
// bits. A block is a group, or 128 columns of a wider one, less the columns of other leaves and
// ranks. Its sum is multiplied by its factor and its scale in fp32. 16 lanes add these products, each
// those of every 16th block, and a fixed tree adds the lanes. So a result does not depend on the
// batch, on the rows of the instruction, or on the worker.
//
// Weights are loaded 64 bytes at a time, which begin at multiples of 64 bytes of the whole row. The
// integers of a load are taken apart by shifts and masks: if values have 16 bits, into the first ones
// of all lanes of 16 bits, then the second ones, and so on. Values are laid out in this order.

constexpr int64_t kLoad = 64;

// How far ahead of the loads rows are fetched into the second cache.
constexpr int64_t kFarAhead = 1 << 14;

// The columns of a load of integers of `kBits` bits.
template <int kBits>
constexpr int64_t kColumns = 8 * kLoad / kBits;

// Rows of integers of 8 or 4 bits.
class Grouped {
 public:
  Grouped(const Memory& memory, int32_t weight) {
    const tpc_buffer& buffer = memory.buffers[weight];
    bits_ = tpc::kind_of(buffer.format) == TPC_KIND_INT4 ? 4 : 8;
    first_ = begin_ = buffer.first;
    row_ = reinterpret_cast<const char*>(buffer.address);
    const int64_t columns = buffer.shape[1];
    rows_ = buffer.shape[0];
    stride_ = bits_ == 8 ? columns : (columns + 7) / 8 * 4;
    scales_ = reinterpret_cast<const char*>(buffer.scales);
    offsets_ = reinterpret_cast<const int8_t*>(buffer.offsets);
    scale_type_ = tpc::scales_of(buffer.format);
    const int64_t group = tpc::group_of(buffer.format);
    group_ = group ? group : INT64_MAX;
    first_group_ = first_ / group_;
    groups_ = (first_ + columns - 1) / group_ + 1 - first_group_;
  }

  // The rows from one on. Leaves choose their columns.
  TPC_INLINE Grouped from(int64_t row, int64_t column) const {
    Grouped found = *this;
    found.row_ += row * stride_;
    found.rows_ -= row;
    found.scales_ += row * groups_ * scale_bytes();
    if (offsets_) found.offsets_ += row * groups_;
    found.begin_ += column;
    return found;
  }

  TPC_INLINE const char* address(int64_t row) const { return row_ + row * stride_; }

  TPC_INLINE int64_t stride() const { return stride_; }

  // The column with which sums begin, among those of the whole weight.
  int64_t begin() const { return begin_; }

  int bits() const { return bits_; }

  int64_t block() const { return group_ < kMostBlock ? group_ : kMostBlock; }

  // The bytes from the start of a row to a column at a multiple of a load, maybe before the row.
  int64_t offset(int64_t column) const { return (column - first_) * bits_ / 8; }

  // The scales and offsets of a register of blocks from a block on.
  TPC_INLINE Register scales(int64_t row, int64_t block) const {
    if (scale_type_ == TPC_DTYPE_BF16)
      return of_blocks(reinterpret_cast<const bf16*>(scales_), row, block);
    if (scale_type_ == TPC_DTYPE_F16)
      return of_blocks(reinterpret_cast<const f16*>(scales_), row, block);
    return of_blocks(reinterpret_cast<const f32*>(scales_), row, block);
  }

  TPC_INLINE IntRegister offsets(int64_t row, int64_t block) const {
    return offsets_ ? of_blocks(offsets_, row, block) : IntRegister{};
  }

  bool has_offsets() const { return offsets_; }

  void fetch_scales(int64_t row) const {
    __builtin_prefetch(scales_ + row * groups_ * scale_bytes());
  }

 private:
  int64_t scale_bytes() const { return scale_type_ == TPC_DTYPE_F32 ? 4 : 2; }

  // The numbers of a register of blocks, of those that begin at `first`; 0 after a row.
  template <class S>
  TPC_INLINE auto of_blocks(const S* first, int64_t row, int64_t block) const
      -> decltype(load_register(first)) {
    using Found = decltype(load_register(first));
    const S* own = first + row * groups_;
    if (groups_ == 1) return Found{} + number(own);
    const int64_t group = block - first_group_, left = groups_ - group;
    if (group_ <= kMostBlock && group >= 0) {
      if (left >= kRegister) return load_register(own + group);
      if ((rows_ - row) * groups_ - group >= kRegister)
        return first_lanes(load_register(own + group), left);
    }
    return one_by_one(own, block);
  }

  template <class S>
  [[gnu::noinline]] auto one_by_one(const S* own, int64_t first) const
      -> decltype(load_register(own)) {
    decltype(load_register(own)) found{};
    for (int lane = 0; lane < kRegister; ++lane) {
      const int64_t column = (first + lane) * block();
      const int64_t group = (column > first_ ? column : first_) / group_ - first_group_;
      if (group < groups_) found[lane] = number(own + group);
    }
    return found;
  }

  const char *row_, *scales_;
  const int8_t* offsets_;  // null if there are none
  int64_t rows_, stride_, first_, begin_, group_, first_group_, groups_, scale_type_;
  int bits_;
};

// Copy `count` bytes from place `at` on, which may begin before a row or end after it. Others are 0.
inline void copy_inside(const char* row, int64_t bytes, int64_t at, int64_t count, char* to) {
  const int64_t low = at < 0 ? 0 : at, high = at + count < bytes ? at + count : bytes;
  std::memset(to, 0, static_cast<size_t>(count));
  if (low < high) std::memcpy(to + (low - at), row + low, static_cast<size_t>(high - low));
}

#include "grouped_arithmetic.h"
#include "grouped_values.h"

#include "grouped_rows.h"

#include "grouped_panels.h"

// Multiply rows by all sequences.
template <class A, int kBits, int kLoads, int kBlocks>
inline void grouped_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                         int64_t out_stride, Scratch& scratch) {
  auto run = x.leaves == 1 ? grouped_rows<A, kBits, kLoads, kBlocks>
                           : grouped_leaves<A, kBits, kLoads, kBlocks>;
  // Rows that stay in the nearest cache serve one sequence after the other.
  int64_t kept = x.batch == 1 ? rows : rows_ahead(weight.stride());
#if defined(__AVX2__)
  if (x.side_by_side()) {
    run = grouped_side_by_side<A, kBits, kLoads, kBlocks>;
    kept = kept < kRegister ? kRegister : kept;
  }
#endif
  for (int64_t row = 0; row < rows; row += kept)
    for (int64_t b = 0; b < x.batch; ++b)
      run(weight.from(row, 0), rows - row < kept ? rows - row : kept, rows - row, x, b,
          out + row + b * out_stride, scratch);
}

template <class A, int kBits>
inline void grouped_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                         int64_t out_stride, Scratch& scratch) {
  if constexpr (!std::is_same_v<A, Wide>)
    if (x.batch >= kFewestInPanels)
      return panel_dots<A, kBits>(weight, rows, x, out, out_stride, scratch);
  constexpr int kWhole = kMostBlock / kColumns<kBits>;  // loads of the widest block
  if (weight.block() == 32)
    grouped_dots<A, kBits, 1, 4 / kWhole>(weight, rows, x, out, out_stride, scratch);
  else if (weight.block() == 64)
    grouped_dots<A, kBits, 1, 2 / kWhole>(weight, rows, x, out, out_stride, scratch);
  else
    grouped_dots<A, kBits, kWhole, 1>(weight, rows, x, out, out_stride, scratch);
}

template <class A>
[[gnu::noinline]] void dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                            int64_t out_stride, Scratch& scratch) {
  if (weight.bits() == 4)
    grouped_dots<A, 4>(weight, rows, x, out, out_stride, scratch);
  else
    grouped_dots<A, 8>(weight, rows, x, out, out_stride, scratch);
}
