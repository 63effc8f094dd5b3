// Products of weights of few bits with several sequences.
//
// Included by grouped.h. A piece is the two or four values in the 32 bits of a lane. Lanes belong to
// sequences: each of `kSequences` has `kSpread` adjacent pieces in a register. Parts of some rows are
// stored in the nearest cache, and each piece of a row is multiplied by all sequences. Sums of blocks
// are exact, and their products are added in the order of `run_dots`, so the bits are the same.

// The most columns of rows in the nearest cache.
constexpr int64_t kHeld = 128;

// The values of `kSequences` sequences for a run, `[block][part][pieces][lane]`. What belongs to a
// block and a sequence is `[block][lane]`.
template <class A, int kSequences>
struct Panel {
  static constexpr int kWide = kSequences < kRegister ? kRegister : kSequences;  // lanes of a row
  static constexpr int kSpread = kWide / kSequences;

  const int32_t* values;
  const float *factors, *minima;
  const int32_t *sums, *raised;  // of values, and times what integers are raised by
};

// The rows that are multiplied at a time, as registers allow.
template <int kSequences>
constexpr int kPanelRows = kRegisters == 1 ? 16 : kSequences > kRegister ? 4 : 8;

// Repeat numbers of blocks of a sequence in its lanes.
template <int kSequences, int kWide, class T>
TPC_INLINE void put_blocks(const T* from, int64_t blocks, int64_t b, T* to) {
  for (int64_t own = 0; own < blocks; ++own)
    for (int64_t lane = b; lane < kWide; lane += kSequences) to[own * kWide + lane] = from[own];
}

// Lay out values of up to `kSequences` sequences. Other lanes are zeros.
template <class A, int kBits, int kSequences>
inline Panel<A, kSequences> panel_of(const Laid<A>* x, int64_t sequences, const Run& run,
                                     int64_t block, Scratch& scratch) {
  using Found = Panel<A, kSequences>;
  constexpr int kWide = Found::kWide, kSpread = Found::kSpread;
  constexpr int kEach = sizeof(int32_t) / sizeof(typename A::Value);
  constexpr int kHere = kParts<A, kBits>, kPieces = kLanes * kHere;
  const int64_t columns = run.loads * kColumns<kBits>, blocks = (columns + block - 1) / block;
  const int64_t within = block < kColumns<kBits> ? block : kColumns<kBits>;
  const int64_t lanes = within / (kEach * kHere);
  auto* values = scratch.take<int32_t>(columns / kEach * kSequences);
  auto *factors = scratch.take<float>(blocks * kWide), *minima = scratch.take<float>(blocks * kWide);
  auto *sums = scratch.take<int32_t>(blocks * kWide), *raised = scratch.take<int32_t>(blocks * kWide);
  if (sequences < kSequences) {
    std::memset(values, 0, sizeof(int32_t) * static_cast<size_t>(columns / kEach * kSequences));
    std::memset(factors, 0, sizeof(float) * static_cast<size_t>(blocks * kWide));
    std::memset(minima, 0, sizeof(float) * static_cast<size_t>(blocks * kWide));
    std::memset(sums, 0, sizeof(int32_t) * static_cast<size_t>(blocks * kWide));
    std::memset(raised, 0, sizeof(int32_t) * static_cast<size_t>(blocks * kWide));
  }
  for (int64_t b = 0; b < sequences; ++b) {
    put_blocks<kSequences, kWide>(x[b].factors, blocks, b, factors);
    put_blocks<kSequences, kWide>(x[b].minima, blocks, b, minima);
    put_blocks<kSequences, kWide>(x[b].sums, blocks, b, sums);
    put_blocks<kSequences, kWide>(x[b].raised, blocks, b, raised);
  }
  const int64_t steps = lanes * kSequences;  // the values of a part in a block
  for (int64_t part = 0; part < run.loads * kHere; ++part) {
    const int64_t load = part / kHere, from = kEach * part * kLanes;
    int32_t* first = values + load * kPieces * kSequences + part % kHere * steps;
#if defined(__AVX2__)
    if constexpr (kSpread == 1) {
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
            std::memcpy(to + (at / lanes * kHere * lanes + at % lanes) * kSequences, held + own,
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
        for (int64_t at = 0; at < lanes; at += kSpread, to += kWide)
          std::memcpy(to, own + kEach * at, sizeof(int32_t) * kSpread);
      }
  }
  return {values, factors, minima, sums, raised};
}

// `kSequences` lanes for each row, whose number is 16 places after that of the row before.
template <int kSequences, class T>
TPC_INLINE auto spread(const T* from) {
  if constexpr (kSequences >= kRegister) {
    return everywhere(*from);
  } else if constexpr (2 * kSequences == kRegister) {
    return spliced(everywhere(from[0]), everywhere(from[kLanes]), kSequences);
  } else {
    typedef T Some __attribute__((vector_size(sizeof(T) * kSequences)));
    Some held[kRegister / kSequences];
    for (int own = 0; own < kRegister / kSequences; ++own) held[own] = Some{} + from[own * kLanes];
    return load_bytes<decltype(everywhere(*from))>(held);
  }
}

// The sums of each row and sequence, `[row][sequence]`, from those of lanes.
template <int kSpread, int kCount>
TPC_INLINE void sequence_sums(IntRegister* sums) {
#pragma GCC unroll 2
  for (int count = kCount, spread = kSpread; spread > 1; spread /= 2) {
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
};

template <int kFirst>
struct Accumulators<0, kFirst> {
  template <class F>
  TPC_INLINE void each(const F&) {}
};

// Adjacent lines that are fetched, one at a time.
struct Lines {
  const char* next;
  int64_t due = 0;

  TPC_INLINE void fetch() {
    if (due == 0) return;
    fetch_line(next);
    --due, next += kLoad;
  }
};

// Multiplies a run of some rows by a panel, one leaf after the other. Rows from `rows` on are the last
// one again.
template <class A, int kLowBits, int kSequences>
class PanelRows {
  using X = Panel<A, kSequences>;
  static constexpr int kRows = kPanelRows<kSequences>, kWide = X::kWide, kSpread = X::kSpread;
  static constexpr int kOfRow = kWide / kRegister, kProducts = kRows * kOfRow;
  static constexpr int kEach = sizeof(int32_t) / sizeof(typename A::Value);
  static constexpr int kHere = kParts<A, kLowBits>, kPieces = kLanes * kHere;  // of a load
  static constexpr int64_t kLoads = kHeld / kColumns<kLowBits>;

 public:
  static constexpr int kSums = kProducts / kSpread;  // registers of sums, `[row][sequence]`

  PanelRows(const Grouped& weight, int64_t rows, const Run& run, const X& x)
      : weight_(weight), run_(run), x_(x) {
    for (int row = 0; row < kRows; ++row) rows_[row] = row < rows ? row : rows - 1;
  }

  // Set the sums of a leaf, given its loads.
  TPC_INLINE void leaf_sums(int64_t first, int64_t last, Lines& ahead, Register* found) {
    const int64_t block = weight_.block();
    const int64_t loads = block > kColumns<kLowBits> ? block / kColumns<kLowBits> : 1;
    const int64_t blocks = block < kColumns<kLowBits> ? kColumns<kLowBits> / block : 1;
    Register totals[kLanes * kSums];
    uint32_t lanes = 0;  // those with blocks
    const int64_t begin = first / loads * blocks;
    int64_t own = begin;
    for (int64_t load = first; load < last; load += loads) {
      ahead.due += kRows * loads;
      for (int64_t each = 0; each < loads; ++each) hold(load + each, each);
      for (int64_t one = 0; one < blocks; ++one, ++own) {
        if (own == begin || own % kLanes == 0) take_scales(own);
        Register* to = totals + own % kLanes * kSums;
        if (!(lanes >> own % kLanes & 1)) put<false>(to, nullptr);
        lanes |= 1u << own % kLanes;
        IntRegister sums[kProducts];
        multiply(one * kLanes / blocks, kLanes / blocks, loads * kHere,
                 x_.values + own * block / kEach * kSequences, ahead, sums);
        add_block(sums, own, to);
      }
    }
    // The tree of `sum`. Lanes without blocks would add zeros.
    for (int64_t apart = kLanes / 2; apart > 0; apart /= 2)
      for (int64_t at = 0; at < apart; ++at)
        if (lanes >> (at + apart) & 1) {
          if (!(lanes >> at & 1)) put<false>(totals + at * kSums, nullptr);
          put<true>(totals + at * kSums, totals + (at + apart) * kSums);
          lanes |= 1u << at;
        }
    put<false>(found, nullptr), put<true>(found, totals);
  }

 private:
  static constexpr int64_t kRow = kLoads * kPieces;  // of what is held

  // Set sums to zeros, or add others to them.
  template <bool kAdd>
  static TPC_INLINE void put(Register* totals, const Register* others) {
#pragma GCC unroll 16
    for (int at = 0; at < kSums; ++at) totals[at] = kAdd ? totals[at] + others[at] : Register{};
  }

  // Multiply some pieces of each part of a block by the values of the block.
  TPC_INLINE void multiply(int64_t first, int64_t pieces, int64_t parts, const int32_t* x,
                           Lines& ahead, IntRegister* sums) const {
    const int32_t* from = held_ + first;
    Accumulators<kProducts> products;
    for (int64_t part = 0; part < parts; ++part, from += kLanes)
      for (int64_t at = 0; at < pieces; at += kSpread, x += kWide) {
        ahead.fetch();
        add(products, from + at, x);
      }
    products.each([&](auto at, IntRegister& sum) TPC_ALWAYS { sums[decltype(at)::value] = sum; });
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
    for (int row = 0; row < kRows; ++row) {
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
        const Parts<A, kBits> parts(from + own * kBytes, high + own * kBytes * kHigh<kBits> / 4);
#pragma GCC unroll 4
        for (int part = 0; part < kHere; ++part) {
          const ShortRegister found = parts[part];
          std::memcpy(to + part * kLanes + own * kRegister, &found, sizeof found);
        }
      }
    }
  }

  TPC_INLINE void add(Accumulators<kProducts>& sums, const int32_t* from, const int32_t* x) const {
    ShortRegister values[kOfRow];
#pragma GCC unroll 4
    for (int own = 0; own < kOfRow; ++own) values[own] = load_shorts(x + own * kRegister);
    sums.each([&](auto at, IntRegister& sum) TPC_ALWAYS {
      constexpr int kRowOfSum = decltype(at)::value / kOfRow;
      const ShortRegister own_row = everywhere<kSpread>(from + kRowOfSum * kRow);
      sum = A::template multiply<kLowBits>(sum, own_row, values[decltype(at)::value % kOfRow]);
    });
  }

  // Scales and offsets of the 16 lanes with a block of the run.
  TPC_INLINE void take_scales(int64_t first) {
    for (int row = 0; row < kRows; ++row)
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

  TPC_INLINE void add_block(IntRegister* sums, int64_t block, Register* totals) const {
    sequence_sums<kSpread, kProducts>(sums);
    const bool minima = weight_.has_minima(), offsets = weight_.has_offsets();
#pragma GCC unroll 16
    for (int at = 0; at < kSums; ++at) {
      const int64_t place = at * kRegister / kSequences * kLanes + block % kLanes;
      const int64_t lane = block * kWide + at * kRegister % kWide;
      if (offsets)
        sums[at] -= spread<kSequences>(offsets_ + place) *
                    load_bytes<IntRegister>(x_.sums + lane);
      const Register numbers =
          minima ? A::numbers(sums[at]) : A::less(sums[at], x_.raised + lane);
      const Register products = numbers * load_register(x_.factors + lane);
      totals[at] =
          multiply_add(totals[at], products, spread<kSequences>(scales_ + place));
      if (minima)
        totals[at] = multiply_add(totals[at], load_register(x_.minima + lane),
                                  spread<kSequences>(minima_ + place));
    }
  }

  const Grouped& weight_;
  const Run& run_;
  const X& x_;
  int64_t rows_[kRows];
  alignas(kLoad) int32_t held_[kRows * kRow];
  alignas(kLoad) float scales_[kRows * kLanes], minima_[kRows * kLanes];
  alignas(kLoad) int32_t offsets_[kRows * kLanes];
};

// Lay out up to `kSequences` sequences from `first` on, for each run.
template <class A, int kBits, int kSequences>
inline const void* panels_of(const Grouped& weight, const LaidValues<A>& x, int64_t first,
                             Scratch& scratch) {
  const int64_t after = x.batch - first, sequences = after < kSequences ? after : kSequences;
  auto* found = scratch.take<Panel<A, kSequences>>(x.runs);
  for (int64_t run = 0; run < x.runs; ++run)
    found[run] = panel_of<A, kBits, kSequences>(x.laid[run].values + first, sequences, x.laid[run],
                                                weight.block(), scratch);
  return found;
}

// Whether the last sequences, so many, have panels of 16.
constexpr bool are_wide(int64_t left) { return left > 8; }

// Make the panels of values by which several products multiply.
template <class A>
[[gnu::noinline]] void add_panels(const Grouped& weight, LaidValues<A>& x, Scratch& scratch) {
  auto* found = scratch.take<const void*>((x.batch + kLanes - 1) / kLanes);
  const bool whole = weight.bits() == 8;
  for (int64_t first = 0; first < x.batch; first += kLanes) {
    const auto make = are_wide(x.batch - first)
                          ? whole ? panels_of<A, 8, 16> : panels_of<A, 4, 16>
                          : whole ? panels_of<A, 8, 8> : panels_of<A, 4, 8>;
    found[first / kLanes] = make(weight, x, first, scratch);
  }
  x.panels = found;
}

// Multiply rows by up to `kSequences` sequences from `first` on.
template <class A, int kBits, int kSequences>
[[gnu::noinline]] void panel_rows(const Grouped& weight, int64_t rows, const LaidValues<A>& x,
                                  int64_t first, float* out, int64_t out_stride,
                                  Scratch& scratch) {
  using Rows = PanelRows<A, kBits, kSequences>;
  constexpr int kRows = kPanelRows<kSequences>, kFound = kRows * kSequences;
  const int64_t after = x.batch - first, sequences = after < kSequences ? after : kSequences;
  const void* own_panels = x.panels ? x.panels[first / kLanes]
                                    : panels_of<A, kBits, kSequences>(weight, x, first, scratch);
  const auto* panels = static_cast<const Panel<A, kSequences>*>(own_panels);
  auto* terms = scratch.take<Register>(x.leaves * Rows::kSums);
  const int64_t far = rows_far_ahead(weight);
  for (int64_t row = 0; row < rows; row += kRows) {
    Lines ahead{ahead_of(weight.address(row), weight.stride(), far, rows - row,
                         scratch.next_weights)};
    const Grouped own = weight.from(row, 0);
    Register* to = terms;
    for (int64_t run = 0; run < x.runs; ++run) {
      const int64_t* blocks = x.laid[run].first_block;
      const auto load = [&](int64_t leaf) {
        return blocks[leaf] * weight.block() / kColumns<kBits>;
      };
      Rows product(own, rows - row, x.laid[run], panels[run]);
      for (int64_t leaf = 0; leaf < x.laid[run].leaves; ++leaf, to += Rows::kSums)
        product.leaf_sums(load(leaf), load(leaf + 1), ahead, to);
    }
    const auto* found = reinterpret_cast<float*>(terms);
    const int64_t kept = join_leaves(x, reinterpret_cast<float*>(terms), kFound);
    const int64_t count = rows - row < kRows ? rows - row : kRows;
    for (int64_t leaf = 0; leaf < kept; ++leaf, found += kFound)
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
    const auto run =
        are_wide(x.batch - first) ? panel_rows<A, kBits, 16> : panel_rows<A, kBits, 8>;
    run(weight, rows, x, first, out, out_stride, scratch);
  }
}
