// Dot products with weights of few bits, whose columns share scales in groups.
//
// Included by dots.h. Weights are integers, and so are values: those of a block of columns have 16
// bits and a common power of two, so that their sums are exact in 32 bits. A block is a group, or
// 128 columns of a wider one, less the columns of other leaves and ranks. The sum of a block is
// multiplied by its power of two and its scale in fp32. 16 lanes add these products, each those of
// every 16th block, and a fixed tree adds the lanes. So a result does not depend on the batch, on
// the rows of the instruction, or on the worker.
//
// Weights are loaded 64 bytes at a time, which begin at multiples of 64 bytes of the whole row.
// Each lane of 16 bits has several columns: shifts give the first ones of all lanes, then the
// second ones. These are the parts of a load. Values are laid out in this order.

constexpr int64_t kLoad = 64, kMostBlock = 128;

// How far ahead of the loads rows are fetched into the second cache.
constexpr int64_t kFarAhead = 1 << 14;

// The parts and the columns of a load of integers of `kBits` bits.
template <int kBits>
constexpr int64_t kParts = 16 / kBits;
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

  // The scales of a register of blocks from a block on, and the offsets of the stored integers.
  TPC_INLINE Register scales(int64_t row, int64_t block) const {
    if (scale_type_ == TPC_DTYPE_BF16)
      return of_blocks(reinterpret_cast<const bf16*>(scales_), row, block);
    if (scale_type_ == TPC_DTYPE_F16)
      return of_blocks(reinterpret_cast<const f16*>(scales_), row, block);
    return of_blocks(reinterpret_cast<const f32*>(scales_), row, block);
  }

  TPC_INLINE IntRegister offsets(int64_t row, int64_t block) const {
    return (offsets_ ? of_blocks(offsets_, row, block) : IntRegister{}) + added();
  }

  bool has_offsets() const { return offsets_; }

  // What is added to integers to store them.
  int32_t added() const { return bits_ == 4 ? 8 : 0; }

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

// One part of a load: non-negative numbers of 4 bits, or signed ones of 8.
template <int kBits>
TPC_INLINE ShortRegister part_of(ShortRegister loaded, int number) {
  if constexpr (kBits == 8) return (number ? loaded : loaded << 8) >> 8;
  const auto found = (ShortRegister)((WordRegister)loaded >> (4 * number));
  return number < 3 ? found & 15 : found;
}

// Values as integers of 16 bits.
struct Exact {
  using Value = int16_t;
  using Sum = int32_t;
  using Sums = IntRegister;

  // Add products of a register of a part, whose values for all registers begin at `x`.
  static TPC_INLINE Sums add(Sums total, ShortRegister weight, const Value* x, int own) {
    return multiply_add(total, weight, load_shorts(x + 2 * own * kRegister));
  }

  // Return sums less their offsets, given the sums of values.
  static TPC_INLINE Register less(Sums total, IntRegister offsets, const Sum* sums) {
    total -= offsets * load_bytes<IntRegister>(sums);
    return __builtin_convertvector(total, Register);
  }
};

// Values in fp32, those of even lanes before those of odd ones.
struct Wide {
  using Value = float;
  using Sum = float;
  using Sums = Register;

  static TPC_INLINE Sums add(Sums total, ShortRegister weight, const Value* x, int own) {
    const auto pairs = (IntRegister)weight;
    const Register even = __builtin_convertvector((pairs << 16) >> 16, Register);
    const Register odd = __builtin_convertvector(pairs >> 16, Register);
    x += own * kRegister;
    total = multiply_add(total, even, load_register(x));
    return multiply_add(total, odd, load_register(x + kLanes));
  }

  static TPC_INLINE Register less(Sums total, IntRegister offsets, const Sum* sums) {
    return total - __builtin_convertvector(offsets, Register) * load_register(sums);
  }
};

// Products of values in T and weights of few bits. Values are laid out for each leaf, see below.
template <class T>
struct Form<T, Grouped> {
  using Weights = Grouped;
  using Value = float;
  using Arithmetic = Exact;
};

template <>
struct Form<f32, Grouped> {
  using Weights = Grouped;
  using Value = float;
  using Arithmetic = Wide;
};

// The values of a leaf, in the order of the parts of loads, and the factors and sums of blocks.
template <class A>
struct Laid {
  const typename A::Value* values;
  const float* factors;
  const typename A::Sum* sums;
};

// The columns of a leaf, among those of the whole weight, and the loads that have them.
struct Leaf {
  int64_t begin, end;
  int64_t start;  // the column with which the first load begins
  int64_t loads;  // whole sums of lanes: two loads if a block is wider than a load
  int64_t block;  // the first one
};

template <int kBits>
TPC_INLINE Leaf leaf_of(const Grouped& weight, int64_t first, int64_t width) {
  constexpr int64_t kLeast = kColumns<kBits>;
  const int64_t each = weight.block() > kLeast ? weight.block() : kLeast;
  const int64_t begin = weight.begin() + first, end = begin + width, start = begin / each * each;
  const int64_t loads = (end - start + each - 1) / each * (each / kLeast);
  return {begin, end, start, loads, start / weight.block()};
}

TPC_INLINE float power_of_two(int32_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  return load_bytes<float>(&bits);
}

// Round values of a block to integers below 2^15 times a power of two, which is returned. `sum`
// becomes their sum. A block with a value that is not finite gets NaN.
TPC_INLINE float rounded_block(const float* x, int64_t block, int32_t* whole, int32_t& sum) {
  BitRegister most{};
  for (int64_t at = 0; at < block; at += kRegister) {
    const BitRegister bits = (BitRegister)load_register(x + at) & 0x7fffffff;
    most = most > bits ? most : bits;
  }
  constexpr int32_t kMostBits = 14, kLargest = 100;
  const auto exponent = static_cast<int32_t>(greatest(most) >> 23);
  const int32_t needed = kMostBits + 127 - exponent, up = needed > kLargest ? kLargest : needed;
  const bool finite = exponent < 255;
  const float factor = finite ? power_of_two(up) : 0.0f;
  const Register places = Register{} + (3 << 22);  // sums with it have no binary places
  IntRegister total{};
  for (int64_t at = 0; at < block; at += kRegister) {
    const Register rounded = load_register(x + at) * factor + places;
    const IntRegister found = (IntRegister)rounded - (IntRegister)places;
    total += found;
    std::memcpy(whole + at, &found, sizeof found);
  }
  sum = added(total);
  return finite ? power_of_two(-up) : std::numeric_limits<float>::quiet_NaN();
}

// Lay out 64 columns: 16 lanes of each part, or of both halves of each part.
template <int kBits>
TPC_INLINE void put_parts(const int32_t* x, int16_t* to) {
  const auto one = [&](int at) { return load_ints(x + at * kLanes); };
  const auto a = one(0), b = one(1), c = one(2), d = one(3);
  if constexpr (kBits == 4) {
    const auto even = evens(a, b), later = evens(c, d), odd = odds(a, b), last = odds(c, d);
    narrow(evens(even, later), to), narrow(evens(odd, last), to + 32);
    narrow(odds(even, later), to + 64), narrow(odds(odd, last), to + 96);
  } else {
    narrow(evens(a, b), to), narrow(evens(c, d), to + 16);
    narrow(odds(a, b), to + 32), narrow(odds(c, d), to + 48);
  }
}

template <int kBits>
inline void lay_out(const float* x, int64_t columns, int64_t block, int64_t at, int16_t* values,
                    float* factors, int32_t* sums) {
  alignas(kLoad) int32_t whole[kMostBlock];
  for (int64_t column = 0; column < columns; column += block) {
    const int64_t own = (at + column) / block;
    factors[own] = rounded_block(x + column, block, whole + column, sums[own]);
  }
  for (int64_t column = 0; column < columns; column += 4 * kLanes) {
    const int64_t place = at + column, within = place % kColumns<kBits>;
    put_parts<kBits>(whole + column, values + (place - within) + within / kParts<kBits>);
  }
}

template <int kBits>
inline void lay_out(const float* x, int64_t columns, int64_t block, int64_t at, float* values,
                    float* factors, float* sums) {
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t place = at + column, own = place / block, within = place % kColumns<kBits>;
    if (place % block == 0) factors[own] = 1.0f, sums[own] = 0.0f;
    sums[own] += x[column];
    const int64_t lane = within / kParts<kBits>, part = within % kParts<kBits>;
    values[place - within + 2 * kLanes * part + lane % 2 * kLanes + lane / 2] = x[column];
  }
}

// Lay out the values of a leaf, which begin at `x`. Other columns of its loads are zeros.
template <int kBits, class A>
inline Laid<A> laid_out(const Grouped& weight, const float* x, Leaf leaf, Scratch& scratch) {
  const int64_t block = weight.block(), columns = leaf.loads * kColumns<kBits>;
  const int64_t blocks = (columns / block + kLanes - 1) / kLanes * kLanes;
  auto* values = scratch.take<typename A::Value>(blocks * block);
  std::memset(values + columns, 0,
              sizeof(typename A::Value) * static_cast<size_t>(blocks * block - columns));
  auto* factors = scratch.take<float>(blocks);
  auto* sums = scratch.take<typename A::Sum>(blocks);
  std::memset(factors, 0, sizeof(float) * static_cast<size_t>(blocks));
  std::memset(sums, 0, sizeof(float) * static_cast<size_t>(blocks));
  for (int64_t at = 0; at < columns; at += kMostBlock) {
    const int64_t left = columns - at, count = left < kMostBlock ? left : kMostBlock;
    const int64_t first = leaf.start + at, last = first + count;
    const float* from = x + (first - leaf.begin);
    float held[kMostBlock] = {};
    if (first < leaf.begin || last > leaf.end) {
      const int64_t low = first < leaf.begin ? leaf.begin : first;
      const int64_t high = last > leaf.end ? leaf.end : last;
      if (low < high)
        std::memcpy(held + (low - first), x + (low - leaf.begin),
                    sizeof(float) * static_cast<size_t>(high - low));
      from = held;
    }
    lay_out<kBits>(from, count, block, at, values, factors, sums);
  }
  return {values, factors, sums};
}

// A leaf, and its values of each sequence.
template <class A>
struct LaidLeaf {
  Leaf leaf;
  const Laid<A>* values;
};

// Values of all sequences, as rows of few bits are multiplied by them.
template <class A>
struct LaidValues {
  int64_t batch, leaves;
  const LaidLeaf<A>* laid;
};

template <class T>
struct Operand<Form<T, Grouped>> : LaidValues<typename Form<T, Grouped>::Arithmetic> {};

// Sums of one row for 16 blocks, whose loads begin with number `first`.
template <class A, int kBits, int kLoads>
struct Blocks {
  using Found = typename A::Sums;

  const char *from, *ahead;  // of the first of these loads
  const typename A::Value* x;

  // The sums of a register of a load, or of two.
  TPC_INLINE Found lanes_of(int number) const {
    const int sum = number / kRegisters, own = number % kRegisters;
    Found total{};
#pragma GCC unroll 2
    for (int load = sum * kLoads; load < (sum + 1) * kLoads; ++load) {
      if (own == 0) __builtin_prefetch(ahead + load * kLoad, 0, 2);
      auto loaded = load_shorts(from + load * kLoad + own * 4 * kRegister);
      keep(loaded);
#pragma GCC unroll 4
      for (int part = 0; part < kParts<kBits>; ++part)
        total = A::add(total, part_of<kBits>(loaded, part),
                       x + load * kColumns<kBits> + 2 * kLanes * part, own);
    }
    return total;
  }

  // Add adjacent lanes of `kOf` registers until one is left. Only the first `kUsed` have loads.
  template <int kOf, int kUsed>
  TPC_INLINE Found tree(int number) const {
    if constexpr (kUsed <= 0) {
      return Found{};
    } else if constexpr (kOf == 1) {
      return lanes_of(number);
#if defined(__AVX2__) && !defined(__AVX512F__)
    } else if constexpr (kOf == 4) {
      return in_order(fours<1, kUsed>(number));
    } else if constexpr (kOf == 8 || kOf == 16) {
      constexpr int kEach = kOf / 8;
      return halves_added(fours<kEach, kUsed>(number),
                          fours<kEach, kUsed - 4 * kEach>(number + 4 * kEach));
#endif
    } else {
      return pairs_added(tree<kOf / 2, kUsed>(number),
                         tree<kOf / 2, kUsed - kOf / 2>(number + kOf / 2));
    }
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // The sums of fours of lanes of four registers, each of which is a sum of `kEach`: one of the
  // lower halves of all, then one of the upper halves.
  template <int kEach, int kUsed>
  TPC_INLINE Found fours(int number) const {
    const auto one = [&](auto own) __attribute__((always_inline)) {
      constexpr int kLeft = kUsed - kEach * decltype(own)::value;
      const int first = number + kEach * own;
      const Found found = tree<1, kLeft>(first);
      return kEach == 1 ? found : found + tree<1, kLeft - 1>(first + 1);
    };
    const auto two = [&](auto low, auto high) __attribute__((always_inline)) {
      return (Found)_mm256_hadd_epi32((__m256i)one(low), (__m256i)one(high));
    };
    using std::integral_constant;
    const Found low = two(integral_constant<int, 0>(), integral_constant<int, 1>());
    const Found high = two(integral_constant<int, 2>(), integral_constant<int, 3>());
    return (Found)_mm256_hadd_epi32((__m256i)low, (__m256i)high);
  }
#endif

  // Return register `own` of the sums of blocks.
  template <int kSums, int kUsed, int kOwn>
  TPC_INLINE Found sums() const {
    constexpr int kFirst = kOwn * kSums;
    if constexpr (std::is_same_v<A, Exact>) {
      return tree<kSums, kUsed - kFirst>(kFirst);
    } else {  // in memory: less code
      Found held[kSums] = {};
#pragma GCC unroll 1
      for (int number = 0; number < kSums && kFirst + number < kUsed; ++number)
        held[number] = lanes_of(kFirst + number);
#pragma GCC unroll 1
      for (int left = kSums / 2; left > 0; left /= 2)
#pragma GCC unroll 1
        for (int at = 0; at < left; ++at)
          held[at] = pairs_added(held[2 * at], held[2 * at + 1]);
      return held[0];
    }
  }
};

// Call `run` with the number of each register of 16 lanes, as a constant.
template <class Run>
TPC_INLINE void each_register(const Run& run) {
  run(std::integral_constant<int, 0>());
  if constexpr (kRegisters > 1) run(std::integral_constant<int, 1>());
  if constexpr (kRegisters > 2) {
    run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 3>());
  }
}

// Multiply a leaf of a row by a sequence. Sums of lanes have `kLoads` loads and `kBlocks` blocks.
template <class A, int kBits, int kLoads, int kBlocks>
TPC_INLINE Lanes leaf_dots(const Grouped& weight, int64_t row, const Leaf& leaf, const Laid<A>& x,
                           const char* ahead) {
  constexpr int kSums = kLanes / kBlocks, kEach = kSums * kLoads;
  const int64_t start = weight.offset(leaf.start), stop = start + leaf.loads * kLoad;
  const char* bytes = weight.address(row);
  int64_t load = 0, place = 0;
  Register totals[kRegisters] = {};
  const auto add = [&](auto used, const char* from) {
    const Blocks<A, kBits, kLoads> blocks{from, ahead + start + load * kLoad,
                                          x.values + load * kColumns<kBits>};
    each_register([&](auto own) {
      constexpr int kOwn = decltype(own)::value, kUsed = decltype(used)::value * kRegisters;
      const int64_t own_place = place + kOwn * kRegister, block = leaf.block + own_place;
      const auto found = blocks.template sums<kSums, kUsed, kOwn>();
      const Register products = A::less(found, weight.offsets(row, block), x.sums + own_place);
      totals[kOwn] = multiply_add(totals[kOwn], products * load_register(x.factors + own_place),
                                  weight.scales(row, block));
    });
    load += kEach, place += kLanes;
  };
  using All = std::integral_constant<int, kSums>;
  using Half = std::integral_constant<int, kSums / 2>;
  for (int64_t at = start; at < stop; at += kEach * kLoad) {
    const int64_t end = stop - at > kEach * kLoad / 2 ? at + kEach * kLoad : at + kEach * kLoad / 2;
    const char* from = bytes + at;
    alignas(kLoad) char held[kEach * kLoad];
    if (at < 0 || end > weight.stride()) {  // keep to the bytes of the row
      copy_inside(bytes, weight.stride(), at, kEach * kLoad, held);
      from = held;
    }
    if (end - at == kEach * kLoad)
      add(All(), from);
    else
      add(Half(), from);
  }
  return load_bytes<Lanes>(totals);
}

// The rows in about `kFarAhead` bytes.
TPC_INLINE int64_t rows_far_ahead(const Grouped& weight) {
  return (kFarAhead + weight.stride() - 1) / weight.stride();
}

// The place `far` rows after a row, of which `left` rows are left: in this or in the next weight.
TPC_INLINE const char* far_ahead(const Grouped& weight, int64_t row, int64_t left, int64_t far,
                                 const Scratch& scratch) {
  if (far < left || !scratch.next_weights) return weight.address(row + far);
  return scratch.next_weights + (far - left) * weight.stride();
}

// Multiply rows by sequence `b`. The rows of the instruction from the first one on are `left`.
template <class A, int kBits, int kLoads, int kBlocks>
[[gnu::noinline]] void grouped_rows(const Grouped& weight, int64_t rows, int64_t left,
                                    const LaidValues<A>& x, int64_t b, float* out,
                                    Scratch& scratch) {
  Sums sums;
  float* terms = x.leaves == 1 ? nullptr : scratch.take<float>(x.leaves);
  const int64_t far = rows_far_ahead(weight);
  for (int64_t row = 0; row < rows; ++row) {
    const char* ahead = far_ahead(weight, row, left - row, far, scratch);
    weight.fetch_scales(row + far);
    for (int64_t leaf = 0; leaf < x.leaves; ++leaf) {
      const LaidLeaf<A>& own = x.laid[leaf];
      const auto total =
          leaf_dots<A, kBits, kLoads, kBlocks>(weight, row, own.leaf, own.values[b], ahead);
      sums.add(total, terms ? terms + leaf : out + row);
    }
    if (!terms) continue;
    sums.flush();
    fold_sums(terms, x.leaves, 1);
    out[row] = terms[0];
  }
  sums.flush();
}

#include "grouped_panels.h"

// Multiply rows by all sequences.
template <class A, int kBits, int kLoads, int kBlocks>
inline void grouped_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                         int64_t out_stride, Scratch& scratch) {
  // Rows that stay in the nearest cache serve one sequence after the other.
  const int64_t kept = x.batch == 1 ? rows : rows_ahead(weight.stride());
  for (int64_t row = 0; row < rows; row += kept)
    for (int64_t b = 0; b < x.batch; ++b)
      grouped_rows<A, kBits, kLoads, kBlocks>(weight.from(row, 0),
                                              rows - row < kept ? rows - row : kept, rows - row, x,
                                              b, out + row + b * out_stride, scratch);
}

template <class A, int kBits>
inline void grouped_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                         int64_t out_stride, Scratch& scratch) {
  if constexpr (std::is_same_v<A, Exact>)
    if (x.batch >= kFewestInPanels)
      return panel_dots<kBits>(weight, rows, x, out, out_stride, scratch);
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

// Lay out values for each leaf.
template <int kBits, class A>
inline const LaidLeaf<A>* laid_leaves(const Grouped& weight, const float* values, int64_t stride,
                                      int64_t batch, int64_t columns, int64_t leaves,
                                      Scratch& scratch) {
  auto* found = scratch.take<LaidLeaf<A>>(leaves);
  for (int64_t leaf = 0, first = 0; leaf < leaves; ++leaf) {
    const int64_t width = columns / leaves + (leaf < columns % leaves);
    const Leaf own = leaf_of<kBits>(weight, first, width);
    auto* each = scratch.take<Laid<A>>(batch);
    for (int64_t b = 0; b < batch; ++b)
      each[b] = laid_out<kBits, A>(weight, values + first + b * stride, own, scratch);
    found[leaf] = {own, each};
    first += width;
  }
  return found;
}

template <class A>
[[gnu::noinline]] LaidValues<A> laid_values(const Grouped& weight, const float* values,
                                            int64_t stride, int64_t batch, int64_t columns,
                                            int64_t leaves, Scratch& scratch) {
  const auto lay = weight.bits() == 4 ? laid_leaves<4, A> : laid_leaves<8, A>;
  return {batch, leaves, lay(weight, values, stride, batch, columns, leaves, scratch)};
}

template <class T>
inline Operand<Form<T, Grouped>> operand(Sequences<Form<T, Grouped>> values, int64_t batch,
                                         int64_t columns, int64_t leaves, const Grouped& weight,
                                         Scratch& scratch) {
  using A = typename Form<T, Grouped>::Arithmetic;
  return {laid_values<A>(weight, values.first, values.stride, batch, columns, leaves, scratch)};
}
