// Products of rows of few bits with several sequences, for which a load is taken apart once.
// Included by grouped.h.
//
// The words of 32 bits of some loads are transposed, so that each lane has words of one block only.
// Then registers of several rows are multiplied by the values of several sequences, which have the
// same order, and few lanes are left to add. Rows are those of `steady_rows`. Sums of blocks are
// exact, and their products are added in the order of `run_dots`, so the bits are the same.

#if defined(__AVX2__)
// The most sequences that are multiplied at a time, and the fewest and the most for which this is
// faster than one after the other and than panels: with a single leaf, and with several.
constexpr int kMostTogether = 8;
#if defined(__AVX512F__)
constexpr int64_t kFewestInGroups[] = {2, 2}, kMostInGroups[] = {12, 12};
#else
constexpr int64_t kFewestInGroups[] = {4, 2}, kMostInGroups[] = {4, 8};
#endif

// The bytes of a register.
constexpr int64_t kWide = 4 * kRegister;

// A turn is one block for each lane of a register; its loads are as many registers as a block has
// words. Some are transposed together, and a block then has so many adjacent lanes.
template <int kLoads, int kBlocks>
struct Transposed {
  static constexpr int kWords = kLanes * kLoads / kBlocks;
  static constexpr int kTaken = kWords < 8 ? kWords : 8;
  static constexpr int kSpread = kWords / kTaken;
  // Whether words of the next rows are transposed between products, which keep other ports busy.
  // This is slower with several passes, and AVX2 has too few registers.
  static constexpr bool kAhead = kRegisters == 1 && kSpread == 1;
};

// Give each lane as many words of one block as there are registers. AVX-512 moves words within
// quarters first, which ports that do not multiply can do; `blocks_in_order` moves the lanes.
template <int kCount>
TPC_INLINE void transpose_words(IntRegister* words) {
#if defined(__AVX512F__)
  static_assert(kCount == 4 || kCount == 8);
#pragma GCC unroll 2
  for (int first = 0; first < kCount; first += 4) transpose_quarters(words + first);
  if constexpr (kCount == 8) {
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      const IntRegister first = words[pair], second = words[pair + 4];
      words[pair] = even_quarters(first, second), words[pair + 4] = odd_quarters(first, second);
    }
  }
#else
  if constexpr (kCount == 8) {
    Square square[8];
    std::memcpy(square, words, sizeof square);
    transpose(square);
    std::memcpy(words, square, sizeof square);
  } else {
    static_assert(kCount == 4);
    __m256 halves[4];  // the halves with words of lanes 0 and 4, 1 and 5, and so on
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const auto a = (__m256)words[pair], b = (__m256)words[pair + 2];
      halves[2 * pair] = _mm256_permute2f128_ps(a, b, 0x20);
      halves[2 * pair + 1] = _mm256_permute2f128_ps(a, b, 0x31);
    }
    __m256 pairs[4];
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      pairs[pair] = _mm256_unpacklo_ps(halves[2 * pair], halves[2 * pair + 1]);
      pairs[pair + 2] = _mm256_unpackhi_ps(halves[2 * pair], halves[2 * pair + 1]);
    }
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const __m256 a = pairs[2 * pair], b = pairs[2 * pair + 1];
      words[2 * pair] = (IntRegister)_mm256_shuffle_ps(a, b, _MM_SHUFFLE(1, 0, 1, 0));
      words[2 * pair + 1] = (IntRegister)_mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 2, 3, 2));
    }
  }
#endif
}

// Add the lanes of a block that are apart after the first passes: those of `a`, then those of `b`.
TPC_INLINE IntRegister lanes_added(IntRegister a, IntRegister b) {
#if defined(__AVX512F__)
  return quarters_added(a, b);
#else
  return pairs_added(a, b);
#endif
}

// Order sums of blocks, which have a lane each.
template <int kBlocks>
TPC_INLINE IntRegister blocks_in_order(IntRegister sums) {
#if defined(__AVX512F__)
  return in_order<kBlocks>(sums);
#else
  return sums;
#endif
}

// The values of up to `kMostTogether` sequences: those of a part of all of them, then those of the
// next part. Factors of blocks, and their sums times what integers are raised by, are
// `[turn][sequence][block]`.
struct ValuesTogether {
  int64_t batch;
  const char* values;
  const float* factors;
  const int32_t* raised;
};

template <class A, int kBits, int kLoads, int kBlocks>
inline ValuesTogether values_together(const LaidRun<A>& run, int64_t first, int64_t batch,
                                      Scratch& scratch) {
  using Form = Transposed<kLoads, kBlocks>;
  constexpr int kTaken = Form::kTaken, kParts = ::kParts<A, kBits>;
  const int64_t turns = run.rounds * kRegisters, registers = turns * Form::kWords;
  auto* values = scratch.take<char>(registers * kParts * batch * kWide);
  auto* factors = scratch.take<float>(turns * batch * kRegister);
  auto* raised = scratch.take<int32_t>(turns * batch * kRegister);
  for (int64_t b = 0; b < batch; ++b) {
    const Laid<A>& laid = run.values[first + b];
    for (int64_t begin = 0; begin < registers; begin += kTaken)
      for (int part = 0; part < kParts; ++part) {
        IntRegister words[kTaken];
#pragma GCC unroll 8
        for (int word = 0; word < kTaken; ++word) {
          const int64_t load = (begin + word) / kRegisters, within = (begin + word) % kRegisters;
          words[word] = load_bytes<IntRegister>(laid.values + load * kColumns<kBits> +
                                                part * kOfPart<A, kBits> +
                                                within * (kOfPart<A, kBits> / kRegisters));
        }
        transpose_words<kTaken>(words);
        for (int word = 0; word < kTaken; ++word)
          std::memcpy(values + (((begin + word) * kParts + part) * batch + b) * kWide, words + word,
                      kWide);
      }
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t place = (turn * batch + b) * kRegister;
      std::memcpy(factors + place, laid.factors + turn * kRegister, sizeof(Register));
      std::memcpy(raised + place, laid.raised + turn * kRegister, sizeof(IntRegister));
    }
  }
  return {batch, values, factors, raised};
}

// Store the words of the next registers of a row, of which `left` are left, as transposed.
template <int kCount>
TPC_INLINE void store_words(const char* source, int64_t left, IntRegister* out) {
  IntRegister words[kCount];
  if (left >= kCount) {
#pragma GCC unroll 8
    for (int word = 0; word < kCount; ++word)
      words[word] = load_bytes<IntRegister>(source + word * kWide);
    transpose_words<kCount>(words);
    std::memcpy(out, words, sizeof words);
    return;
  }
  for (int word = 0; word < kCount; ++word)
    words[word] = word < left ? load_bytes<IntRegister>(source + word * kWide) : IntRegister{};
  transpose_words<kCount>(words);
  std::memcpy(out, words, sizeof words);
}

// The next registers of some rows that are transposed together: where they are in rows, and how many
// are left from there on.
struct Taken {
  const char* const* rows;
  int64_t offset, left;

  TPC_INLINE Taken after(int64_t registers) const {
    return {rows, offset + registers * kWide, left - registers};
  }
};

// Words of some rows, transposed, and those of the next ones if they are transposed ahead.
template <class Form, int kRows>
class Words {
 public:
  TPC_INLINE const IntRegister* of_row(int row) const { return words_[present_][row]; }

  TPC_INLINE void store(const Taken& taken, int row) {
    store_words<Form::kTaken>(taken.rows[row] + taken.offset, taken.left, words_[next_][row]);
  }

  TPC_INLINE void store_all(const Taken& taken) {
    for (int row = 0; row < kRows; ++row) store(taken, row);
    take_next();
  }

  // Go on to the words that were stored last.
  TPC_INLINE void take_next() { present_ = next_, next_ = Form::kAhead ? 1 - next_ : 0; }

 private:
  alignas(kLoad) IntRegister words_[Form::kAhead ? 2 : 1][kRows][Form::kTaken];
  int present_ = 0, next_ = 0;
};

// What is fetched while rows are multiplied: the next ones into the nearest cache, and later ones.
struct Fetched {
  const char *next, *later;
  int64_t stride;
};

// Multiply `kRows` rows by the values of `kBatch` sequences, for the blocks of a turn. Sums of
// blocks are `[sequence][row]`. Words that are transposed ahead become those of the next rows.
template <class A, int kBits, int kLoads, int kBlocks, int kRows, int kBatch>
TPC_INLINE void sums_together(Words<Transposed<kLoads, kBlocks>, kRows>& words, Taken now,
                              const Taken& next, const Fetched& fetched, const char* values,
                              IntRegister* sums) {
  using Form = Transposed<kLoads, kBlocks>;
  constexpr int kTaken = Form::kTaken, kSpread = Form::kSpread, kSums = kBatch * kRows;
  constexpr int kParts = ::kParts<A, kBits>;
  constexpr int kHalves = kSpread > 1 ? kSpread / 2 : 1;
  IntRegister halves[kHalves][kSums];  // sums of two passes each
  int64_t offset = 0;
  const auto multiply = [&](IntRegister* totals) TPC_ALWAYS {
    int stored = 0;
    if constexpr (!Form::kAhead) words.store_all(now);
#pragma GCC unroll 1
    for (int word = 0; word < kTaken; ++word, values += kParts * kBatch * kWide) {
      if constexpr (Form::kAhead)
        for (; stored * kTaken < (word + 1) * kRows; ++stored) words.store(next, stored);
      ShortRegister loaded[kRows];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        if (word % kRegisters == 0) {
          const int64_t place = row * fetched.stride + offset + word * kWide;
          __builtin_prefetch(fetched.next + place);
          fetch_line(fetched.later + place);
        }
        loaded[row] = load_shorts(words.of_row(row) + word), keep(loaded[row]);
      }
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        ShortRegister parts[kRows];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
          parts[row] = A::template part<kBits>(loaded[row], part);
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) {
          ShortRegister value = load_shorts(values + (part * kBatch + b) * kWide);
          keep(value);
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            IntRegister& total = totals[b * kRows + row];
            total = A::template multiply<kBits>(total, parts[row], value);
            if constexpr (kRegisters > 1) keep(total);  // compilers would first make all products
          }
        }
      }
    }
    if constexpr (Form::kAhead) words.take_next();
    offset += kTaken * kWide;
  };
  if constexpr (kSpread == 1) {
    IntRegister totals[kSums] = {};
    multiply(totals);
#pragma GCC unroll 16
    for (int sum = 0; sum < kSums; ++sum) sums[sum] = blocks_in_order<kBlocks>(totals[sum]);
  } else {
    const int64_t needed = (now.left + kTaken - 1) / kTaken;
    const int64_t passes = needed < kSpread ? needed : kSpread;
#pragma GCC unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      IntRegister totals[kSums] = {};
      multiply(totals);
      now = now.after(kTaken);
      IntRegister* half = halves[pass / 2];
      if (pass % 2 == 0) {
#pragma GCC unroll 16
        for (int sum = 0; sum < kSums; ++sum) half[sum] = totals[sum];
      } else {
#pragma GCC unroll 16
        for (int sum = 0; sum < kSums; ++sum) half[sum] = lanes_added(half[sum], totals[sum]);
      }
    }
    const IntRegister none{};
    IntRegister* last = halves[passes / 2];
    if (passes % 2)
      for (int sum = 0; sum < kSums; ++sum) last[sum] = lanes_added(last[sum], none);
#pragma GCC unroll 16
    for (int sum = 0; sum < kSums; ++sum) {
      if constexpr (kSpread == 2) sums[sum] = halves[0][sum];
      else sums[sum] = pairs_added(halves[0][sum], passes > 2 ? halves[1][sum] : none);
    }
  }
}

// Multiply up to a register of rows by `kBatch` sequences. Products of blocks are
// `[sequence][row][block]`. Those of a single leaf are added by lane.
template <class A, int kBits, int kLoads, int kBlocks, int kBatch>
[[gnu::noinline]] void products_together(const Grouped& weight, int64_t count, int64_t left,
                                         const LaidRun<A>& run, bool single,
                                         const ValuesTogether& x, float* products,
                                         const Scratch& scratch) {
  using Form = Transposed<kLoads, kBlocks>;
  constexpr int kRows = (kBatch > 4 ? 2 : 4) / kRegisters;
  constexpr int kEach = Form::kWords;                    // the registers of a turn
  constexpr int kNear = (Form::kAhead ? 2 : 1) * kRows;  // rows from these to the next to fetch
  static const float kNothing[kRegister] = {};
  const int64_t stride = weight.stride(), groups = weight.groups(), far = rows_far_ahead(weight);
  const SteadyScales of_blocks(weight, run.block);
  const int64_t width = single ? kLanes : run.rounds * kLanes;
  const char* rows[kRegister + kRows];
  const uint16_t* scales[kRegister + kRows];
  for (int64_t row = 0; row < count + kRows - 1; ++row) {
    const int64_t number = row < count ? row : count - 1;
    rows[row] = weight.address(number) + weight.offset(run.start);
    scales[row] = of_blocks.of_row(number);
    const char* ahead = ahead_of(reinterpret_cast<const char*>(scales[row]), 2 * groups, far,
                                 left - number, scratch.next_scales);
    for (int64_t line = 0; line < 2 * groups; line += kLoad) __builtin_prefetch(ahead + line);
  }
  Taken now{rows, 0, run.loads * kRegisters};
  Words<Form, kRows> words;
  if constexpr (Form::kAhead) words.store_all(now);
  for (int64_t turn = 0; now.left > 0; ++turn) {
    // What products are added to.
    const bool added = single && turn >= kRegisters;
    float* const out = products + (single ? turn % kRegisters : turn) * kRegister;
    const float* const before = added ? out : kNothing;
    const int64_t width_before = added ? width : 0, place = turn * kBatch * kRegister;
    const float* const factors = x.factors + place;
    const int32_t* const raised = x.raised + place;
    for (int64_t row = 0; row < count; row += kRows) {
      Taken next{now.rows + kRows, now.offset, now.left};
      if (row + kRows >= count) next = Taken{rows, now.offset, now.left}.after(kEach);
      const char* first = now.rows[0] + now.offset;
      const Fetched fetched{first + kNear * stride,
                            ahead_of(first, stride, far, left - row, scratch.next_weights), stride};
      IntRegister sums[kBatch * kRows];
      sums_together<A, kBits, kLoads, kBlocks, kRows, kBatch>(
          words, now, next, fetched,
          x.values + turn * kEach * kParts<A, kBits> * kBatch * kWide, sums);
      now = next;
#pragma GCC unroll 4
      for (int index = 0; index < kRows; ++index) {
        const Register by = of_blocks.load(scales[row + index], turn * kRegister);
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) {
          const int64_t number = b * kRegister + row + index;
          const auto offset = load_bytes<IntRegister>(raised + b * kRegister);
          const Register values = A::numbers(sums[b * kRows + index] - offset) *
                                  load_register(factors + b * kRegister);
          const Register product =
              multiply_add(load_register(before + number * width_before), values, by);
          std::memcpy(out + number * width, &product, sizeof product);
        }
      }
    }
  }
}

// Add the lanes of a vector for each lane of a register.
TPC_INLINE Register lane_sums(Lanes* vectors) {
#if defined(__AVX512F__)
  return sums_of_all(vectors);
#else
  return sums(vectors);
#endif
}

// Whether rows are multiplied by all sequences together. A leaf must not have two blocks in a lane.
template <class A>
inline bool takes_together(const Grouped& weight, const LaidValues<A>& x) {
  const bool single = x.leaves == 1;
  if (x.batch < kFewestInGroups[!single] || x.batch > kMostInGroups[!single]) return false;
  if (x.runs > 1 || (!single && x.most_blocks > kLanes)) return false;
  return weight.steady_rows(1, *x.laid) > 0;
}

// Arrange the values of all sequences.
template <class A, int kBits, int kLoads, int kBlocks>
inline const ValuesTogether* all_together(const LaidValues<A>& x, Scratch& scratch) {
  auto* values = scratch.take<ValuesTogether>((x.batch + kMostTogether - 1) / kMostTogether);
  for (int64_t b = 0; b < x.batch; b += kMostTogether) {
    const int64_t left = x.batch - b;
    values[b / kMostTogether] = values_together<A, kBits, kLoads, kBlocks>(
        *x.laid, b, left < kMostTogether ? left : kMostTogether, scratch);
  }
  return values;
}

// Multiply the first rows by all sequences. Return how many; the others need `run_dots`.
template <class A, int kBits, int kLoads, int kBlocks>
inline int64_t dots_together(const Grouped& weight, int64_t rows, const LaidValues<A>& x,
                             float* out, int64_t out_stride, Scratch& scratch) {
  if (!x.together) return 0;
  const LaidRun<A>& run = *x.laid;
  const int64_t steady = weight.steady_rows(rows, run);
  if (steady == 0) return 0;
  const bool single = x.leaves == 1;
  const int64_t width = single ? kLanes : x.blocks();
  auto* products = scratch.take<float>(kMostTogether * kRegister * width);
  if constexpr (kRegisters > 1)  // the last turn of a round may have no loads
    std::memset(products, 0, sizeof(float) * static_cast<size_t>(kMostTogether * kRegister * width));
  const LeafSums<A> leaves(x, scratch);
  for (int64_t row = 0; row < steady; row += kRegister) {
    const int64_t count = steady - row < kRegister ? steady - row : kRegister;
    for (int64_t b = 0; b < x.batch; b += kMostTogether) {
      const ValuesTogether& values = x.together[b / kMostTogether];
      with_count<kMostTogether>(values.batch, [&](auto batch) TPC_ALWAYS {
        products_together<A, kBits, kLoads, kBlocks, decltype(batch)::value>(
            weight.from(row, 0), count, rows - row, run, single, values, products, scratch);
      });
      for (int64_t sequence = 0; sequence < values.batch; ++sequence) {
        float* source = products + sequence * kRegister * width;
        float* destination = out + row + (b + sequence) * out_stride;
        if (!single) {
          leaves.store(source, count, destination);
          continue;
        }
        const Register sums = lane_sums(reinterpret_cast<Lanes*>(source));
        std::memcpy(destination, &sums, sizeof(float) * static_cast<size_t>(count));
      }
    }
  }
  return steady;
}
#endif
