// Products of weights of few bits with several sequences.
//
// Included by grouped.h. A piece is the two or four values in the 32 bits of a lane. Lanes belong to
// sequences: each of `kSequences` has `kSpread` adjacent pieces in a register. Parts of some rows are
// stored in the nearest cache, and each piece of a row is multiplied by all sequences. Sums of blocks
// are exact, and their products are added in the order of `run_dots`, so the bits are the same.

// The rows that are multiplied at a time, as registers allow.
constexpr int kPanelRows = kRegisters == 1 ? 16 : 4;
// The most columns that they have in the nearest cache.
constexpr int64_t kHeld = 128;

// The values of `kSequences` sequences for a run, `[block][part][pieces][lane]`. Factors and sums of
// blocks are in each lane.
template <class A, int kSequences>
struct Panel {
  const int32_t* values;
  const float* factors;
  const int32_t* sums;
};

// Lay out values of up to `kSequences` sequences. Other lanes are zeros.
template <class A, int kBits, int kSequences>
inline Panel<A, kSequences> panel_of(const Laid<A>* x, int64_t sequences, const Run& run,
                                  int64_t block, Scratch& scratch) {
  constexpr int kSpread = kLanes / kSequences, kEach = sizeof(int32_t) / sizeof(typename A::Value);
  constexpr int kHere = kParts<A, kBits>, kPieces = kLanes * kHere;
  const int64_t columns = run.loads * kColumns<kBits>, blocks = (columns + block - 1) / block;
  const int64_t within = block < kColumns<kBits> ? block : kColumns<kBits>;
  const int64_t lanes = within / (kEach * kHere);
  auto* values = scratch.take<int32_t>(columns / kEach * kSequences);
  auto* factors = scratch.take<float>(blocks * kLanes);
  auto* sums = scratch.take<int32_t>(blocks * kLanes);
  if (sequences < kSequences) {
    std::memset(values, 0, sizeof(int32_t) * static_cast<size_t>(columns / kEach * kSequences));
    std::memset(factors, 0, sizeof(float) * static_cast<size_t>(blocks * kLanes));
    std::memset(sums, 0, sizeof(int32_t) * static_cast<size_t>(blocks * kLanes));
  }
  for (int64_t b = 0; b < sequences; ++b)
    for (int64_t own = 0; own < blocks; ++own)
      for (int64_t lane = b; lane < kLanes; lane += kSequences) {
        factors[own * kLanes + lane] = x[b].factors[own];
        sums[own * kLanes + lane] = x[b].sums[own];
      }
  const int64_t steps = lanes / kSpread * kLanes;  // the values of a part in a block
  for (int64_t part = 0; part < run.loads * kHere; ++part) {
    const int64_t load = part / kHere, from = kEach * part * kLanes;
    int32_t* first = values + load * kPieces * kSequences + part % kHere * steps;
#if defined(__AVX2__)
    if constexpr (kSequences == kLanes) {
      for (int64_t b = 0; b < sequences; b += kRegister)
        for (int64_t lane = 0; lane < kLanes; lane += kRegister) {
          Square held[kRegister] = {};
          const int64_t left = sequences - b, count = left < kRegister ? left : kRegister;
          for (int64_t own = 0; own < count; ++own)
            held[own] = load_bytes<Square>(x[b + own].values + from + kEach * lane);
          transpose(held);
          int32_t* to = first + b;
          for (int64_t own = 0; own < kRegister; ++own) {
            const int64_t at = lane + own;
            std::memcpy(to + (at / lanes * kHere * lanes + at % lanes) * kLanes, held + own,
                        sizeof(Square));
          }
        }
      continue;
    }
#endif
    for (int64_t lane = 0; lane < kLanes; lane += lanes, first += kHere * steps)
      for (int64_t b = 0; b < sequences; ++b) {
        int32_t* to = first + b * kSpread;
        const auto* own = x[b].values + from + kEach * lane;
        for (int64_t at = 0; at < lanes; at += kSpread, to += kLanes)
          std::memcpy(to, own + kEach * at, sizeof(int32_t) * kSpread);
      }
  }
  return {values, factors, sums};
}

// `kSequences` lanes for each row, whose number is 16 places after that of the row before.
template <int kSequences, class Found, class T>
TPC_INLINE Found spread(const T* from) {
  if constexpr (kSequences >= kRegister) {
    return Found{} + *from;
  } else {
    typedef T Some __attribute__((vector_size(sizeof(T) * kSequences)));
    Some held[kRegister / kSequences];
    for (int own = 0; own < kRegister / kSequences; ++own) held[own] = Some{} + from[own * kLanes];
    return load_bytes<Found>(held);
  }
}

// The sums of each row and sequence, `[row][sequence]`, from those of lanes.
template <int kSequences>
TPC_INLINE void sequence_sums(IntRegister* sums) {
#pragma GCC unroll 2
  for (int count = kPanelRows * kRegisters, lanes = kLanes; lanes > kSequences; lanes /= 2) {
    count /= 2;
#pragma GCC unroll 8
    for (int at = 0; at < count; ++at) sums[at] = pairs_added(sums[2 * at], sums[2 * at + 1]);
  }
}

// Sums in registers, for loops in which compilers would hold an array of them in memory.
template <int kCount, int kFirst = 0>
struct Accumulators {
  IntRegister first{};
  Accumulators<kCount - 1, kFirst + 1> others;

  template <class F>
  TPC_INLINE void each(const F& run) {
    run(std::integral_constant<int, kFirst>(), first);
    others.each(run);
  }

  TPC_INLINE void store(IntRegister* to) const {
    to[kFirst] = first;
    others.store(to);
  }
};

template <int kFirst>
struct Accumulators<0, kFirst> {
  template <class F>
  TPC_INLINE void each(const F&) {}
  TPC_INLINE void store(IntRegister*) const {}
};

// Prefetches of adjacent lines, some at a time.
class Lines {
 public:
  explicit Lines(const char* from) : next_(from) {}

  TPC_INLINE void fetch(int64_t count) {
    for (; count > 0; --count, next_ += kLoad) __builtin_prefetch(next_, 0, 2);
  }

 private:
  const char* next_;
};

// Multiplies a run of `kPanelRows` rows by a panel, one leaf after the other. Rows from `rows` on are
// the last one again.
template <class A, int kLowBits, int kSequences>
class PanelRows {
  static constexpr int kSpread = kLanes / kSequences, kGroups = kPanelRows / kSpread;
  static constexpr int kEach = sizeof(int32_t) / sizeof(typename A::Value);
  static constexpr int kHere = kParts<A, kLowBits>, kPieces = kLanes * kHere;  // of a load
  static constexpr int64_t kLoads = kHeld / kColumns<kLowBits>;

 public:
  PanelRows(const Grouped& weight, int64_t rows, const Run& run, const Panel<A, kSequences>& x)
      : weight_(weight), run_(run), x_(x) {
    for (int row = 0; row < kPanelRows; ++row) rows_[row] = row < rows ? row : rows - 1;
  }

  // Set the sums of a leaf, `[row][sequence]`, given its loads.
  TPC_INLINE void leaf_sums(int64_t first, int64_t last, Lines& ahead, Registers* found) {
    const int64_t block = weight_.block();
    const int64_t loads = block > kColumns<kLowBits> ? block / kColumns<kLowBits> : 1;
    const int64_t blocks = block < kColumns<kLowBits> ? kColumns<kLowBits> / block : 1;
    Registers totals[kLanes * kGroups];
    uint32_t lanes = 0;  // those with blocks
    const int64_t begin = first / loads * blocks;
    int64_t own = begin;
    for (int64_t load = first; load < last; load += loads) {
      ahead.fetch(kPanelRows * loads);
      for (int64_t each = 0; each < loads; ++each) hold(load + each, each);
      for (int64_t one = 0; one < blocks; ++one, ++own) {
        if (own == begin || own % kLanes == 0) take_scales(own);
        Registers* to = totals + own % kLanes * kGroups;
        if (!(lanes >> own % kLanes & 1)) put<false>(to, nullptr);
        lanes |= 1u << own % kLanes;
        Accumulators<kPanelRows * kRegisters> products;
        const int64_t places = kLanes / blocks;
        const int32_t* x = x_.values + own * block / kEach * kSequences;
        for (int64_t each = 0; each < loads; ++each)
          for (int64_t part = 0; part < kHere; ++part) {
            const int32_t* from = held_ + each * kPieces + part * kLanes + one * places;
            for (int64_t lane = 0; lane < places; lane += kSpread, x += kLanes)
              add(products, from + lane, x);
          }
        IntRegister sums[kPanelRows * kRegisters];
        products.store(sums);
        add_block(sums, own, to);
      }
    }
    // The tree of `sum`. Lanes without blocks would add zeros.
    for (int64_t apart = kLanes / 2; apart > 0; apart /= 2)
      for (int64_t at = 0; at < apart; ++at)
        if (lanes >> (at + apart) & 1) {
          if (!(lanes >> at & 1)) put<false>(totals + at * kGroups, nullptr);
          put<true>(totals + at * kGroups, totals + (at + apart) * kGroups);
          lanes |= 1u << at;
        }
    put<false>(found, nullptr), put<true>(found, totals);
  }

 private:
  static constexpr int64_t kRow = kLoads * kPieces;  // of what is held

  // Set sums to zeros, or add others to them.
  template <bool kAdd>
  static TPC_INLINE void put(Registers* totals, const Registers* others) {
#pragma GCC unroll 16
    for (int group = 0; group < kGroups; ++group)
      for (int own = 0; own < kRegisters; ++own) {
        Register& total = totals[group].each[own];
        total = kAdd ? total + others[group].each[own] : Register{};
      }
  }

  // Store the parts of a load of all rows.
  TPC_INLINE void hold(int64_t load, int64_t place) {
    if constexpr (kLowBits == 4) {
      if (weight_.bits() == 5) return hold_bits<5>(load, place);
      if (weight_.bits() == 6) return hold_bits<6>(load, place);
    }
    hold_bits<kLowBits>(load, place);
  }

  template <int kBits>
  TPC_INLINE void hold_bits(int64_t load, int64_t place) {
    const int64_t at = weight_.offset(run_.start) + load * kLoad;
    const bool inside = at >= 0 && at + kLoad <= weight_.stride();
    constexpr int64_t kHighLoad = kLoad * kHigh<kBits> / 4;
    const int64_t high_at = kHigh<kBits> ? weight_.high_offset(run_.start) + load * kHighLoad : 0;
    const bool high_inside = high_at >= 0 && high_at + kHighLoad <= weight_.high_stride();
    for (int row = 0; row < kPanelRows; ++row) {
      const char* bytes = weight_.address(rows_[row]);
      alignas(kLoad) char edge[kLoad];
      if (!inside) copy_inside(bytes, weight_.stride(), at, kLoad, edge);
      const char* from = inside ? bytes + at : edge;
      alignas(kLoad) char high_edge[kHighLoad + 1];
      const char* high = nullptr;
      if constexpr (kHigh<kBits> != 0) {
        high = weight_.high(rows_[row]) + high_at;
        if (!high_inside) {
          copy_inside(weight_.high(rows_[row]), weight_.high_stride(), high_at, kHighLoad, high_edge);
          high = high_edge;
        }
      }
      int32_t* to = held_ + row * kRow + place * kPieces;
#pragma GCC unroll 4
      for (int own = 0; own < kRegisters; ++own) {
        constexpr int64_t kBytes = 4 * kRegister;
        auto loaded = load_shorts(from + own * kBytes);
        auto more = load_high<A, kBits>(high + own * kBytes * kHigh<kBits> / 4);
        keep(loaded);
        if constexpr (kHigh<kBits> != 0) keep(more);
#pragma GCC unroll 4
        for (int part = 0; part < kHere; ++part) {
          const auto found =
              with_high<A, kBits>(A::template part<kLow<kBits>>(loaded, part), more, part);
          std::memcpy(to + part * kLanes + own * kRegister, &found, sizeof found);
        }
      }
    }
  }

  TPC_INLINE void add(Accumulators<kPanelRows * kRegisters>& sums, const int32_t* from,
                      const int32_t* x) const {
    ShortRegister values[kRegisters];
#pragma GCC unroll 4
    for (int own = 0; own < kRegisters; ++own) values[own] = load_shorts(x + own * kRegister);
    sums.each([&](auto at, IntRegister& sum) TPC_ALWAYS {
      constexpr int kRowOfSum = decltype(at)::value / kRegisters;
      const ShortRegister own_row = everywhere<kSpread>(from + kRowOfSum * kRow);
      sum = A::template multiply<kLowBits>(sum, own_row, values[decltype(at)::value % kRegisters]);
    });
  }

  // Scales and offsets of the 16 lanes with a block of the run.
  TPC_INLINE void take_scales(int64_t first) {
    for (int row = 0; row < kPanelRows; ++row)
      for (int lane = 0; lane < kLanes; lane += kRegister) {
        const int64_t own = run_.block + first / kLanes * kLanes + lane;
        const Register scales = weight_.scales(rows_[row], own);
        std::memcpy(scales_ + row * kLanes + lane, &scales, sizeof scales);
        if (weight_.has_minima()) {
          const Register minima = weight_.minima(rows_[row], own);
          std::memcpy(minima_ + row * kLanes + lane, &minima, sizeof minima);
        }
        if (!weight_.has_offsets()) continue;
        const IntRegister offsets = weight_.offsets(rows_[row], own);
        std::memcpy(offsets_ + row * kLanes + lane, &offsets, sizeof offsets);
      }
  }

  TPC_INLINE void add_block(IntRegister* sums, int64_t block, Registers* totals) const {
    sequence_sums<kSequences>(sums);
#pragma GCC unroll 16
    for (int at = 0; at < kGroups * kRegisters; ++at) {
      const int group = at / kRegisters, own = at % kRegisters;
      const int row = (group * kLanes + own * kRegister) / kSequences;
      const int64_t place = row * kLanes + block % kLanes;
      const bool minima = weight_.has_minima();
      const int bits = weight_.bits();
      const int32_t raised =
          bits == 5 || bits == 6 ? 1 << (bits - 1) : A::template kRaised<kLowBits>;
      IntRegister offsets = IntRegister{} + (minima ? 0 : raised);
      if (weight_.has_offsets()) offsets += spread<kSequences, IntRegister>(offsets_ + place);
      const int64_t lane = block * kLanes + own * kRegister;
      const Register factors = load_register(x_.factors + lane);
      const Register products = A::less(sums[at], offsets, x_.sums + lane) * factors;
      Register& total = totals[group].each[own];
      total = multiply_add(total, products, spread<kSequences, Register>(scales_ + place));
      if (minima)
        total = multiply_add(total, A::of_sums(x_.sums + lane) * factors,
                             spread<kSequences, Register>(minima_ + place));
    }
  }

  const Grouped& weight_;
  const Run& run_;
  const Panel<A, kSequences>& x_;
  int64_t rows_[kPanelRows];
  alignas(kLoad) int32_t held_[kPanelRows * kRow];
  alignas(kLoad) float scales_[kPanelRows * kLanes], minima_[kPanelRows * kLanes];
  alignas(kLoad) int32_t offsets_[kPanelRows * kLanes];
};

// Multiply rows by up to `kSequences` sequences from `first` on.
template <class A, int kBits, int kSequences>
[[gnu::noinline]] void panel_rows(const Grouped& weight, int64_t rows, const LaidValues<A>& x,
                                  int64_t first, float* out, int64_t out_stride,
                                  Scratch& scratch) {
  constexpr int kGroups = kPanelRows * kSequences / kLanes;
  const int64_t after = x.batch - first, sequences = after < kSequences ? after : kSequences;
  auto* panels = scratch.take<Panel<A, kSequences>>(x.runs);
  for (int64_t run = 0; run < x.runs; ++run)
    panels[run] = panel_of<A, kBits, kSequences>(x.laid[run].values + first, sequences, x.laid[run],
                                                 weight.block(), scratch);
  auto* terms = scratch.take<Registers>(x.leaves * kGroups);
  const int64_t far = rows_far_ahead(weight);
  for (int64_t row = 0; row < rows; row += kPanelRows) {
    Lines ahead(ahead_of(weight.address(row), weight.stride(), far, rows - row,
                         scratch.next_weights));
    const Grouped own = weight.from(row, 0);
    Registers* to = terms;
    for (int64_t run = 0; run < x.runs; ++run) {
      const int64_t* blocks = x.laid[run].first_block;
      const auto load = [&](int64_t leaf) {
        return blocks[leaf] * weight.block() / kColumns<kBits>;
      };
      PanelRows<A, kBits, kSequences> product(own, rows - row, x.laid[run], panels[run]);
      for (int64_t leaf = 0; leaf < x.laid[run].leaves; ++leaf, to += kGroups)
        product.leaf_sums(load(leaf), load(leaf + 1), ahead, to);
    }
    const auto* found = reinterpret_cast<float*>(terms);
    const int64_t kept =
        join_leaves(x, reinterpret_cast<float*>(terms), kGroups * kLanes);
    const int64_t count = rows - row < kPanelRows ? rows - row : kPanelRows;
    for (int64_t leaf = 0; leaf < kept; ++leaf, found += kGroups * kLanes)
      for (int64_t b = 0; b < sequences; ++b)
        for (int64_t own = 0; own < count; ++own)
          out[leaf * x.apart + row + own + (first + b) * out_stride] = found[own * kSequences + b];
  }
}

// Multiply rows by all sequences. Blocks of rows stay in the nearest cache for more than 16.
template <class A, int kBits>
inline void panel_dots(const Grouped& weight, int64_t rows, const LaidValues<A>& x, float* out,
                       int64_t out_stride, Scratch& scratch) {
  for (int64_t first = 0; first < x.batch; first += kLanes) {
    const int64_t left = x.batch - first;
    const auto run = left > 8 ? panel_rows<A, kBits, 16> : panel_rows<A, kBits, 8>;
    run(weight, rows, x, first, out, out_stride, scratch);
  }
}
