// Products of rows of few bits with one sequence. Included by grouped.h.

// Sums of one row for 16 blocks, whose loads begin with number `first`.
template <class A, int kBits, int kLoads>
struct Blocks {
  using Found = typename A::Sums;

  const char *from, *high, *ahead;  // of the first of these loads
  const typename A::Value* x;

  // The sums of a register of a load, or of two.
  TPC_INLINE Found lanes_of(int number) const {
    const int sum = number / kRegisters, own = number % kRegisters;
    Found total{};
#pragma GCC unroll 2
    for (int load = sum * kLoads; load < (sum + 1) * kLoads; ++load) {
      if (own == 0) __builtin_prefetch(ahead + load * kLoad, 0, 2);
      const int64_t place = load * kLoad + own * 4 * kRegister;
      auto loaded = load_shorts(from + place), more = load_high<A, kBits>(high + place * kHigh<kBits> / 4);
      keep(loaded);
      if constexpr (kHigh<kBits> != 0) keep(more);
#pragma GCC unroll 4
      for (int part = 0; part < kParts<A, kBits>; ++part) {
        const auto weight =
            with_high<A, kBits>(A::template part<kLow<kBits>>(loaded, part), more, part);
        const auto* values = x + load * kColumns<kBits> + kOfPart<A, kBits> * part;
        if constexpr (std::is_same_v<A, Wide>)
          total = Wide::add(total, weight, values + own * kRegister);
        else
          total = A::template multiply<kBits>(
              total, weight, load_shorts(values + own * kOfPart<A, kBits> / kRegisters));
      }
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
    const auto one = [&](auto own) TPC_ALWAYS {
      constexpr int kLeft = kUsed - kEach * decltype(own)::value;
      const int first = number + kEach * own;
      const Found found = tree<1, kLeft>(first);
      return kEach == 1 ? found : found + tree<1, kLeft - 1>(first + 1);
    };
    const auto two = [&](auto low, auto high) TPC_ALWAYS {
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
    if constexpr (!std::is_same_v<A, Wide>) {
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

// Multiply a run of a row by a sequence. `take` gets the products of 16 blocks, a register at a time,
// and their scales; then, if there are minima, the sums of values and the minima, which are the last
// ones of a register. Sums of lanes have `kLoads` loads and `kBlocks` blocks.
template <class A, int kBits, int kLoads, int kBlocks, class Take>
TPC_INLINE void run_dots(const Grouped& weight, int64_t row, const LaidRun<A>& run,
                         const Laid<A>& x, const char* ahead, const Take& take) {
  constexpr int kSums = kLanes / kBlocks, kEach = kSums * kLoads;
  const int64_t start = weight.offset(run.start), stop = start + run.loads * kLoad;
  [[maybe_unused]] const int64_t high_start = kHigh<kBits> ? weight.high_offset(run.start) : 0;
  const char* bytes = weight.address(row);
  const auto begin = run.whole ? weight.place(row, run.block) : Grouped::Place{};
  int64_t load = 0, place = 0;
  // Add the blocks of some sums of lanes, whose first load is at a byte of the row.
  const auto add = [&](auto used, int64_t at) {
    constexpr int kUsed = decltype(used)::value;
    const char* from = bytes + at;
    alignas(kLoad) char held[kUsed * kLoads * kLoad];
    if (at < 0 || at + int64_t{sizeof held} > weight.stride()) {  // keep to the bytes of the row
      copy_inside(bytes, weight.stride(), at, sizeof held, held);
      from = held;
    }
    constexpr int kHighBytes = kUsed * kLoads * static_cast<int>(kLoad) * kHigh<kBits> / 4;
    alignas(kLoad) char held_high[kHighBytes + 1];
    const char* high = nullptr;
    if constexpr (kHigh<kBits> != 0) {
      const int64_t place = high_start + load * (kLoad * kHigh<kBits> / 4);
      high = weight.high(row) + place;
      if (place < 0 || place + kHighBytes > weight.high_stride()) {
        copy_inside(weight.high(row), weight.high_stride(), place, kHighBytes, held_high);
        high = held_high;
      }
    }
    const Blocks<A, kBits, kLoads> blocks{from, high, ahead + at,
                                          x.values + load * kColumns<kBits>};
    each_register([&](auto own) {
      constexpr int kOwn = decltype(own)::value;
      const int64_t after = place + kOwn * kRegister, block = run.block + after;
      const auto found = blocks.template sums<kSums, kUsed * kRegisters, kOwn>();
      const Register factors = load_register(x.factors + after);
      const Register scales = run.whole ? weight.scales(begin, after) : weight.scales(row, block);
      if (!weight.has_minima()) {
        IntRegister offsets = IntRegister{} + A::template kRaised<kBits>;
        if (weight.has_offsets()) offsets += weight.offsets(row, block);
        const Register products = A::less(found, offsets, x.sums + after) * factors;
        return take(own, place / kLanes, products, scales, std::false_type());
      }
      take(own, place / kLanes, A::numbers(found) * factors, scales, std::false_type());
      take(own, place / kLanes, load_register(x.minima + after),
           run.whole ? weight.minima(begin, after) : weight.minima(row, block), std::true_type());
    });
    load += kEach, place += kLanes;
  };
  // The fewest sums that have all loads which are left.
  for (int64_t at = start; at < stop; at += kEach * kLoad) {
    const int64_t sums = (stop - at) / (kLoads * kLoad);
    if (2 * sums > kSums) add(std::integral_constant<int, kSums>(), at);
    else if (4 * sums > kSums) add(std::integral_constant<int, kSums / 2>(), at);
    else if (8 * sums > kSums) add(std::integral_constant<int, kSums / 4>(), at);
    else add(std::integral_constant<int, kSums < 8 ? 1 : kSums / 8>(), at);
  }
}

// The rows in about `kFarAhead` bytes.
TPC_INLINE int64_t rows_far_ahead(const Grouped& weight) {
  return (kFarAhead + weight.stride() - 1) / weight.stride();
}

#include "grouped_steady.h"

// Multiply rows by sequence `b`. The rows of the instruction from the first one on are `left`.
template <class A, int kBits, int kLoads, int kBlocks>
[[gnu::noinline]] void grouped_rows(const Grouped& weight, int64_t rows, int64_t left,
                                    const LaidValues<A>& x, int64_t b, float* out,
                                    Scratch& scratch) {
  Sums sums;
  Register steady[kRegisters] = {};
  int64_t row = steady_dots<A, kBits, kLoads, kBlocks>(
      weight, rows, left, x, b, scratch,
      [&](auto own, int64_t, int64_t, Register products, Register scales) TPC_ALWAYS {
        steady[own] = multiply_add(steady[own], products, scales);
      },
      [&](int64_t row) TPC_ALWAYS {
        sums.add(load_bytes<Lanes>(steady), out + row);
        for (Register& each : steady) each = Register{};
      });
  const int64_t far = rows_far_ahead(weight);
  for (; row < rows; ++row) {
    const char* ahead =
        ahead_of(weight.address(row), weight.stride(), far, left - row, scratch.next_weights);
    weight.fetch_scales(row + far);
    Register total[kRegisters] = {};
    const auto take = [&](auto own, int64_t, Register products, Register scales, auto) TPC_ALWAYS {
      total[own] = multiply_add(total[own], products, scales);
    };
    run_dots<A, kBits, kLoads, kBlocks>(weight, row, *x.laid, x.laid->values[b], ahead, take);
    sums.add(load_bytes<Lanes>(total), out + row);
  }
  sums.flush();
}

#if defined(__AVX2__)
// The lanes of leaves whose blocks have one each, in rows side by side: where their vectors are.
// With at most 8 blocks, the first step of the tree of `sum` would only add zeros.
struct LanesOfLeaf {
  const Register* lanes[kLanes];

  template <bool kAll>
  TPC_INLINE Register sum() const {
    const auto half = [&](int own) TPC_ALWAYS {
      return kAll ? *lanes[own] + *lanes[own + 8] : *lanes[own];
    };
    const auto pair = [&](int own) TPC_ALWAYS { return half(own) + half(own + 4); };
    return (pair(0) + pair(2)) + (pair(1) + pair(3));
  }
};

// Find the lanes of all leaves, of which `used` may have blocks. The vectors of runs follow each
// other; the one after them is zero.
template <class A>
inline void find_lanes(const LaidValues<A>& x, int64_t used, const Register* columns,
                       LanesOfLeaf* leaf) {
  const Register* zero = columns + x.blocks();
  for (const LaidRun<A>* run = x.laid; run != x.laid + x.runs; columns += run++->rounds * kLanes)
    for (int64_t own = 0; own < run->leaves; ++own, ++leaf) {
      for (const Register*& lane : leaf->lanes) lane = zero;
      for (int64_t at = run->first_block[own]; at < run->first_block[own + 1]; ++at)
        leaf->lanes[at % used] = columns + at;
    }
}

// Multiply the blocks of some rows by sequence `b`, and add the results to `products[row][block]`.
template <class A, int kBits, int kLoads, int kBlocks>
[[gnu::noinline]] void add_block_products(const Grouped& weight, int64_t rows, int64_t left,
                                      const LaidValues<A>& x, int64_t b, float* products,
                                      const Scratch& scratch) {
  const int64_t far = rows_far_ahead(weight), blocks = x.blocks();
  int64_t row = steady_dots<A, kBits, kLoads, kBlocks>(
      weight, rows, left, x, b, scratch,
      [&](auto, int64_t row, int64_t at, Register found, Register by) TPC_ALWAYS {
        float* place = products + row * blocks + at;
        found = multiply_add(load_register(place), found, by);
        std::memcpy(place, &found, sizeof found);
      },
      [](int64_t) {});
  products += row * blocks;
  for (; row < rows; ++row) {
    const char* ahead =
        ahead_of(weight.address(row), weight.stride(), far, left - row, scratch.next_weights);
    weight.fetch_scales(row + far);
    for (const LaidRun<A>* run = x.laid; run != x.laid + x.runs;
         products += run++->rounds * kLanes) {
      const auto take = [&](auto part, int64_t round, Register found, Register by,
                            auto) TPC_ALWAYS {
        float* place = products + round * kLanes + part * kRegister;
        found = multiply_add(load_register(place), found, by);
        std::memcpy(place, &found, sizeof found);
      };
      run_dots<A, kBits, kLoads, kBlocks>(weight, row, *run, run->values[b], ahead, take);
    }
  }
}

// Sums of the products of blocks over each leaf, of which none has two blocks in a lane. Products are
// transposed, so that leaves are added for some rows at a time.
template <class A>
class LeafSums {
 public:
  LeafSums(const LaidValues<A>& x, Scratch& scratch)
      : x_(x),
        columns_(scratch.take<Register>(x.blocks() + 1)),
        terms_(scratch.take<Register>(x.leaves)),
        lanes_(scratch.take<LanesOfLeaf>(x.leaves)),
        all_(x.most_blocks > kLanes / 2) {
    columns_[x.blocks()] = Register{};
    find_lanes(x, all_ ? kLanes : kLanes / 2, columns_, lanes_);
  }

  // Store the sums of up to `kRegister` rows. There are products of `kRegister`.
  TPC_INLINE void store(const float* products, int64_t count, float* out) const {
    const int64_t blocks = x_.blocks();
    for (int64_t block = 0; block < blocks; block += kRegister) {
      Square square[kRegister];
#pragma GCC unroll 16
      for (int64_t own = 0; own < kRegister; ++own)
        square[own] = load_bytes<Square>(products + own * blocks + block);
      transpose(square);
      std::memcpy(columns_ + block, square, sizeof square);
    }
    for (int64_t leaf = 0; leaf < x_.leaves; ++leaf)
      terms_[leaf] = all_ ? lanes_[leaf].template sum<true>() : lanes_[leaf].template sum<false>();
    const int64_t kept = join_leaves(x_, terms_, 1);
    for (int64_t leaf = 0; leaf < kept; ++leaf)
      std::memcpy(out + leaf * x_.apart, terms_ + leaf,
                  sizeof(float) * static_cast<size_t>(count));
  }

 private:
  const LaidValues<A>& x_;
  Register *columns_, *terms_;
  LanesOfLeaf* lanes_;
  bool all_;
};

// The same for several leaves, whose sums are added for some rows at a time.
template <class A, int kBits, int kLoads, int kBlocks>
[[gnu::noinline]] void grouped_side_by_side(const Grouped& weight, int64_t rows, int64_t left,
                                            const LaidValues<A>& x, int64_t b, float* out,
                                            Scratch& scratch) {
  float* products = scratch.take<float>(kRegister * x.blocks());
  const LeafSums<A> sums(x, scratch);
  for (int64_t row = 0; row < rows; row += kRegister) {
    const int64_t count = rows - row < kRegister ? rows - row : kRegister;
    std::memset(products, 0, sizeof(float) * static_cast<size_t>(kRegister * x.blocks()));
    add_block_products<A, kBits, kLoads, kBlocks>(weight.from(row, 0), count, left - row, x, b,
                                                  products, scratch);
    sums.store(products, count, out + row);
  }
}
#endif

// The same for several leaves. Their totals are in memory; in one function with the above, compilers
// would also hold the total of a single leaf there.
template <class A, int kBits, int kLoads, int kBlocks>
[[gnu::noinline]] void grouped_leaves(const Grouped& weight, int64_t rows, int64_t left,
                                      const LaidValues<A>& x, int64_t b, float* out,
                                      Scratch& scratch) {
  Sums sums;
  float* terms = scratch.take<float>(x.leaves);
  auto* totals = scratch.take<Registers>(x.leaves);
  const int64_t far = rows_far_ahead(weight);
  for (int64_t row = 0; row < rows; ++row) {
    const char* ahead =
        ahead_of(weight.address(row), weight.stride(), far, left - row, scratch.next_weights);
    weight.fetch_scales(row + far);
    for (int64_t leaf = 0; leaf < x.leaves; ++leaf)
      for (Register& each : totals[leaf].each) each = Register{};
    Registers* to = totals;
    for (const LaidRun<A>* run = x.laid; run != x.laid + x.runs; to += run++->leaves) {
      const auto take = [&](auto own, int64_t round, Register products, Register scales,
                            auto) TPC_ALWAYS {
        for (const Share* share = run->shares[round]; share != run->shares[round + 1]; ++share) {
          Register& total = to[share->leaf].each[own];
          const auto own_products = (IntRegister)products & share->lanes.each[own];
          total = multiply_add(total, (Register)own_products, scales);
        }
      };
      run_dots<A, kBits, kLoads, kBlocks>(weight, row, *run, run->values[b], ahead, take);
    }
    for (int64_t leaf = 0; leaf < x.leaves; ++leaf)
      sums.add(load_bytes<Lanes>(totals + leaf), terms + leaf);
    sums.flush();
    const int64_t kept = join_leaves(x, terms, 1);
    for (int64_t leaf = 0; leaf < kept; ++leaf) out[leaf * x.apart + row] = terms[leaf];
  }
}
