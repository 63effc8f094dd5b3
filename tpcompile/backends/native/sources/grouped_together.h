// Products of rows of few bits with two to four sequences, for which a load is taken apart once.
// Included by grouped.h.
//
// Each load has a sum of lanes for each sequence. Adjacent lanes are added until registers have the
// sums of blocks, `[load][sequence][block]`; of three sequences, a fourth has zeros. Rows are those
// of `steady_rows`. Sums of blocks are exact, and their products are added in the order of
// `run_dots`, so the bits are the same. More sequences are faster in panels.

#if defined(__AVX512F__)
// The most sequences that are multiplied together.
constexpr int64_t kMostTogether = 4;

// The loads of 16 blocks.
template <class A, int kBits, int kLoads, int kBlocks, int kBatch>
struct LoadsTogether {
  static constexpr int kWide = kBatch > 2 ? 4 : 2;  // the sequences in registers
  static constexpr int kSums = kLanes / kBlocks;    // the sums of lanes that become a register
  static constexpr int kParts = ::kParts<A, kBits>;

  using Parts = ShortRegister[kLoads * kParts];

  const char *from, *ahead;
  const typename A::Value* const* x;
  int64_t column;

  // Register `number` of the sums of blocks.
  TPC_INLINE IntRegister sums(int number) const { return of_loads<kSums>(number * kSums / kWide); }

  // Where a lane of a register comes from.
  static constexpr int sequence_of(int number, int lane) {
    return (number * kSums + lane / kBlocks) % kWide;
  }
  static constexpr int block_of(int number, int lane) {
    return (number * kSums + lane / kBlocks) / kWide * kBlocks + lane % kBlocks;
  }

 private:
  // Add adjacent lanes of `kOf` sums, from those of a load on, until one is left.
  template <int kOf>
  TPC_INLINE IntRegister of_loads(int sum) const {
    if constexpr (kOf == kWide) {
      Parts parts;
      take_apart(sum, parts);
      return of_sequences<kWide, 0>(sum, parts);
    } else {
      return pairs_added(of_loads<kOf / 2>(sum), of_loads<kOf / 2>(sum + kOf / 2 / kWide));
    }
  }

  template <int kOf, int kFirst>
  TPC_INLINE IntRegister of_sequences(int sum, const Parts& parts) const {
    if constexpr (kFirst >= kBatch) return IntRegister{};
    else if constexpr (kOf == 1) return lanes_of(sum, kFirst, parts);
    else
      return pairs_added(of_sequences<kOf / 2, kFirst>(sum, parts),
                         of_sequences<kOf / 2, kFirst + kOf / 2>(sum, parts));
  }

  TPC_INLINE void take_apart(int sum, Parts& parts) const {
#pragma GCC unroll 2
    for (int load = 0; load < kLoads; ++load) {
      const int64_t at = (sum * kLoads + load) * kLoad;
      __builtin_prefetch(ahead + at, 0, 2);
      auto loaded = load_shorts(from + at);
      keep(loaded);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)
        parts[load * kParts + part] = A::template part<kBits>(loaded, part);
    }
  }

  TPC_INLINE IntRegister lanes_of(int sum, int b, const Parts& parts) const {
    const auto* values = x[b] + column + sum * kLoads * kColumns<kBits>;
    IntRegister total{};
#pragma GCC unroll 8
    for (int part = 0; part < kLoads * kParts; ++part)
      total = A::template multiply<kBits>(total, parts[part],
                                          load_shorts(values + part * kOfPart<A, kBits>));
    return total;
  }
};

// Add the products of the blocks of so many loads, in the tree of `sum`.
template <int kWide, int kBlocks, int kCount>
TPC_INLINE void add_loads(const float* from, float* out) {
  typedef float Load __attribute__((vector_size(sizeof(float) * kWide * kBlocks)));
  Load sums[kCount];
  std::memcpy(sums, from, sizeof sums);
#pragma GCC unroll 4
  for (int apart = kLanes / kBlocks / 2; apart > 0; apart /= 2)
#pragma GCC unroll 8
    for (int at = 0; at < apart; ++at)
      if (at + apart < kCount) sums[at] += sums[at + apart];
  const auto& of = sums[0];
  for (int b = 0; b < kWide; ++b) {
    const int at = b * kBlocks;
    if constexpr (kBlocks == 4) out[b] = (of[at] + of[at + 2]) + (of[at + 1] + of[at + 3]);
    else if constexpr (kBlocks == 2) out[b] = of[at] + of[at + 1];
    else out[b] = of[at];
  }
}

// Multiply rows by `kBatch` sequences. The rows of the instruction are `left`.
template <class A, int kBits, int kLoads, int kBlocks, int kBatch>
[[gnu::noinline]] void rows_together(const Grouped& weight, int64_t rows, int64_t left,
                                     const LaidValues<A>& x, float* out, int64_t out_stride,
                                     Scratch& scratch) {
  using Loads = LoadsTogether<A, kBits, kLoads, kBlocks, kBatch>;
  constexpr int kWide = Loads::kWide, kSums = Loads::kSums;
  constexpr int kRound = kWide * kLanes;  // what 16 blocks have
  const LaidRun<A>& run = *x.laid;
  auto* factors = scratch.take<float>(run.rounds * kRound);
  auto* sums = scratch.take<int32_t>(run.rounds * kRound);
  auto* products = scratch.take<float>(run.rounds * kRound);
  auto* terms = scratch.take<float>(x.leaves * kWide);
  const typename A::Value* values[kBatch];
  for (int b = 0; b < kBatch; ++b) values[b] = run.values[b].values;
  IntRegister blocks[kWide];
  for (int number = 0; number < kWide; ++number)
    for (int lane = 0; lane < kLanes; ++lane) {
      const int block = blocks[number][lane] = Loads::block_of(number, lane);
      const int b = Loads::sequence_of(number, lane);
      const Laid<A>& own = run.values[b < kBatch ? b : 0];
      for (int64_t round = 0; round < run.rounds; ++round) {
        const int64_t place = round * kRound + number * kLanes + lane;
        factors[place] = own.factors[round * kLanes + block];
        sums[place] = own.sums[round * kLanes + block];
      }
    }
  const int64_t stride = weight.stride(), groups = weight.groups(), far = rows_far_ahead(weight);
  const int64_t here = groups - weight.group_of(run.block);  // those of a row from the run on
  const bool halves = weight.scale_type() == TPC_DTYPE_F16, single = x.leaves == 1;
  const char* bytes = weight.address(0) + weight.offset(run.start);
  const auto* scales = reinterpret_cast<const uint16_t*>(weight.place(0, run.block).scales);
  const IntRegister offsets = IntRegister{} + A::template kRaised<kBits>;
  for (int64_t row = 0; row < rows; ++row, bytes += stride, scales += groups) {
    const char* ahead = ahead_of(bytes, stride, far, left - row, scratch.next_weights);
    const char* scales_ahead = ahead_of(reinterpret_cast<const char*>(scales), 2 * groups, far,
                                        left - row, scratch.next_scales);
    for (int64_t at = 0; at < 2 * groups; at += kLoad) __builtin_prefetch(scales_ahead + at);
    // Blocks of a single leaf that have the same lane are added; those of several stay apart.
    Register totals[kWide] = {};
    for (int64_t round = 0; round < run.rounds; ++round) {
      const int64_t load = round * kSums * kLoads, last = (run.loads - load) / kLoads * kWide;
      const auto* own = scales + round * kLanes;
      const Register loaded = first_lanes(
          halves ? load_register(reinterpret_cast<const f16*>(own))
                 : load_register(reinterpret_cast<const bf16*>(own)), here - round * kLanes);
      const Loads loads{bytes + load * kLoad, ahead + load * kLoad, values, load * kColumns<kBits>};
#pragma GCC unroll 4
      for (int number = 0; number < kWide; ++number) {
        if (number * kSums >= last) break;
        const int64_t place = round * kRound + number * kLanes;
        const Register found = A::less(loads.sums(number), offsets, sums + place);
        const auto by = (Register)_mm512_permutexvar_ps((__m512i)blocks[number], (__m512)loaded);
        totals[number] =
            multiply_add(totals[number], found * load_register(factors + place), by);
      }
      if (single) continue;
      std::memcpy(products + round * kRound, totals, sizeof totals);
      for (Register& each : totals) each = Register{};
    }
    if (single) {
      add_loads<kWide, kBlocks, kSums>(reinterpret_cast<const float*>(totals), terms);
    } else {
      for (int64_t leaf = 0; leaf < x.leaves; ++leaf) {
        const int64_t first = run.first_block[leaf] / kBlocks;
        const int64_t last = (run.first_block[leaf + 1] + kBlocks - 1) / kBlocks;
        with_count<kSums>(last - first, [&](auto count) TPC_ALWAYS {
          add_loads<kWide, kBlocks, decltype(count)::value>(products + first * kWide * kBlocks,
                                                            terms + leaf * kWide);
        });
      }
    }
    const int64_t kept = join_leaves(x, terms, kWide);
    for (int64_t leaf = 0; leaf < kept; ++leaf)
      for (int b = 0; b < kBatch; ++b)
        out[leaf * x.apart + row + b * out_stride] = terms[leaf * kWide + b];
  }
}

// Multiply the first rows by all sequences. Return how many; the others need `run_dots`, as do all
// if a leaf does not begin with a load, or has two blocks in a lane.
template <class A, int kBits, int kLoads, int kBlocks>
inline int64_t dots_together(const Grouped& weight, int64_t rows, const LaidValues<A>& x,
                             float* out, int64_t out_stride, Scratch& scratch) {
  if (x.batch < 2 || x.batch > kMostTogether || x.runs > 1) return 0;
  if (x.leaves > 1 && x.most_blocks > kLanes) return 0;
  for (int64_t leaf = 1; leaf < x.leaves; ++leaf)
    if (x.laid->first_block[leaf] % kBlocks) return 0;
  const int64_t steady = weight.steady_rows(rows, *x.laid);
  const auto with = [&](auto batch) TPC_ALWAYS {
    rows_together<A, kBits, kLoads, kBlocks, decltype(batch)::value>(weight, steady, rows, x, out,
                                                                     out_stride, scratch);
  };
  if (x.batch == 2) with(std::integral_constant<int, 2>());
  else if (x.batch == 3) with(std::integral_constant<int, 3>());
  else with(std::integral_constant<int, 4>());
  return steady;
}
#endif
