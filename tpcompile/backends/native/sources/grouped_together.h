// Products of rows of few bits with several sequences, for which a load is taken apart once.
// Included by grouped.h.
//
// The words of 32 bits of some loads are transposed, so that each lane has words of one block only.
// Then registers of several rows are multiplied by the values of several sequences, which have the
// same order, and few lanes are left to add. Rows are those of `steady_rows`. Sums of blocks are
// exact, and their products are added in the order of `run_dots`, so the bits are the same.

#if defined(__AVX512F__)
// The most sequences that are multiplied at a time, and those for which this is faster than panels.
constexpr int kMostTogether = 8;
constexpr int64_t kMostInGroups = 12;

// The loads whose words are transposed together, and the adjacent lanes that a block then has.
template <int kBits, int kLoads, int kBlocks>
struct Transposed {
  static constexpr int kWords = kLanes * kLoads / kBlocks;  // of a block
  static constexpr int kTaken = kWords < 8 ? kWords : 8;
  static constexpr int kSpread = kWords / kTaken;
};

// Give each lane as many adjacent words as there are registers: word n becomes part of register n.
template <int kCount>
TPC_INLINE void transpose_words(IntRegister* words) {
  IntRegister from[kCount];
#pragma GCC unroll 3
  for (int done = 1; done < kCount; done *= 2) {
#pragma GCC unroll 8
    for (int own = 0; own < kCount; ++own) from[own] = words[own];
#pragma GCC unroll 4
    for (int own = 0; own < kCount / 2; ++own) {
      const IntRegisters a{from[2 * own]}, b{from[2 * own + 1]};
      words[own] = evens(a, b).each[0], words[own + kCount / 2] = odds(a, b).each[0];
    }
  }
}

// The values of up to `kMostTogether` sequences: those of a part of all of them, then those of the
// next part. Factors of blocks, and their sums times what integers are raised by, are
// `[round][sequence][block]`.
struct ValuesTogether {
  int batch;  // as registers are laid out; the last one may be the first again
  const char* values;
  const float* factors;
  const int32_t* raised;
};

template <class A, int kBits, int kLoads, int kBlocks>
inline ValuesTogether values_together(const LaidRun<A>& run, int64_t first, int64_t count,
                                      Scratch& scratch) {
  constexpr int kTaken = Transposed<kBits, kLoads, kBlocks>::kTaken;
  constexpr int kParts = ::kParts<A, kBits>;
  const int batch = static_cast<int>(count < 2 ? 2 : count > 4 ? (count + 1) / 2 * 2 : count);
  const int64_t loads = run.rounds * kLanes * kLoads / kBlocks, registers = run.rounds * batch;
  auto* values = scratch.take<char>(loads * kParts * batch * kLoad);
  auto* factors = scratch.take<float>(registers * kLanes);
  auto* raised = scratch.take<int32_t>(registers * kLanes);
  for (int b = 0; b < batch; ++b) {
    const Laid<A>& own = run.values[first + (b < count ? b : 0)];
    for (int64_t load = 0; load < loads; load += kTaken)
      for (int part = 0; part < kParts; ++part) {
        IntRegister words[kTaken];
#pragma GCC unroll 8
        for (int at = 0; at < kTaken; ++at)
          words[at] = load_bytes<IntRegister>(own.values + (load + at) * kColumns<kBits> +
                                              part * kOfPart<A, kBits>);
        transpose_words<kTaken>(words);
        for (int at = 0; at < kTaken; ++at)
          std::memcpy(values + (((load + at) * kParts + part) * batch + b) * kLoad, words + at,
                      kLoad);
      }
    for (int64_t round = 0; round < run.rounds; ++round) {
      const int64_t place = (round * batch + b) * kLanes;
      std::memcpy(factors + place, own.factors + round * kLanes, sizeof(Register));
      const IntRegister sums = load_ints(own.sums + round * kLanes).each[0];
      const IntRegister found = sums * A::template kRaised<kBits>;
      std::memcpy(raised + place, &found, sizeof found);
    }
  }
  return {batch, values, factors, raised};
}

// Store the words of the next loads of a row, of which `loads` are left, as registers have them.
template <int kCount>
TPC_INLINE void store_words(const char* from, const char* ahead, int64_t loads, IntRegister* to) {
  IntRegister words[kCount];
#pragma GCC unroll 8
  for (int load = 0; load < kCount; ++load) __builtin_prefetch(ahead + load * kLoad, 0, 2);
  if (loads >= kCount) {
#pragma GCC unroll 8
    for (int load = 0; load < kCount; ++load)
      words[load] = load_bytes<IntRegister>(from + load * kLoad);
    transpose_words<kCount>(words);
    std::memcpy(to, words, sizeof words);
    return;
  }
  for (int load = 0; load < kCount; ++load)
    words[load] = load < loads ? load_bytes<IntRegister>(from + load * kLoad) : IntRegister{};
  transpose_words<kCount>(words);
  std::memcpy(to, words, sizeof words);
}

// Some rows: where they are, and what is fetched meanwhile, the next rows into the nearest cache.
template <int kRows>
struct RowsTogether {
  const char *bytes[kRows], *ahead[kRows], *next;
  const uint16_t* scales[kRows];
};

// Multiply `kRows` rows by the values of `kBatch` sequences, for the blocks of a round. Sums of
// blocks are `[sequence][row]`. From byte `at` of the rows on, `loads` loads are left.
template <class A, int kBits, int kLoads, int kBlocks, int kRows, int kBatch>
TPC_INLINE void sums_together(const RowsTogether<kRows>& rows, int64_t stride, int64_t at,
                              int64_t loads, const char* values, IntRegister* sums) {
  using Form = Transposed<kBits, kLoads, kBlocks>;
  constexpr int kTaken = Form::kTaken, kSpread = Form::kSpread, kSums = kBatch * kRows;
  constexpr int kParts = ::kParts<A, kBits>;
  constexpr int kHalves = kSpread > 1 ? kSpread / 2 : 1;
  IntRegister halves[kHalves][kSums];  // sums of two passes each
  alignas(kLoad) IntRegister words[kRows][kTaken];
  const auto multiply = [&](IntRegister* totals) TPC_ALWAYS {
#pragma GCC unroll 1
    for (int row = 0; row < kRows; ++row)
      store_words<kTaken>(rows.bytes[row] + at, rows.ahead[row] + at, loads, words[row]);
    const char* next = rows.next + at;
    at += kTaken * kLoad, loads -= kTaken;
#pragma GCC unroll 1
    for (int word = 0; word < kTaken; ++word, values += kParts * kBatch * kLoad) {
      ShortRegister loaded[kRows];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        __builtin_prefetch(next + row * stride + word * kLoad);
        loaded[row] = load_shorts(&words[row][word]), keep(loaded[row]);
      }
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        ShortRegister parts[kRows];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
          parts[row] = A::template part<kBits>(loaded[row], part);
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) {
          ShortRegister own = load_shorts(values + (part * kBatch + b) * kLoad);
          keep(own);
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row)
            totals[b * kRows + row] =
                A::template multiply<kBits>(totals[b * kRows + row], parts[row], own);
        }
      }
    }
  };
  if constexpr (kSpread == 1) {
    IntRegister totals[kSums] = {};
    multiply(totals);
#pragma GCC unroll 16
    for (int own = 0; own < kSums; ++own) sums[own] = totals[own];
  } else {
    const int64_t needed = (loads + kTaken - 1) / kTaken;
    const int64_t passes = needed < kSpread ? needed : kSpread;
#pragma GCC unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      IntRegister totals[kSums] = {};
      multiply(totals);
      IntRegister* to = halves[pass / 2];
      if (pass % 2 == 0) {
#pragma GCC unroll 16
        for (int own = 0; own < kSums; ++own) to[own] = totals[own];
      } else {
#pragma GCC unroll 16
        for (int own = 0; own < kSums; ++own) to[own] = pairs_added(to[own], totals[own]);
      }
    }
    const IntRegister none{};
    IntRegister* last = halves[passes / 2];
    if (passes % 2)
      for (int own = 0; own < kSums; ++own) last[own] = pairs_added(last[own], none);
#pragma GCC unroll 16
    for (int own = 0; own < kSums; ++own) {
      if constexpr (kSpread == 2) sums[own] = halves[0][own];
      else sums[own] = pairs_added(halves[0][own], passes > 2 ? halves[1][own] : none);
    }
  }
}

// Multiply up to 16 rows by `kBatch` sequences. Products of blocks are `[sequence][row][block]`.
// Those of a single leaf are added by lane.
template <class A, int kBits, int kLoads, int kBlocks, int kBatch>
[[gnu::noinline]] void products_together(const Grouped& weight, int64_t count, int64_t left,
                                         const LaidRun<A>& run, bool single,
                                         const ValuesTogether& x, float* products,
                                         const Scratch& scratch) {
  constexpr int kRows = kBatch > 4 ? 2 : 4;
  constexpr int kEach = kLanes * kLoads / kBlocks;  // the loads of a round
  const int64_t stride = weight.stride(), groups = weight.groups(), far = rows_far_ahead(weight);
  const int64_t here = groups - weight.group_of(run.block);  // those of a row from the run on
  const int64_t width = single ? kLanes : run.rounds * kLanes;
  const bool halves = weight.scale_type() == TPC_DTYPE_F16;
  const int64_t start = weight.offset(run.start);
  for (int64_t round = 0; round < run.rounds; ++round)
    for (int64_t row = 0; row < count; row += kRows) {
      RowsTogether<kRows> rows;
      rows.next = weight.address(row + kRows) + start;
#pragma GCC unroll 4
      for (int own = 0; own < kRows; ++own) {
        const int64_t at = row + own < count ? row + own : count - 1;
        rows.bytes[own] = weight.address(at) + start;
        rows.scales[own] = reinterpret_cast<const uint16_t*>(weight.place(at, run.block).scales);
        rows.ahead[own] = ahead_of(rows.bytes[own], stride, far, left - at, scratch.next_weights);
        if (round > 0) continue;
        const char* ahead = ahead_of(reinterpret_cast<const char*>(rows.scales[own]), 2 * groups,
                                     far, left - at, scratch.next_scales);
        for (int64_t line = 0; line < 2 * groups; line += kLoad) __builtin_prefetch(ahead + line);
      }
      IntRegister sums[kBatch * kRows];
      sums_together<A, kBits, kLoads, kBlocks, kRows, kBatch>(
          rows, stride, round * kEach * kLoad, run.loads - round * kEach,
          x.values + round * kEach * kParts<A, kBits> * kBatch * kLoad, sums);
      const int64_t place = round * kBatch * kLanes;
#pragma GCC unroll 4
      for (int own = 0; own < kRows; ++own) {
        const uint16_t* from = rows.scales[own] + round * kLanes;
        const Register scales = first_lanes(
            halves ? load_register(reinterpret_cast<const f16*>(from))
                   : load_register(reinterpret_cast<const bf16*>(from)), here - round * kLanes);
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) {
          const int64_t at = place + b * kLanes;
          const IntRegister whole = sums[b * kRows + own] - load_ints(x.raised + at).each[0];
          const Register found = A::numbers(whole) * load_register(x.factors + at);
          float* to = products + (b * kLanes + row + own) * width + (single ? 0 : round * kLanes);
          const Register before = single && round > 0 ? load_register(to) : Register{};
          const Register product = multiply_add(before, found, scales);
          std::memcpy(to, &product, sizeof product);
        }
      }
    }
}

// Multiply the first rows by all sequences. Return how many; the others need `run_dots`, as do all
// if a leaf has two blocks in a lane.
template <class A, int kBits, int kLoads, int kBlocks>
inline int64_t dots_together(const Grouped& weight, int64_t rows, const LaidValues<A>& x,
                             float* out, int64_t out_stride, Scratch& scratch) {
  if (x.batch < 2 || x.batch > kMostInGroups || x.runs > 1) return 0;
  if (x.leaves > 1 && x.most_blocks > kLanes) return 0;
  const LaidRun<A>& run = *x.laid;
  const int64_t steady = weight.steady_rows(rows, run);
  if (steady == 0) return 0;
  const bool single = x.leaves == 1;
  auto* values = scratch.take<ValuesTogether>((x.batch + kMostTogether - 1) / kMostTogether);
  for (int64_t b = 0; b < x.batch; b += kMostTogether) {
    const int64_t left = x.batch - b;
    values[b / kMostTogether] = values_together<A, kBits, kLoads, kBlocks>(
        run, b, left < kMostTogether ? left : kMostTogether, scratch);
  }
  const int64_t width = single ? kLanes : x.blocks();
  auto* products = scratch.take<float>(kMostTogether * kLanes * width);
  const LeafSums<A> leaves(x, scratch);
  for (int64_t row = 0; row < steady; row += kLanes) {
    const int64_t count = steady - row < kLanes ? steady - row : kLanes;
    for (int64_t b = 0; b < x.batch; b += kMostTogether) {
      const ValuesTogether& own = values[b / kMostTogether];
      const auto with = [&](auto batch) TPC_ALWAYS {
        products_together<A, kBits, kLoads, kBlocks, decltype(batch)::value>(
            weight.from(row, 0), count, rows - row, run, single, own, products, scratch);
      };
      if (own.batch == 2) with(std::integral_constant<int, 2>());
      else if (own.batch == 3) with(std::integral_constant<int, 3>());
      else if (own.batch == 4) with(std::integral_constant<int, 4>());
      else if (own.batch == 6) with(std::integral_constant<int, 6>());
      else with(std::integral_constant<int, 8>());
      for (int64_t at = b; at < x.batch && at < b + kMostTogether; ++at) {
        float* from = products + (at - b) * kLanes * width;
        float* to = out + row + at * out_stride;
        if (!single) {
          leaves.store(from, count, to);
          continue;
        }
        const Lanes sums = sums_of_all(reinterpret_cast<Lanes*>(from));
        std::memcpy(to, &sums, sizeof(float) * static_cast<size_t>(count));
      }
    }
  }
  return steady;
}
#endif
