// Values in the order in which weights are loaded. Included by grouped.h.

// The values of some columns, in the order of the parts of loads, and the factors and sums of
// blocks.
template <class A>
struct Laid {
  const typename A::Value* values;
  float* factors;
  const typename A::Sum *sums, *raised;  // of values, and times what integers are raised by
  float* minima;  // what minima are multiplied by: sums times factors
};

// Adjacent leaves, among the columns of the whole weight, and the loads that have them.
struct Run {
  int64_t begin, end;
  int64_t start;  // the column with which the first load begins
  int64_t loads;  // whole sums of lanes: two loads if a block is wider than a load
  int64_t block;  // the first one
  bool whole;     // rows have scales for all blocks of each 16, see `Grouped::has_blocks`
};

// Some lanes of 16 blocks that belong to a leaf.
struct Share {
  int64_t leaf;
  IntRegisters lanes;  // -1 or 0
};

TPC_INLINE float power_of_two(int32_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  return load_bytes<float>(&bits);
}

// Round values of a block to integers, and return what to multiply them by. `sum` becomes their
// sum. A block with a value that is not finite gets NaN. Here the integers are below 2^15, and the
// factor is a power of two.
TPC_INLINE float rounded_block(Exact, const float* x, int64_t block, int32_t* whole, int32_t& sum) {
  constexpr int32_t kMostBits = 14, kLargest = 100;
  const uint32_t most = largest_of(x, block);
  const int32_t needed = kMostBits + 127 - static_cast<int32_t>(most >> 23);
  const int32_t up = needed > kLargest ? kLargest : needed;
  const bool finite = most < kInfinite;
  sum = rounded(x, block, finite ? power_of_two(up) : 0.0f, whole);
  return finite ? power_of_two(-up) : std::numeric_limits<float>::quiet_NaN();
}

TPC_INLINE float rounded_block(Bytes, const float* x, int64_t block, int32_t* whole, int32_t& sum) {
  return rounded_to_bytes(x, block, whole, sum);
}

// Lay out 64 columns, 16 lanes at a time.
template <int kBits>
TPC_INLINE void put_parts(const int32_t* x, int16_t* out) {
  const auto loaded = [&](int part) { return load_ints(x + part * kLanes); };
  const auto a = loaded(0), b = loaded(1), c = loaded(2), d = loaded(3);
  if constexpr (kBits == 4) {
    const auto even = evens(a, b), later = evens(c, d), odd = odds(a, b), last = odds(c, d);
    narrow(evens(even, later), out), narrow(evens(odd, last), out + 32);
    narrow(odds(even, later), out + 64), narrow(odds(odd, last), out + 96);
  } else {
    narrow(evens(a, b), out), narrow(evens(c, d), out + 16);
    narrow(odds(a, b), out + 32), narrow(odds(c, d), out + 48);
  }
}

template <int kBits>
TPC_INLINE void put_parts(const int32_t* x, int8_t* out) {
  const auto loaded = [&](int part) { return load_ints(x + part * kLanes); };
  const auto a = loaded(0), b = loaded(1), c = loaded(2), d = loaded(3);
  if constexpr (kBits == 4) {
    narrow(evens(a, b), out), narrow(evens(c, d), out + 16);
    narrow(odds(a, b), out + 64), narrow(odds(c, d), out + 80);
  } else {
    narrow(a, out), narrow(b, out + 16), narrow(c, out + 32), narrow(d, out + 48);
  }
}

template <class A, int kBits>
inline void lay_out(const float* x, int64_t columns, int64_t block, int64_t offset,
                    typename A::Value* values, float* factors, int32_t* sums) {
  alignas(kLoad) int32_t whole[kMostBlock];
  for (int64_t column = 0; column < columns; column += block) {
    const int64_t index = (offset + column) / block;
    factors[index] = rounded_block(A(), x + column, block, whole + column, sums[index]);
  }
  for (int64_t column = 0; column < columns; column += 4 * kLanes) {
    const int64_t place = offset + column, within = place % kColumns<kBits>;
    put_parts<kBits>(whole + column, values + (place - within) + within / kParts<A, kBits>);
  }
}

template <class A, int kBits>
inline void lay_out(const float* x, int64_t columns, int64_t block, int64_t offset, float* values,
                    float* factors, float* sums) {
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t place = offset + column, index = place / block, within = place % kColumns<kBits>;
    if (place % block == 0) factors[index] = 1.0f, sums[index] = 0.0f;
    sums[index] += x[column];
    const int64_t lane = within / kParts<A, kBits>, part = within % kParts<A, kBits>;
    values[place - within + kOfPart<A, kBits> * part + lane % 2 * kLanes + lane / 2] = x[column];
  }
}

// Lay out the values of a run, which begin at `x`. Other columns of its loads are zeros.
template <int kBits, class A>
inline Laid<A> laid_out(const Grouped& weight, const float* x, const Run& run, Scratch& scratch) {
  const int64_t block = weight.block(), columns = run.loads * kColumns<kBits>;
  const int64_t blocks = (columns / block + kLanes - 1) / kLanes * kLanes;
  auto* values = scratch.take<typename A::Value>(blocks * block);
  std::memset(values + columns, 0,
              sizeof(typename A::Value) * static_cast<size_t>(blocks * block - columns));
  auto* factors = scratch.take<float>(blocks);
  auto* sums = scratch.take<typename A::Sum>(blocks);
  std::memset(factors, 0, sizeof(float) * static_cast<size_t>(blocks));
  std::memset(sums, 0, sizeof(float) * static_cast<size_t>(blocks));
  for (int64_t offset = 0; offset < columns; offset += kMostBlock) {
    const int64_t left = columns - offset, count = left < kMostBlock ? left : kMostBlock;
    const int64_t first = run.start + offset, last = first + count;
    const float* source = x + (first - run.begin);
    float held[kMostBlock];
    if (first < run.begin || last > run.end) {
      std::memset(held, 0, sizeof held);
      const int64_t low = first < run.begin ? run.begin : first;
      const int64_t high = last > run.end ? run.end : last;
      if (low < high)
        std::memcpy(held + (low - first), x + (low - run.begin),
                    sizeof(float) * static_cast<size_t>(high - low));
      source = held;
    }
    lay_out<A, kBits>(source, count, block, offset, values, factors, sums);
  }
  auto* minima = scratch.take<float>(blocks);
  auto* raised = scratch.take<typename A::Sum>(blocks);
  const auto by = static_cast<typename A::Sum>(A::raised(weight.bits()));
  for (int64_t first = 0; first < blocks; first += kRegister) {
    const Register products = A::of_sums(sums + first) * load_register(factors + first);
    std::memcpy(minima + first, &products, sizeof products);
    for (int64_t place = first; place < first + kRegister; ++place)
      raised[place] = sums[place] * by;
  }
  return {values, factors, sums, raised, minima};
}

// About the bytes of sums of blocks that are found before they are multiplied.
constexpr int64_t kMostSums = 4096;

// A run, its leaves, and its values of each sequence.
template <class A>
struct LaidRun : Run {
  const Laid<A>* values;
  int64_t leaves, rounds;      // a round is 16 blocks
  const int64_t* first_block;  // of each leaf, and the end of the last one
  const Share* const* shares;  // of each round, and the end of the last one; null if not used
  int64_t together;            // rows whose sums of blocks are found before they are multiplied
  typename A::Sums* sums;      // memory for these sums
};

// The fewest sequences that panels are for. Fewer are faster one after the other.
constexpr int64_t kFewestInPanels = 5;

template <class A>
constexpr bool in_panels(int64_t batch) {
  return !std::is_same_v<A, Wide> && batch >= kFewestInPanels;
}

// The most blocks of leaves that are added side by side: they have a lane each. If a leaf has all
// lanes of a register, its blocks are added without moving them.
#if defined(__AVX512F__)
constexpr int64_t kMostSideBySide = kLanes - 1;
#elif defined(__AVX2__)
constexpr int64_t kMostSideBySide = kLanes;
#else
constexpr int64_t kMostSideBySide = 0;
#endif

struct ValuesTogether;  // see grouped_together.h

// Values of all sequences, as rows of few bits are multiplied by them.
template <class A>
struct LaidValues {
  int64_t batch, leaves, runs;
  const LaidRun<A>* laid;
  int64_t rounds;       // of all runs
  int64_t most_blocks;  // of a leaf
  int64_t apart = 0;    // as in other operands
  // The same as products with several sequences need it; null if they do not.
  const ValuesTogether* together = nullptr;  // of every 8 sequences
  const void* const* panels = nullptr;       // of every 16 sequences

  int64_t blocks() const { return rounds * kLanes; }

  // Whether leaves are added for several rows at a time: no leaf has two blocks in a lane.
  bool side_by_side() const { return leaves > 1 && most_blocks <= kMostSideBySide; }
};

template <class T>
struct Operand<Form<T, Grouped>> : LaidValues<typename Form<T, Grouped>::Arithmetic> {};

template <class T>
struct Operand<Form<T, Rounding>> : LaidValues<Bytes> {};

// Return the shares that leaves have in each 16 blocks of a run.
template <class A>
inline const Share* const* shares_of(const LaidRun<A>& run, Scratch& scratch) {
  auto* shares = scratch.take<const Share*>(run.rounds + 1);
  auto* next = scratch.take<Share>(run.rounds + run.leaves);
  for (int64_t round = 0; round < run.rounds; ++round) {
    shares[round] = next;
    for (int64_t leaf = 0; leaf < run.leaves; ++leaf) {
      int32_t lanes[kLanes];
      bool any = false;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const int64_t block = round * kLanes + lane;
        const bool belongs = block >= run.first_block[leaf] && block < run.first_block[leaf + 1];
        lanes[lane] = belongs ? -1 : 0, any |= belongs;
      }
      if (any) *next++ = {leaf, load_ints(lanes)};
    }
  }
  shares[run.rounds] = next;
  return shares;
}

// Lay out values in runs. Adjacent leaves that begin with a load are a run; if leaves are added
// side by side, adjacent leaves that begin with a block. Any other leaf is a run of its own. The
// blocks of a leaf have consecutive lanes, beginning with any one: the tree of their sums is the
// same for all.
template <int kBits, class A>
inline LaidValues<A> laid_runs(const Grouped& weight, const float* values, int64_t stride,
                               int64_t batch, int64_t columns, int64_t leaves, Scratch& scratch) {
  const int64_t block = weight.block(), first = weight.begin();
  const int64_t unit = block > kColumns<kBits> ? block : kColumns<kBits>;
  const auto begin_of = [&](int64_t leaf) {
    const int64_t longer = columns % leaves;
    return first + columns / leaves * leaf + (leaf < longer ? leaf : longer);
  };
  const int64_t widest = (columns + leaves - 1) / leaves;
  const bool apart =
      leaves > 1 && widest <= kMostSideBySide * block && !in_panels<A>(batch);
  const int64_t grain = apart ? block : unit;
  auto* runs = scratch.take<LaidRun<A>>(leaves);
  int64_t count = 0, rounds = 0, most_blocks = 0;
  for (int64_t leaf = 0, next; leaf < leaves; leaf = next) {
    const int64_t begin = begin_of(leaf);
    next = leaf + 1;
    while (begin % grain == 0 && next < leaves && begin_of(next) % grain == 0) ++next;
    const int64_t end = begin_of(next);
    const int64_t lanes = weight.has_supers() && begin % unit == 0 ? kLanes * block : unit;
    const int64_t start = begin / lanes * lanes;
    const int64_t loads = (end - start + unit - 1) / unit * (unit / kColumns<kBits>);
    LaidRun<A>& run = runs[count++];
    run = {{begin, end, start, loads, start / block, false}, nullptr, next - leaf, 0, nullptr,
           nullptr, 0, nullptr};
    run.rounds = (loads * kColumns<kBits> / block + kLanes - 1) / kLanes, rounds += run.rounds;
    run.whole = weight.has_blocks(run.block, run.rounds * kLanes);
    run.together = rows_within(kMostSums, run.rounds * int64_t{sizeof(Registers)});
    run.sums = scratch.take<typename A::Sums>(run.together * run.rounds * kRegisters);
    auto* first_block = scratch.take<int64_t>(run.leaves + 1);
    for (int64_t place = 0; place < run.leaves; ++place)
      first_block[place] = (begin_of(leaf + place) - start) / grain * (grain / block);
    first_block[run.leaves] = (end - start + grain - 1) / grain * (grain / block);
    run.first_block = first_block;
    for (int64_t place = 0; place < run.leaves; ++place) {
      const int64_t blocks = first_block[place + 1] - first_block[place];
      most_blocks = most_blocks < blocks ? blocks : most_blocks;
    }
    auto* laid = scratch.take<Laid<A>>(batch);
    for (int64_t b = 0; b < batch; ++b)
      laid[b] = laid_out<kBits, A>(weight, values + (begin - first) + b * stride, run, scratch);
    run.values = laid;
  }
  const LaidValues<A> x{batch, leaves, count, runs, rounds, most_blocks};
  if (leaves > 1 && !x.side_by_side())
    for (LaidRun<A>* run = runs; run != runs + count; ++run) run->shares = shares_of(*run, scratch);
  return x;
}

template <class A>
[[gnu::noinline]] LaidValues<A> laid_values(const Grouped& weight, const float* values,
                                            int64_t stride, int64_t batch, int64_t columns,
                                            int64_t leaves, Scratch& scratch) {
  const auto lay = weight.bits() == 8 ? laid_runs<8, A> : laid_runs<4, A>;
  return lay(weight, values, stride, batch, columns, leaves, scratch);
}

// Multiply the values of a sequence by a factor.
template <class A>
inline void scale(const LaidValues<A>& x, int64_t b, float factor) {
  for (const LaidRun<A>* run = x.laid; run != x.laid + x.runs; ++run)
    for (int64_t block = 0; block < run->rounds * kLanes; ++block)
      run->values[b].factors[block] *= factor, run->values[b].minima[block] *= factor;
}

// Lay out values, of which products take some sequences.
template <class F>
inline Operand<F> laid_operand(Sequences<F> values, int64_t batch, int64_t columns, int64_t leaves,
                               const Grouped& weight, Scratch& scratch) {
  using A = typename F::Arithmetic;
  return {laid_values<A>(weight, values.first, values.stride, batch, columns, leaves, scratch)};
}
