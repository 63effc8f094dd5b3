// Products of rows of few bits with one sequence. Included by grouped.h.

// A register of sums of blocks: those of one row that have the loads from `from` on.
template <class A, int kBits, int kLoads, int kBlocks>
struct Blocks {
  using Found = typename A::Sums;
  static constexpr int kSums = kLanes / kBlocks;  // registers of lanes, which are added to one
  // The fewest of them that are loaded: those of a quarter of 16 blocks.
  static constexpr int kFewest = kSums * kRegisters > 4 ? kSums * kRegisters / 4 : 1;
  static constexpr int64_t kEach = kLoads * sizeof(Register);  // bytes of a register of lanes
  // Whether so many registers of products are added in lanes of 16 bits.
  static constexpr bool in_shorts(int registers) {
    return registers <= A::template kMostInShorts<kBits>;
  }

  const char *from, *high, *ahead;
  const typename A::Value* x;

  // The values for the bytes from a place of a run on.
  static TPC_INLINE const typename A::Value* values(const typename A::Value* x, int64_t place) {
    constexpr int64_t kOfRegister =
        std::is_same_v<A, Wide> ? kRegister : kOfPart<A, kBits> / kRegisters;
    return x + place / kLoad * kColumns<kBits> + place % kLoad / kEach * kOfRegister;
  }

  // The sums of a register of a load, or of two; in lanes of 16 bits where they may be.
  TPC_INLINE Found lanes_of(int number) const {
    const int sum = number / kRegisters, within = number % kRegisters;
    Found total{};
#pragma GCC unroll 2
    for (int load = sum * kLoads; load < (sum + 1) * kLoads; ++load) {
      if (within == 0) fetch_line(ahead + load * kLoad);
      const int64_t place = load * kLoad + within * 4 * kRegister;
      const Parts<A, kBits> parts(from + place, high + place * kHigh<kBits> / 4);
#pragma GCC unroll 4
      for (int part = 0; part < kParts<A, kBits>; ++part) {
        const ShortRegister weight = parts[part];
        const auto* values = x + load * kColumns<kBits> + kOfPart<A, kBits> * part;
        if constexpr (std::is_same_v<A, Wide>) {
          total = Wide::add(total, weight, values + within * kRegister);
        } else {
          const auto own_values = load_shorts(values + within * kOfPart<A, kBits> / kRegisters);
          if constexpr (in_shorts(1)) total = A::multiply_in_shorts(total, weight, own_values);
          else total = A::template multiply<kBits>(total, weight, own_values);
        }
      }
    }
    before_next_fetch(total);
    return total;
  }

  // Add adjacent lanes of `kOf` registers until one is left. Only the first `kUsed` have loads.
  // AVX-512 adds lanes within quarters first, which is faster; `sums` moves them to their places.
  template <int kOf, int kUsed>
  TPC_INLINE Found tree(int number) const {
    if constexpr (kUsed <= 0) {
      return Found{};
    } else if constexpr (kOf == 1) {
      if constexpr (in_shorts(1)) return A::widened(lanes_of(number));
      else return lanes_of(number);
#if defined(__AVX512F__)
    } else if constexpr (kOf == 4) {
      const Found a = tree<1, kUsed>(number), b = tree<1, kUsed - 1>(number + 1);
      const Found first = pairs_in_quarters(a, b);
      const Found c = tree<1, kUsed - 2>(number + 2), d = tree<1, kUsed - 3>(number + 3);
      return halves_in_quarters(first, pairs_in_quarters(c, d));
    } else if constexpr (kOf >= 8) {
      const Found first = tree<kOf / 2, kUsed>(number);
      return quarters_added(first, tree<kOf / 2, kUsed - kOf / 2>(number + kOf / 2));
#elif defined(__AVX2__)
    } else if constexpr (kOf == 4) {
      return in_order(fours<1, kUsed>(number));
    } else if constexpr (kOf == 8 || kOf == 16) {
      constexpr int kEach = kOf / 8;
      const Found first = fours<kEach, kUsed>(number);
      return halves_added(first, fours<kEach, kUsed - 4 * kEach>(number + 4 * kEach));
#endif
    } else {
      const Found first = tree<kOf / 2, kUsed>(number);  // in the order of memory
      return pairs_added(first, tree<kOf / 2, kUsed - kOf / 2>(number + kOf / 2));
    }
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // The sums of adjacent lanes of two sums of `kCount` registers, half by half.
  template <int kCount>
  static TPC_INLINE Found halves_paired(Found a, Found b) {
    if constexpr (in_shorts(2 * kCount)) {
      return (Found)_mm256_hadd_epi16((__m256i)a, (__m256i)b);
    } else {
      if constexpr (in_shorts(kCount)) a = A::widened(a), b = A::widened(b);
      return (Found)_mm256_hadd_epi32((__m256i)a, (__m256i)b);
    }
  }

  // The sums of fours of lanes of four registers, each of which is a sum of `kEach`: one of the
  // lower halves of all, then one of the upper halves.
  template <int kEach, int kUsed>
  TPC_INLINE Found fours(int number) const {
    const auto sums_of = [&](auto index) TPC_ALWAYS {
      constexpr int kLeft = kUsed - kEach * decltype(index)::value;
      const int place = number + kEach * index;
      if constexpr (kLeft <= 0) return Found{};
      else if constexpr (kEach == 1 || kLeft == 1) return lanes_of(place);
      const Found first = lanes_of(place);
      if constexpr (in_shorts(kEach)) return A::add_in_shorts(first, lanes_of(place + 1));
      else return first + lanes_of(place + 1);
    };
    static_assert(in_shorts(kEach) || !in_shorts(1));
    const auto pair_of = [&](auto low, auto high) TPC_ALWAYS {
      const Found first = sums_of(low);
      return halves_paired<kEach>(first, sums_of(high));
    };
    using std::integral_constant;
    const Found low = pair_of(integral_constant<int, 0>(), integral_constant<int, 1>());
    const Found high = pair_of(integral_constant<int, 2>(), integral_constant<int, 3>());
    const Found paired = halves_paired<2 * kEach>(low, high);
    if constexpr (in_shorts(4 * kEach)) return A::widened(paired);
    else return paired;
  }
#endif

  // The sums of blocks, of which the first `used` registers of lanes, or all, have loads.
  template <int kUsed = kSums>
  TPC_INLINE Found sums([[maybe_unused]] int64_t used) const {
    if constexpr (!std::is_same_v<A, Wide>) {
      if constexpr (kUsed > kFewest)
        if (used <= kUsed - kFewest) return sums<kUsed - kFewest>(used);
#if defined(__AVX512F__)
      if constexpr (kSums >= 4) return in_order<kBlocks>(tree<kSums, kUsed>(0));
#endif
      return tree<kSums, kUsed>(0);
    } else {  // in memory: less code
      Found held[kSums] = {};
#pragma GCC unroll 1
      for (int number = 0; number < used && number < kSums; ++number) held[number] = lanes_of(number);
#pragma GCC unroll 1
      for (int left = kSums / 2; left > 0; left /= 2)
#pragma GCC unroll 1
        for (int pair = 0; pair < left; ++pair)
          held[pair] = pairs_added(held[2 * pair], held[2 * pair + 1]);
      return held[0];
    }
  }
};

// The rows in about `kFarAhead` bytes.
TPC_INLINE int64_t rows_far_ahead(const Grouped& weight) {
  return (kFarAhead + weight.stride() - 1) / weight.stride();
}

// What is read after rows of a weight, for prefetches: rows `far` rows later, of which this weight
// has `left`, and then those of the next weight. The best distances were 6 KB for 8 bits, and 8 KB
// for others.
struct RowsAhead {
  int64_t stride, far, left;
  const char *next, *next_scales;  // null if there is no next weight

  TPC_INLINE RowsAhead(const Grouped& weight, int64_t left, const Scratch& scratch)
      : stride(weight.stride()),
        far(((weight.bits() == 8 ? 6 << 10 : 8 << 10) + stride - 1) / stride),
        left(left),
        next(scratch.next_weights),
        next_scales(scratch.next_scales) {}

  TPC_INLINE const char* of(const char* bytes, int64_t row) const {
    return ahead_of(bytes, stride, far, left - row, next);
  }

  TPC_INLINE void fetch_scales(const uint16_t* scales, int64_t groups, int64_t row) const {
    const int64_t bytes = groups * int64_t{sizeof *scales};
    const char* ahead =
        ahead_of(reinterpret_cast<const char*>(scales), bytes, far, left - row, next_scales);
    for (int64_t line = 0; line < bytes; line += kLoad) __builtin_prefetch(ahead + line);
  }
};

// Return where bytes of a row are read from, for a register of sums: a copy of `kBytes` bytes, if
// the `read` bytes from a place on are not all of the row. Others are 0.
template <int64_t kBytes>
TPC_INLINE const char* inside(const char* row, int64_t bytes, int64_t offset, int64_t read,
                              char* held) {
  if (offset >= 0 && offset + read <= bytes) return row + offset;
  copy_inside(row, bytes, offset, kBytes, held);
  return held;
}

// Store the sums of the blocks of a run of some rows, `[row][block]`. Sums of lanes have `kLoads`
// loads and `kBlocks` blocks. Callers are not templates over these forms: each would be instantiated
// for all, which takes minutes to compile.
template <class A, int kBits, int kLoads, int kBlocks>
[[gnu::noinline]] void row_sums(const Grouped& weight, int64_t row, int64_t rows,
                                const LaidRun<A>& run, const typename A::Value* x,
                                const RowsAhead& after) {
  using Form = Blocks<A, kBits, kLoads, kBlocks>;
  constexpr int kSums = Form::kSums, kFewest = Form::kFewest;
  constexpr int64_t kEach = Form::kEach, kBytes = kSums * kEach;
  const int64_t start = weight.offset(run.start), row_bytes = weight.stride();
  const int64_t high_start = kHigh<kBits> ? weight.high_offset(run.start) : 0;
  const int64_t count = run.loads / kLoads * kRegisters;  // registers of lanes
  // Those before the first one that needs bytes of other rows, or has no loads.
  int64_t plain = start < 0 || high_start < 0 ? 0 : (row_bytes - start) / kEach;
  plain = plain < count ? plain : count;
  if constexpr (kHigh<kBits> != 0) {
    const int64_t whole = (weight.high_stride() - high_start) * 4 / kHigh<kBits> / kEach;
    plain = plain < whole ? plain : whole;
  }
  alignas(kLoad) char held[kBytes], held_high[kBytes * kHigh<kBits> / 4 + 1];
  auto* out = run.sums;
  for (const int64_t end = row + rows; row < end; ++row) {
    const char *bytes = weight.address(row), *high = weight.high(row);
    const char* ahead = after.of(bytes, row) + start;
    const auto blocks = [&](int64_t first) TPC_ALWAYS {
      const int64_t place = first * kEach;
      return Form{bytes + start + place, high + high_start + place * kHigh<kBits> / 4,
                  ahead + place, Form::values(x, place)};
    };
    int64_t first = 0;
    for (; first + kSums <= plain; first += kSums) *out++ = blocks(first).sums(kSums);
    for (; first < count; first += kSums) {
      const int64_t left = (count - first + kFewest - 1) / kFewest * kFewest;
      const int64_t used = left < kSums ? left : kSums, place = first * kEach;
      Form some = blocks(first);
      some.from = inside<kBytes>(bytes, row_bytes, start + place, used * kEach, held);
      if constexpr (kHigh<kBits> != 0)
        some.high = inside<kBytes * kHigh<kBits> / 4>(high, weight.high_stride(),
                                                      high_start + place * kHigh<kBits> / 4,
                                                      used * kEach * kHigh<kBits> / 4, held_high);
      *out++ = some.sums(used);
    }
    for (; first < run.rounds * kRegisters * kSums; first += kSums) *out++ = typename A::Sums{};
  }
}

#include "grouped_steady.h"

// The functions above for a weight.
template <class A>
struct RowForm {
  decltype(&row_sums<A, 8, 1, 1>) sums;
  decltype(&add_alike<A, 8, 1, 1, SteadyScales>) add_alike;  // null if no rows are alike
};

template <class A>
inline RowForm<A> row_form(const Grouped& weight) {
  RowForm<A> form{};
  by_form(weight, [&](auto bits, auto loads, auto blocks) TPC_ALWAYS {
    constexpr int kBits = decltype(bits)::value, kLoads = decltype(loads)::value;
    constexpr int kBlocks = decltype(blocks)::value;
    form.sums = row_sums<A, kBits, kLoads, kBlocks>;
    if constexpr (kHigh<kBits> == 0)
      if (!weight.has_supers()) form.add_alike = add_alike<A, kBits, kLoads, kBlocks, SteadyScales>;
    constexpr bool kSupers = kRegisters == 1 && !std::is_same_v<A, Wide>;  // others are not faster
    if constexpr (kSupers && kBits == 6)
      form.add_alike = add_alike<A, kBits, kLoads, kBlocks, SuperScales<16, false>>;
    if constexpr (kSupers && kBits < 6 && kBlocks == 4)
      if (weight.has_minima() && weight.has_supers())
        form.add_alike = add_alike<A, kBits, kLoads, kBlocks, SuperScales<8, true>>;
  });
  return form;
}

// How many of the first rows are alike; the others need `run_dots`.
template <class A>
inline int64_t rows_alike(const Grouped& weight, const RowForm<A>& form, int64_t rows,
                          const LaidValues<A>& x) {
  if (x.runs > 1 || !form.add_alike) return 0;
  return weight.has_supers() ? weight.has_alike_supers(*x.laid) ? rows : 0
                             : weight.steady_rows(rows, *x.laid);
}

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

// Multiply the sums of a row's blocks by their factors, in whole superblocks of `kEach` blocks.
template <class A, int kEach, bool kMinima, class Take>
TPC_INLINE void super_dots(const Grouped& weight, int64_t row, const LaidRun<A>& run,
                           const Laid<A>& x, const typename A::Sums* sums, const Take& take) {
  const auto [scales, minima, super_scales, super_minima] = weight.place(row, run.block);
  for (int64_t round = 0; round < run.rounds; ++round)
    each_register([&](auto part) TPC_ALWAYS {
      const int64_t after = round * kLanes + part * kRegister;
      const auto totals = sums[round * kRegisters + part];
      const Register factors = load_register(x.factors + after);
      const Register found_scales = Grouped::of_whole_supers<kEach>(scales, super_scales, after);
      if constexpr (kMinima) {
        take(part, round, A::numbers(totals) * factors, found_scales);
        take(part, round, load_register(x.minima + after),
             -Grouped::of_whole_supers<kEach>(minima, super_minima, after));
      } else {
        take(part, round, A::less(totals, x.raised + after) * factors, found_scales);
      }
    });
}

// Multiply the sums of a row's blocks by their factors. `take` gets the products of 16 blocks, a
// register at a time, and their scales. If there are minima, it then gets the sums of values and
// the minima of the same register.
template <class A, class Take>
TPC_INLINE void run_dots(const Grouped& weight, int64_t row, const LaidRun<A>& run, const Laid<A>& x,
                         const typename A::Sums* sums, const Take& take) {
  if (run.whole && weight.super_blocks() == (weight.has_minima() ? 8 : 16))  // as k-quants have
    return weight.has_minima() ? super_dots<A, 8, true>(weight, row, run, x, sums, take)
                               : super_dots<A, 16, false>(weight, row, run, x, sums, take);
  const bool whole = run.whole && !weight.has_supers();
  const auto begin = whole ? weight.place(row, run.block) : Grouped::Place{};
  for (int64_t round = 0; round < run.rounds; ++round)
    each_register([&](auto part) TPC_ALWAYS {
      const int64_t after = round * kLanes + part * kRegister, block = run.block + after;
      const auto totals = sums[round * kRegisters + part];
      const Register factors = load_register(x.factors + after);
      const Register scales = whole ? weight.scales(begin, after) : weight.scales(row, block);
      if (weight.has_minima()) {
        take(part, round, A::numbers(totals) * factors, scales);
        take(part, round, load_register(x.minima + after),
             whole ? weight.minima(begin, after) : weight.minima(row, block));
        return;
      }
      const Register products =
          weight.has_offsets()
              ? A::less(totals, A::raised(weight.bits()) + weight.offsets(row, block),
                        x.sums + after)
              : A::less(totals, x.raised + after);
      take(part, round, products * factors, scales);
    });
}

// Multiply rows by sequence `b`. The rows of the instruction from the first one on are `left`.
template <class A>
[[gnu::noinline]] void grouped_rows(const Grouped& weight, RowForm<A> form, int64_t rows,
                                    int64_t left, const LaidValues<A>& x, int64_t b, float* out,
                                    Scratch& scratch) {
  const LaidRun<A>& run = *x.laid;
  const Laid<A>& values = run.values[b];
  const RowsAhead ahead(weight, left, scratch);
  const int64_t alike = rows_alike(weight, form, rows, x);
  for (int64_t row = 0; row < alike; row += kLanes) {
    const int64_t count = alike - row < kLanes ? alike - row : kLanes;
    Lanes products[kLanes] = {};
    form.add_alike(weight, row, count, run, values, ahead, kLanes, &products[0][0]);
    store_some(out + row, sums_of_all(products), count);
  }
  Sums sums;
  for (int64_t first = alike; first < rows; first += run.together) {
    const int64_t count = rows - first < run.together ? rows - first : run.together;
    form.sums(weight, first, count, run, values.values, ahead);
    for (int64_t row = first; row < first + count; ++row) {
      Registers total{};
      weight.fetch_scales(row + ahead.far);
      run_dots(weight, row, run, values, run.sums + (row - first) * run.rounds * kRegisters,
               [&](auto part, int64_t, Register products, Register scales) TPC_ALWAYS {
                 total.each[part] = multiply_add(total.each[part], products, scales);
               });
      sums.add(total, out + row);
    }
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
    const auto half = [&](int lane) TPC_ALWAYS {
      return kAll ? *lanes[lane] + *lanes[lane + 8] : *lanes[lane];
    };
    const auto pair = [&](int lane) TPC_ALWAYS { return half(lane) + half(lane + 4); };
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
    for (int64_t index = 0; index < run->leaves; ++index, ++leaf) {
      for (const Register*& lane : leaf->lanes) lane = zero;
      for (int64_t block = run->first_block[index]; block < run->first_block[index + 1]; ++block)
        leaf->lanes[block % used] = columns + block;
    }
}

// Multiply the blocks of some rows by sequence `b`, and add the results to `products[row][block]`.
template <class A>
[[gnu::noinline]] void add_block_products(const Grouped& weight, RowForm<A> form,
                                          int64_t rows, int64_t left, const LaidValues<A>& x,
                                          int64_t b, float* products, const Scratch& scratch) {
  const RowsAhead ahead(weight, left, scratch);
  const int64_t blocks = x.blocks();
  int64_t row = rows_alike(weight, form, rows, x);
  if (row > 0)
    form.add_alike(weight, 0, row, *x.laid, x.laid->values[b], ahead, blocks, products);
  products += row * blocks;
  for (; row < rows; ++row) {
    weight.fetch_scales(row + ahead.far);
    for (const LaidRun<A>* run = x.laid; run != x.laid + x.runs;
         products += run++->rounds * kLanes) {
      const auto take = [&](auto part, int64_t round, Register terms, Register by) TPC_ALWAYS {
        float* place = products + round * kLanes + part * kRegister;
        terms = multiply_add(load_register(place), terms, by);
        std::memcpy(place, &terms, sizeof terms);
      };
      form.sums(weight, row, 1, *run, run->values[b].values, ahead);
      run_dots(weight, row, *run, run->values[b], run->sums, take);
    }
  }
}

// Sums of the products of blocks over each leaf; no leaf has two blocks in a lane. Products are
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
      for (int64_t row = 0; row < kRegister; ++row)
        square[row] = load_bytes<Square>(products + row * blocks + block);
      transpose(square);
      std::memcpy(columns_ + block, square, sizeof square);
    }
    for (int64_t leaf = 0; leaf < x_.leaves; ++leaf)
      terms_[leaf] = all_ ? lanes_[leaf].template sum<true>() : lanes_[leaf].template sum<false>();
    const int64_t stored = join_leaves(x_, terms_, 1);
    for (int64_t leaf = 0; leaf < stored; ++leaf)
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
template <class A>
[[gnu::noinline]] void grouped_side_by_side(const Grouped& weight, RowForm<A> form,
                                            int64_t rows, int64_t left, const LaidValues<A>& x,
                                            int64_t b, float* out, Scratch& scratch) {
  float* products = scratch.take<float>(kRegister * x.blocks());
  const LeafSums<A> sums(x, scratch);
  for (int64_t row = 0; row < rows; row += kRegister) {
    const int64_t count = rows - row < kRegister ? rows - row : kRegister;
    std::memset(products, 0, sizeof(float) * static_cast<size_t>(kRegister * x.blocks()));
    add_block_products<A>(weight.from(row, 0), form, count, left - row, x, b, products, scratch);
    sums.store(products, count, out + row);
  }
}
#endif

// Add the products of the blocks of a row to the totals of several leaves.
template <class A>
inline void add_to_leaves(const Grouped& weight, const RowForm<A>& form, int64_t row,
                          const LaidValues<A>& x, int64_t b, const RowsAhead& ahead,
                          Registers* totals) {
  weight.fetch_scales(row + ahead.far);
  for (const LaidRun<A>* run = x.laid; run != x.laid + x.runs; totals += run++->leaves) {
    const auto take = [&](auto part, int64_t round, Register products, Register scales) TPC_ALWAYS {
      for (const Share* share = run->shares[round]; share != run->shares[round + 1]; ++share) {
        Register& total = totals[share->leaf].each[part];
        const auto own_products = (IntRegister)products & share->lanes.each[part];
        total = multiply_add(total, (Register)own_products, scales);
      }
    };
    form.sums(weight, row, 1, *run, run->values[b].values, ahead);
    run_dots(weight, row, *run, run->values[b], run->sums, take);
  }
}

// The rows whose totals of leaves are held.
constexpr int64_t kRowsOfLeaves = 8;

// The same for several leaves. Their totals are in memory; in one function with the above,
// compilers would also hold the total of a single leaf there.
template <class A>
[[gnu::noinline]] void grouped_leaves(const Grouped& weight, RowForm<A> form, int64_t rows,
                                      int64_t left, const LaidValues<A>& x, int64_t b, float* out,
                                      Scratch& scratch) {
  const RowsAhead ahead(weight, left, scratch);
  const int64_t alike = rows_alike(weight, form, rows, x);
  const auto eights = [&](int64_t count) { return (count * x.leaves + 7) / 8; };
  auto* totals = scratch.take<Lanes>(8 * eights(kRowsOfLeaves));
  auto* results = scratch.take<EightLanes>(eights(kRowsOfLeaves));
  for (int64_t first = 0, count; first < rows; first += count) {
    count = first >= alike ? 1 : alike - first < kRowsOfLeaves ? alike - first : kRowsOfLeaves;
    std::memset(totals, 0, 8 * sizeof *totals * static_cast<size_t>(eights(count)));
    if (first < alike)
      form.add_alike(weight, first, count, *x.laid, x.laid->values[b], ahead, x.leaves * kLanes,
                     reinterpret_cast<float*>(totals));
    else
      add_to_leaves(weight, form, first, x, b, ahead, reinterpret_cast<Registers*>(totals));
    for (int64_t place = 0; place < eights(count); ++place)
      results[place] = sums(totals + 8 * place);
    for (int64_t row = 0; row < count; ++row) {
      float* terms = reinterpret_cast<float*>(results) + row * x.leaves;
      const int64_t stored = join_leaves(x, terms, 1);
      for (int64_t leaf = 0; leaf < stored; ++leaf) out[leaf * x.apart + first + row] = terms[leaf];
    }
  }
}
