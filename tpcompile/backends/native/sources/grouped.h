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

  // The scales of 16 blocks from a column on, and the offsets of the stored integers.
  TPC_INLINE Registers scales(int64_t row, int64_t column) const {
    const char* own = scales_ + row * groups_ * scale_bytes();
    if (scale_type_ == TPC_DTYPE_BF16) return of_blocks(reinterpret_cast<const bf16*>(own), column);
    if (scale_type_ == TPC_DTYPE_F16) return of_blocks(reinterpret_cast<const f16*>(own), column);
    return of_blocks(reinterpret_cast<const f32*>(own), column);
  }

  TPC_INLINE IntRegisters offsets(int64_t row, int64_t column) const {
    IntRegisters found{};
    if (offsets_) {
      int32_t held[kLanes] = {};
      const int8_t* own = offsets_ + row * groups_;
      for (int lane = 0; lane < kLanes; ++lane)
        if (const int64_t group = group_at(column, lane); group < groups_) held[lane] = own[group];
      found = load_ints(held);
    }
    const int32_t added = bits_ == 4 ? 8 : 0;  // to store them
    for (IntRegister& each : found.each) each += added;
    return found;
  }

  void fetch_scales(int64_t row) const {
    __builtin_prefetch(scales_ + row * groups_ * scale_bytes());
  }

 private:
  int64_t scale_bytes() const { return scale_type_ == TPC_DTYPE_F32 ? 4 : 2; }

  // The group of a block, among those of a row here.
  TPC_INLINE int64_t group_at(int64_t column, int lane) const {
    const int64_t at = column + lane * block();
    return (at > first_ ? at : first_) / group_ - first_group_;
  }

  template <class S>
  TPC_INLINE Registers of_blocks(const S* own, int64_t column) const {
    if (group_ <= kMostBlock && column >= first_) {
      const int64_t group = group_at(column, 0);
      return load_some_registers(own + group, groups_ - group);
    }
    float held[kLanes] = {};
    if (groups_ == 1) {
      for (float& each : held) each = number(own);
      return load_registers(held);
    }
    for (int lane = 0; lane < kLanes; ++lane)
      if (const int64_t group = group_at(column, lane); group < groups_)
        held[lane] = number(own + group);
    return load_registers(held);
  }

  const char *row_, *scales_;
  const int8_t* offsets_;  // null if there are none
  int64_t stride_, first_, begin_, group_, first_group_, groups_, scale_type_;
  int bits_;
};

// One part of a load: non-negative numbers of 4 bits, or signed ones of 8.
template <int kBits>
TPC_INLINE ShortRegisters part_of(ShortRegisters loaded, int number) {
  for (ShortRegister& each : loaded.each) {
    if constexpr (kBits == 4) {
      each = (ShortRegister)((WordRegister)each >> (4 * number));
      if (number < 3) each &= 15;
    } else {
      each = (number ? each : each << 8) >> 8;
    }
  }
  return loaded;
}

// Values as integers of 16 bits, of `kMost`, `kSome` or one sequence at a time.
struct Exact {
  static constexpr int kMost = 4, kSome = 2;
  using Value = int16_t;
  using Sum = int32_t;
  using Sums = IntRegisters;
  using Loaded = ShortRegisters;

  static TPC_INLINE Loaded load(const Value* from) { return load_shorts(from); }

  static TPC_INLINE Sums load_sums(const Sum* from) { return load_ints(from); }

  static TPC_INLINE Sums add(Sums total, ShortRegisters weight, const Loaded& x) {
    for (int own = 0; own < kRegisters; ++own)
      total.each[own] = multiply_add(total.each[own], weight.each[own], x.each[own]);
    return total;
  }

  static TPC_INLINE Registers less(Sums total, IntRegisters offsets, Sums sums) {
    for (int own = 0; own < kRegisters; ++own)
      total.each[own] -= offsets.each[own] * sums.each[own];
    return floats(total);
  }
};

// Values in fp32, those of even lanes before those of odd ones.
struct Wide {
  static constexpr int kMost = 1, kSome = 1;
  using Value = float;
  using Sum = float;
  using Sums = Registers;
  using Loaded = const float*;

  static TPC_INLINE Loaded load(const Value* from) { return from; }

  static TPC_INLINE Sums load_sums(const Sum* from) { return load_registers(from); }

  static TPC_INLINE Sums add(Sums total, ShortRegisters weight, Loaded x) {
    for (int own = 0; own < kRegisters; ++own) {
      const auto pairs = (IntRegister)weight.each[own];
      const Register even = __builtin_convertvector((pairs << 16) >> 16, Register);
      const Register odd = __builtin_convertvector(pairs >> 16, Register);
      const float* from = x + own * kRegister;
      total.each[own] = multiply_add(total.each[own], even, load_register(from));
      total.each[own] = multiply_add(total.each[own], odd, load_register(from + kLanes));
    }
    return total;
  }

  static TPC_INLINE Registers less(Sums total, IntRegisters offsets, Sums sums) {
    const Registers each = floats(offsets);
    for (int own = 0; own < kRegisters; ++own) total.each[own] -= each.each[own] * sums.each[own];
    return total;
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
};

template <int kBits>
TPC_INLINE Leaf leaf_of(const Grouped& weight, int64_t first, int64_t width) {
  constexpr int64_t kLeast = kColumns<kBits>;
  const int64_t each = weight.block() > kLeast ? weight.block() : kLeast;
  const int64_t begin = weight.begin() + first, end = begin + width, start = begin / each * each;
  return {begin, end, start, (end - start + each - 1) / each * (each / kLeast)};
}

TPC_INLINE float power_of_two(int32_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  return load_bytes<float>(&bits);
}

// Round values of a block to integers below 2^15 times a power of two, which is returned. `sum`
// becomes their sum. A block with a value that is not finite gets NaN.
TPC_INLINE float rounded_block(const float* x, int64_t block, IntLanes* whole, int32_t& sum) {
  BitLanes most{};
  for (int64_t at = 0; at < block; at += kLanes) {
    const BitLanes bits = (BitLanes)load(x + at) & 0x7fffffff;
    most = most > bits ? most : bits;
  }
  constexpr int32_t kMostBits = 14, kLargest = 100;
  const auto exponent = static_cast<int32_t>(greatest(most) >> 23);
  const int32_t needed = kMostBits + 127 - exponent, up = needed > kLargest ? kLargest : needed;
  const bool finite = exponent < 255;
  const float factor = finite ? power_of_two(up) : 0.0f;
  constexpr float kWhole = 3 << 22;  // sums with it have no binary places
  IntLanes total{};
  for (int64_t at = 0; at < block; at += kLanes) {
    const IntLanes found = (IntLanes)(load(x + at) * factor + kWhole) - (IntLanes)all(kWhole);
    total += found;
    whole[at / kLanes] = found;
  }
  sum = added(total);
  return finite ? power_of_two(-up) : std::numeric_limits<float>::quiet_NaN();
}

// Lay out 64 columns: 16 lanes of each part, or of both halves of each part.
template <int kBits>
TPC_INLINE void put_parts(const IntLanes* x, int16_t* to) {
  const auto one = [&](int at) { return load_ints(reinterpret_cast<const int32_t*>(x + at)); };
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
  IntLanes whole[kMostBlock / kLanes];
  for (int64_t column = 0; column < columns; column += block) {
    const int64_t own = (at + column) / block;
    factors[own] = rounded_block(x + column, block, whole + column / kLanes, sums[own]);
  }
  for (int64_t column = 0; column < columns; column += 4 * kLanes) {
    const int64_t place = at + column, within = place % kColumns<kBits>;
    put_parts<kBits>(whole + column / kLanes, values + (place - within) + within / kParts<kBits>);
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
template <class A, int kBits, int kLoads, int kBatch>
struct Blocks {
  struct Found {
    typename A::Sums each[kBatch];
  };

  const char *from, *ahead;  // of the first of these loads
  const Laid<A>* x;
  int64_t first;

  // The sums of each lane of a load, or of two.
  TPC_INLINE Found lanes_of(int sum) const {
    Found found{};
#pragma GCC unroll 2
    for (int load = sum * kLoads; load < (sum + 1) * kLoads; ++load) {
      __builtin_prefetch(ahead + load * kLoad, 0, 2);
      auto loaded = load_shorts(from + load * kLoad);
      keep(loaded);
#pragma GCC unroll 4
      for (int part = 0; part < kParts<kBits>; ++part) {
        const auto weight = part_of<kBits>(loaded, part);
        const int64_t place = (first + load) * kColumns<kBits> + 2 * kLanes * part;
#pragma GCC unroll 4
        for (int b = 0; b < kBatch; ++b)
          found.each[b] = A::add(found.each[b], weight, A::load(x[b].values + place));
      }
    }
    return found;
  }

  // Add adjacent lanes of `kOf` sums until 16 are left. Only the first `kUsed` have loads.
  template <int kOf, int kUsed>
  TPC_INLINE Found tree(int sum) const {
    if constexpr (kOf == 1) {
      return lanes_of(sum);
    } else {
      constexpr int kHalf = kOf / 2;
      Found found = tree<kHalf, (kUsed < kHalf ? kUsed : kHalf)>(sum), more{};
      if constexpr (kUsed > kHalf) more = tree<kHalf, kUsed - kHalf>(sum + kHalf);
      for (int b = 0; b < kBatch; ++b)
        found.each[b] = pairs_added(found.each[b], more.each[b]);
      return found;
    }
  }

  // The same with sums in memory: less code, for several sequences or values in fp32.
  template <int kOf, int kUsed>
  TPC_INLINE Found loop() const {
    Found found, held[kOf] = {};
#pragma GCC unroll 1
    for (int sum = 0; sum < kUsed; ++sum) held[sum] = lanes_of(sum);
#pragma GCC unroll 4
    for (int b = 0; b < kBatch; ++b) {
#pragma GCC unroll 1
      for (int left = kOf / 2; left > 0; left /= 2)
#pragma GCC unroll 1
        for (int sum = 0; sum < left; ++sum)
          held[sum].each[b] = pairs_added(held[2 * sum].each[b], held[2 * sum + 1].each[b]);
      found.each[b] = held[0].each[b];
    }
    return found;
  }

  template <int kOf, int kUsed>
  TPC_INLINE Found sums() const {
    if constexpr (kBatch == 1 && std::is_same_v<A, Exact>)
      return tree<kOf, kUsed>(0);
    else
      return loop<kOf, kUsed>();
  }
};

// Multiply a leaf of a row by `kBatch` sequences. Sums of lanes have `kLoads` loads and `kBlocks`
// blocks.
template <class A, int kBits, int kLoads, int kBlocks, int kBatch>
TPC_INLINE void leaf_dots(const Grouped& weight, int64_t row, const Leaf& leaf,
                          const Laid<A>* x, const char* ahead, Registers* totals) {
  constexpr int kSums = kLanes / kBlocks, kEach = kSums * kLoads;
  const int64_t start = weight.offset(leaf.start), stop = start + leaf.loads * kLoad;
  const char* bytes = weight.address(row);
  int64_t load = 0, place = 0;
  const auto add = [&](auto used, const char* from) {
    const Blocks<A, kBits, kLoads, kBatch> blocks{from, ahead + start + load * kLoad, x, load};
    const auto found = blocks.template sums<kSums, decltype(used)::value>();
    const int64_t column = leaf.start + load * kColumns<kBits>;
    const Registers scales = weight.scales(row, column);
    const IntRegisters offsets = weight.offsets(row, column);
#pragma GCC unroll 4
    for (int b = 0; b < kBatch; ++b) {
      Registers products = A::less(found.each[b], offsets, A::load_sums(x[b].sums + place));
      products = multiply(products, load_registers(x[b].factors + place));
      totals[b] = multiply_add(totals[b], products, scales);
    }
    load += kEach, place += kLanes;
  };
  using All = std::integral_constant<int, kSums>;
  using Half = std::integral_constant<int, kSums / 2>;
  for (int64_t at = start; at < stop; at += kEach * kLoad) {
    const int64_t end = stop - at > kEach * kLoad / 2 ? at + kEach * kLoad : at + kEach * kLoad / 2;
    const char* from = bytes + at;
    alignas(kLoad) char held[kEach * kLoad];
    if (at < 0 || end > weight.stride()) {  // keep to the bytes of the row
      const int64_t low = at < 0 ? 0 : at, high = end < weight.stride() ? end : weight.stride();
      std::memset(held, 0, sizeof held);
      if (low < high) std::memcpy(held + (low - at), bytes + low, static_cast<size_t>(high - low));
      from = held;
    }
    if (end - at == kEach * kLoad)
      add(All(), from);
    else
      add(Half(), from);
  }
}

// Multiply rows by `kBatch` sequences from `first` on.
template <class A, int kBits, int kLoads, int kBlocks, int kBatch>
[[gnu::noinline]] void grouped_rows(const Grouped& weight, int64_t rows, int64_t left,
                                    const LaidValues<A>& x, int64_t first, float* out,
                                    int64_t out_stride, Scratch& scratch) {
  Sums sums;
  float* terms = x.leaves == 1 ? nullptr : scratch.take<float>(x.leaves * kBatch);
  const int64_t far = (kFarAhead + weight.stride() - 1) / weight.stride();
  for (int64_t row = 0; row < rows; ++row) {
    const char* ahead = far < left - row || !scratch.next_weights
                            ? weight.address(row + far)
                            : scratch.next_weights + (far - left + row) * weight.stride();
    weight.fetch_scales(row + far);
    for (int64_t leaf = 0; leaf < x.leaves; ++leaf) {
      Registers totals[kBatch] = {};
      leaf_dots<A, kBits, kLoads, kBlocks, kBatch>(weight, row, x.laid[leaf].leaf,
                                            x.laid[leaf].values + first, ahead, totals);
      float* to = terms ? terms + leaf * kBatch : out + row + first * out_stride;
      for (int b = 0; b < kBatch; ++b)
        sums.add(lanes(totals[b]), to + b * (terms ? 1 : out_stride));
    }
    if (!terms) continue;
    sums.flush();
    fold_sums(terms, x.leaves, kBatch);
    for (int b = 0; b < kBatch; ++b) out[row + (first + b) * out_stride] = terms[b];
  }
  sums.flush();
}

// Multiply rows by all sequences. Rows that stay in the nearest cache serve several in turn.
template <class A, int kBits, int kLoads, int kBlocks>
inline void grouped_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x,
                         float* out, int64_t out_stride, Scratch& scratch) {
  const int64_t kept = x.batch <= 4 ? rows : rows_ahead(weight.stride());
  for (int64_t row = 0; row < rows; row += kept) {
    const int64_t count = rows - row < kept ? rows - row : kept;
    for (int64_t first = 0; first < x.batch;) {
      const auto run = [&](auto batch) {
        grouped_rows<A, kBits, kLoads, kBlocks, decltype(batch)::value>(
            weight.from(row, 0), count, rows - row, x, first, out + row, out_stride, scratch);
        first += batch;
      };
      const int64_t left = x.batch - first;
      if (left >= A::kMost) run(std::integral_constant<int, A::kMost>());
      else if (left >= A::kSome) run(std::integral_constant<int, A::kSome>());
      else run(std::integral_constant<int, 1>());
    }
  }
}

template <class A, int kBits>
inline void grouped_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                         int64_t out_stride, Scratch& scratch) {
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
