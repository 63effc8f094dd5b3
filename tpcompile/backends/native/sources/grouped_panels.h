// Products of weights of few bits with several sequences.
//
// Included by grouped.h. A piece is the two or four values in the 32 bits of a lane. Lanes belong
// to sequences: each of `kSequences` has `kSpread` adjacent pieces in a register. Parts of some
// rows are stored in the nearest cache, and each piece of a row is multiplied by all sequences.
// Sums of blocks are exact, and their products are added in the order of `run_dots`, so the bits
// are the same.

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
TPC_INLINE void put_blocks(const T* values, int64_t blocks, int64_t b, T* out) {
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t lane = b; lane < kWide; lane += kSequences)
      out[block * kWide + lane] = values[block];
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
    const int64_t load = part / kHere, offset = kEach * part * kLanes;
    int32_t* first = values + load * kPieces * kSequences + part % kHere * steps;
#if defined(__AVX2__)
    if constexpr (kSpread == 1) {
      for (int64_t b = 0; b < sequences; b += kRegister)
        for (int64_t lane = 0; lane < kLanes; lane += kRegister) {
          Square held[kRegister] = {};
          const int64_t left = sequences - b, count = left < kRegister ? left : kRegister;
          for (int64_t line = 0; line < count; ++line)
            held[line] = load_bytes<Square>(x[b + line].values + offset + kEach * lane);
          transpose(held);
          int32_t* out = first + b;
          for (int64_t line = 0; line < kRegister; ++line) {
            const int64_t place = lane + line;
            std::memcpy(out + (place / lanes * kHere * lanes + place % lanes) * kSequences,
                        held + line, sizeof(Square));
          }
        }
      continue;
    }
#endif
    for (int64_t lane = 0; lane < kLanes; lane += lanes, first += kHere * steps)
      for (int64_t b = 0; b < sequences; ++b) {
        int32_t* out = first + b * kSpread;
        const auto* pieces = x[b].values + offset + kEach * lane;
        for (int64_t piece = 0; piece < lanes; piece += kSpread, out += kWide)
          std::memcpy(out, pieces + kEach * piece, sizeof(int32_t) * kSpread);
      }
  }
  return {values, factors, minima, sums, raised};
}

// `kSequences` lanes for each row, whose number is 16 places after that of the row before.
template <int kSequences, class T>
TPC_INLINE auto spread(const T* numbers) {
  if constexpr (kSequences >= kRegister) {
    return everywhere(*numbers);
  } else if constexpr (2 * kSequences == kRegister) {
    return spliced(everywhere(numbers[0]), everywhere(numbers[kLanes]), kSequences);
  } else {
    typedef T Some __attribute__((vector_size(sizeof(T) * kSequences)));
    Some held[kRegister / kSequences];
    for (int row = 0; row < kRegister / kSequences; ++row)
      held[row] = Some{} + numbers[row * kLanes];
    return load_bytes<decltype(everywhere(*numbers))>(held);
  }
}

// The sums of each row and sequence, `[row][sequence]`, from those of lanes.
template <int kSpread, int kCount>
TPC_INLINE void sequence_sums(IntRegister* sums) {
#pragma GCC unroll 2
  for (int count = kCount, spread = kSpread; spread > 1; spread /= 2) {
    count /= 2;
#pragma GCC unroll 8
    for (int pair = 0; pair < count; ++pair)
      sums[pair] = pairs_added(sums[2 * pair], sums[2 * pair + 1]);
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

// Multiplies a run of some rows by a panel, one leaf after the other. The last row also stands for
// rows from `rows` on.
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
  TPC_INLINE void leaf_sums(int64_t first, int64_t last, Lines& ahead, Register* out) {
    const int64_t block = weight_.block();
    const int64_t loads = block > kColumns<kLowBits> ? block / kColumns<kLowBits> : 1;
    const int64_t blocks = block < kColumns<kLowBits> ? kColumns<kLowBits> / block : 1;
    Register totals[kLanes * kSums];
    uint32_t lanes = 0;  // those with blocks
    const int64_t begin = first / loads * blocks;
    int64_t own = begin;
    for (int64_t load = first; load < last; load += loads) {
      ahead.due += kRows * loads;
      for (int64_t place = 0; place < loads; ++place) hold(load + place, place);
      for (int64_t within = 0; within < blocks; ++within, ++own) {
        if (own == begin || own % kLanes == 0) take_scales(own);
        Register* total = totals + own % kLanes * kSums;
        if (!(lanes >> own % kLanes & 1)) put<false>(total, nullptr);
        lanes |= 1u << own % kLanes;
        IntRegister sums[kProducts];
        multiply(within * kLanes / blocks, kLanes / blocks, loads * kHere,
                 x_.values + own * block / kEach * kSequences, ahead, sums);
        add_block(sums, own, total);
      }
    }
    // The tree of `sum`. Lanes without blocks would add zeros.
    for (int64_t apart = kLanes / 2; apart > 0; apart /= 2)
      for (int64_t lane = 0; lane < apart; ++lane)
        if (lanes >> (lane + apart) & 1) {
          if (!(lanes >> lane & 1)) put<false>(totals + lane * kSums, nullptr);
          put<true>(totals + lane * kSums, totals + (lane + apart) * kSums);
          lanes |= 1u << lane;
        }
    put<false>(out, nullptr), put<true>(out, totals);
  }

 private:
  static constexpr int64_t kRow = kLoads * kPieces;  // of what is held

  // Set sums to zeros, or add others to them.
  template <bool kAdd>
  static TPC_INLINE void put(Register* totals, const Register* terms) {
#pragma GCC unroll 16
    for (int sum = 0; sum < kSums; ++sum)
      totals[sum] = kAdd ? totals[sum] + terms[sum] : Register{};
  }

  // Multiply some pieces of each part of a block by the values of the block.
  TPC_INLINE void multiply(int64_t first, int64_t pieces, int64_t parts, const int32_t* x,
                           Lines& ahead, IntRegister* sums) const {
    const int32_t* held = held_ + first;
    Accumulators<kProducts> products;
    for (int64_t part = 0; part < parts; ++part, held += kLanes)
      for (int64_t piece = 0; piece < pieces; piece += kSpread, x += kWide) {
        ahead.fetch();
        add(products, held + piece, x);
      }
    products.each([&](auto number, IntRegister& sum) TPC_ALWAYS {
      sums[decltype(number)::value] = sum;
    });
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
    const int64_t offset = weight_.offset(run_.start) + load * kLoad;
    const bool inside = offset >= 0 && offset + kLoad <= weight_.stride();
    constexpr int64_t kHighLoad = kLoad * kHigh<kBits> / 4;
    const int64_t high_at = kHigh<kBits> ? weight_.high_offset(run_.start) + load * kHighLoad : 0;
    const bool high_inside = high_at >= 0 && high_at + kHighLoad <= weight_.high_stride();
    for (int row = 0; row < kRows; ++row) {
      const char* bytes = weight_.address(rows_[row]);
      alignas(kLoad) char edge[kLoad];
      if (!inside) copy_inside(bytes, weight_.stride(), offset, kLoad, edge);
      const char* low = inside ? bytes + offset : edge;
      alignas(kLoad) char high_edge[kHighLoad + 1];
      const char* high = nullptr;
      if constexpr (kHigh<kBits> != 0) {
        high = weight_.high(rows_[row]) + high_at;
        if (!high_inside) {
          copy_inside(weight_.high(rows_[row]), weight_.high_stride(), high_at, kHighLoad, high_edge);
          high = high_edge;
        }
      }
      int32_t* out = held_ + row * kRow + place * kPieces;
#pragma GCC unroll 4
      for (int within = 0; within < kRegisters; ++within) {
        constexpr int64_t kBytes = 4 * kRegister;
        const Parts<A, kBits> parts(low + within * kBytes,
                                    high + within * kBytes * kHigh<kBits> / 4);
#pragma GCC unroll 4
        for (int part = 0; part < kHere; ++part) {
          const ShortRegister integers = parts[part];
          std::memcpy(out + part * kLanes + within * kRegister, &integers, sizeof integers);
        }
      }
    }
  }

  TPC_INLINE void add(Accumulators<kProducts>& sums, const int32_t* held, const int32_t* x) const {
    ShortRegister values[kOfRow];
#pragma GCC unroll 4
    for (int within = 0; within < kOfRow; ++within)
      values[within] = load_shorts(x + within * kRegister);
    sums.each([&](auto number, IntRegister& sum) TPC_ALWAYS {
      constexpr int kRowOfSum = decltype(number)::value / kOfRow;
      const ShortRegister own_row = everywhere<kSpread>(held + kRowOfSum * kRow);
      sum = A::template multiply<kLowBits>(sum, own_row, values[decltype(number)::value % kOfRow]);
    });
  }

  // Scales and offsets of the 16 lanes with a block of the run.
  TPC_INLINE void take_scales(int64_t first) {
    for (int row = 0; row < kRows; ++row)
      for (int lane = 0; lane < kLanes; lane += kRegister) {
        const int64_t block = run_.block + first / kLanes * kLanes + lane;
        const Register scales = weight_.scales(rows_[row], block);
        std::memcpy(scales_ + row * kLanes + lane, &scales, sizeof scales);
        if (weight_.has_minima()) {
          const Register minima = weight_.minima(rows_[row], block);
          std::memcpy(minima_ + row * kLanes + lane, &minima, sizeof minima);
        }
        if (!weight_.has_offsets()) continue;
        const IntRegister offsets = weight_.offsets(rows_[row], block);
        std::memcpy(offsets_ + row * kLanes + lane, &offsets, sizeof offsets);
      }
  }

  TPC_INLINE void add_block(IntRegister* sums, int64_t block, Register* totals) const {
    sequence_sums<kSpread, kProducts>(sums);
    const bool minima = weight_.has_minima(), offsets = weight_.has_offsets();
#pragma GCC unroll 16
    for (int sum = 0; sum < kSums; ++sum) {
      const int64_t place = sum * kRegister / kSequences * kLanes + block % kLanes;
      const int64_t lane = block * kWide + sum * kRegister % kWide;
      if (offsets)
        sums[sum] -= spread<kSequences>(offsets_ + place) *
                     load_bytes<IntRegister>(x_.sums + lane);
      const Register numbers =
          minima ? A::numbers(sums[sum]) : A::less(sums[sum], x_.raised + lane);
      const Register products = numbers * load_register(x_.factors + lane);
      totals[sum] =
          multiply_add(totals[sum], products, spread<kSequences>(scales_ + place));
      if (minima)
        totals[sum] = multiply_add(totals[sum], load_register(x_.minima + lane),
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
  auto* panels = scratch.take<Panel<A, kSequences>>(x.runs);
  for (int64_t run = 0; run < x.runs; ++run)
    panels[run] = panel_of<A, kBits, kSequences>(x.laid[run].values + first, sequences, x.laid[run],
                                                 weight.block(), scratch);
  return panels;
}

// Whether the last sequences, so many, have panels of 16.
constexpr bool are_wide(int64_t left) { return left > 8; }

// Make the panels of values by which several products multiply.
template <class A>
[[gnu::noinline]] void add_panels(const Grouped& weight, LaidValues<A>& x, Scratch& scratch) {
  auto* panels = scratch.take<const void*>((x.batch + kLanes - 1) / kLanes);
  const bool whole = weight.bits() == 8;
  for (int64_t first = 0; first < x.batch; first += kLanes) {
    const auto make = are_wide(x.batch - first)
                          ? whole ? panels_of<A, 8, 16> : panels_of<A, 4, 16>
                          : whole ? panels_of<A, 8, 8> : panels_of<A, 4, 8>;
    panels[first / kLanes] = make(weight, x, first, scratch);
  }
  x.panels = panels;
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
    const Grouped part = weight.from(row, 0);
    Register* sums = terms;
    for (int64_t run = 0; run < x.runs; ++run) {
      const int64_t* blocks = x.laid[run].first_block;
      const auto load = [&](int64_t leaf) {
        return blocks[leaf] * weight.block() / kColumns<kBits>;
      };
      Rows product(part, rows - row, x.laid[run], panels[run]);
      for (int64_t leaf = 0; leaf < x.laid[run].leaves; ++leaf, sums += Rows::kSums)
        product.leaf_sums(load(leaf), load(leaf + 1), ahead, sums);
    }
    const auto* results = reinterpret_cast<float*>(terms);
    const int64_t stored = join_leaves(x, reinterpret_cast<float*>(terms), kFound);
    const int64_t count = rows - row < kRows ? rows - row : kRows;
    for (int64_t leaf = 0; leaf < stored; ++leaf, results += kFound)
      for (int64_t b = 0; b < sequences; ++b)
        for (int64_t index = 0; index < count; ++index)
          out[leaf * x.apart + row + index + (first + b) * out_stride] =
              results[index * kSequences + b];
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
