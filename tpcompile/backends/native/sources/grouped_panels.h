// Products of weights of few bits with several sequences.
//
// Included by grouped.h. Lanes belong to sequences: each of `kSequences` has `kSpread` adjacent
// pairs of columns in a register. Parts of some rows are stored in the nearest cache, and each pair
// of columns of a row is multiplied by all sequences. Sums of blocks are exact, and their products
// are added in the order of `leaf_dots`, so the bits are the same.

// The fewest sequences that panels are for. Fewer are faster one after the other.
constexpr int64_t kFewestInPanels = 5;
// The rows that are multiplied at a time, as registers allow.
constexpr int kPanelRows = kRegisters == 1 ? 16 : 4;
// The most columns that they have in the nearest cache.
constexpr int64_t kHeld = 128;

// The values of `kSequences` sequences for a leaf, `[block][part][lane of pairs][lane]`. Factors and
// sums of blocks are in each lane.
template <class A, int kSequences>
struct Panel {
  const int32_t* values;
  const float* factors;
  const int32_t* sums;
  int64_t blocks;
};

// Lay out values of up to `kSequences` sequences. Other lanes are zeros.
template <class A, int kBits, int kSequences>
inline Panel<A, kSequences> panel_of(const Laid<A>* x, int64_t sequences, const Leaf& leaf,
                                  int64_t block, Scratch& scratch) {
  constexpr int kSpread = kLanes / kSequences, kEach = sizeof(int32_t) / sizeof(typename A::Value);
  constexpr int kHere = kParts<A, kBits>, kPieces = kLanes * kHere;
  const int64_t columns = leaf.loads * kColumns<kBits>, blocks = (columns + block - 1) / block;
  const int64_t within = block < kColumns<kBits> ? block : kColumns<kBits>;
  const int64_t lanes = within / (kEach * kHere);
  auto* values = scratch.take<int32_t>(columns / kEach * kSequences);
  auto* factors = scratch.take<float>(blocks * kLanes);
  auto* sums = scratch.take<int32_t>(blocks * kLanes);
  std::memset(values, 0, sizeof(int32_t) * static_cast<size_t>(columns / kEach * kSequences));
  std::memset(factors, 0, sizeof(float) * static_cast<size_t>(blocks * kLanes));
  std::memset(sums, 0, sizeof(int32_t) * static_cast<size_t>(blocks * kLanes));
  for (int64_t b = 0; b < sequences; ++b)
    for (int64_t own = 0; own < blocks; ++own)
      for (int64_t lane = b; lane < kLanes; lane += kSequences) {
        factors[own * kLanes + lane] = x[b].factors[own];
        sums[own * kLanes + lane] = x[b].sums[own];
      }
  const int64_t steps = lanes / kSpread * kLanes;  // the values of a part in a block
  for (int64_t part = 0; part < leaf.loads * kHere; ++part) {
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
  return {values, factors, sums, blocks};
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

// Multiply a leaf of `kPanelRows` rows by a panel: `[block % 16][row][sequence]`. Rows from `rows`
// on are the last one again.
template <class A, int kBits, int kSequences>
class PanelRows {
  static constexpr int kSpread = kLanes / kSequences, kGroups = kPanelRows / kSpread;
  static constexpr int kEach = sizeof(int32_t) / sizeof(typename A::Value);
  static constexpr int kHere = kParts<A, kBits>, kPieces = kLanes * kHere;  // of a load
  static constexpr int64_t kLoads = kHeld / kColumns<kBits>;

 public:
  PanelRows(const Grouped& weight, int64_t rows, const Leaf& leaf,
            const Panel<A, kSequences>& x)
      : weight_(weight), leaf_(leaf), x_(x) {
    for (int row = 0; row < kPanelRows; ++row) rows_[row] = row < rows ? row : rows - 1;
  }

  TPC_INLINE void run(Lines& ahead, Registers* totals) {
    const int64_t block = weight_.block();
    const int64_t loads = block > kColumns<kBits> ? block / kColumns<kBits> : 1;
    const int64_t blocks = block < kColumns<kBits> ? kColumns<kBits> / block : 1;
    int64_t own = 0;
    for (int64_t load = 0; load < leaf_.loads; load += loads) {
      ahead.fetch(kPanelRows * loads);
      for (int64_t each = 0; each < loads; ++each) hold(load + each, each);
      for (int64_t one = 0; one < blocks; ++one, ++own) {
        if (own % kLanes == 0) take_scales(own);
        IntRegister sums[kPanelRows * kRegisters] = {};
        const int64_t lanes = kLanes / blocks;
        const int32_t* x = x_.values + own * block / kEach * kSequences;
        for (int64_t each = 0; each < loads; ++each)
          for (int64_t part = 0; part < kHere; ++part) {
            const int32_t* from = held_ + each * kPieces + part * kLanes + one * lanes;
            for (int64_t lane = 0; lane < lanes; lane += kSpread, x += kLanes)
              add(sums, from + lane, x);
          }
        add_block(sums, own, totals + own % kLanes * kGroups);
      }
    }
  }

 private:
  static constexpr int64_t kRow = kLoads * kPieces;  // of what is held

  // Store the parts of a load of all rows.
  TPC_INLINE void hold(int64_t load, int64_t place) {
    const int64_t at = weight_.offset(leaf_.start) + load * kLoad;
    const bool inside = at >= 0 && at + kLoad <= weight_.stride();
    for (int row = 0; row < kPanelRows; ++row) {
      const char* bytes = weight_.address(rows_[row]);
      alignas(kLoad) char edge[kLoad];
      if (!inside) copy_inside(bytes, weight_.stride(), at, kLoad, edge);
      const char* from = inside ? bytes + at : edge;
      int32_t* to = held_ + row * kRow + place * kPieces;
#pragma GCC unroll 4
      for (int own = 0; own < kRegisters; ++own) {
        auto loaded = load_shorts(from + own * 4 * kRegister);
        keep(loaded);
#pragma GCC unroll 4
        for (int part = 0; part < kHere; ++part) {
          const auto found = A::template part<kBits>(loaded, part);
          std::memcpy(to + part * kLanes + own * kRegister, &found, sizeof found);
        }
      }
    }
  }

  TPC_INLINE void add(IntRegister* sums, const int32_t* from, const int32_t* x) const {
    ShortRegister values[kRegisters];
#pragma GCC unroll 4
    for (int own = 0; own < kRegisters; ++own) values[own] = load_shorts(x + own * kRegister);
#pragma GCC unroll 16
    for (int row = 0; row < kPanelRows; ++row) {
      const ShortRegister own_row = everywhere<kSpread>(from + row * kRow);
#pragma GCC unroll 4
      for (int own = 0; own < kRegisters; ++own) {
        IntRegister& sum = sums[row * kRegisters + own];
        sum = A::template multiply<kBits>(sum, own_row, values[own]);
      }
    }
  }

  // Scales and offsets of 16 blocks of the leaf.
  TPC_INLINE void take_scales(int64_t first) {
    for (int row = 0; row < kPanelRows; ++row)
      for (int lane = 0; lane < kLanes; lane += kRegister) {
        const int64_t own = leaf_.block + first + lane;
        const Register scales = weight_.scales(rows_[row], own);
        std::memcpy(scales_ + row * kLanes + lane, &scales, sizeof scales);
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
      IntRegister offsets = IntRegister{} + A::template kRaised<kBits>;
      if (weight_.has_offsets()) offsets += spread<kSequences, IntRegister>(offsets_ + place);
      const int64_t lane = block * kLanes + own * kRegister;
      const Register products =
          A::less(sums[at], offsets, x_.sums + lane) * load_register(x_.factors + lane);
      Register& total = totals[group].each[own];
      total = multiply_add(total, products, spread<kSequences, Register>(scales_ + place));
    }
  }

  const Grouped& weight_;
  const Leaf& leaf_;
  const Panel<A, kSequences>& x_;
  int64_t rows_[kPanelRows];
  alignas(kLoad) int32_t held_[kPanelRows * kRow];
  alignas(kLoad) float scales_[kPanelRows * kLanes];
  alignas(kLoad) int32_t offsets_[kPanelRows * kLanes];
};

// Add `kGroups` registers of lanes to others.
template <int kGroups>
TPC_INLINE void add_lane(Registers* totals, const Registers* others) {
#pragma GCC unroll 16
  for (int group = 0; group < kGroups; ++group)
    for (int own = 0; own < kRegisters; ++own)
      totals[group].each[own] += others[group].each[own];
}

// Multiply rows by up to `kSequences` sequences from `first` on.
template <class A, int kBits, int kSequences>
[[gnu::noinline]] void panel_rows(const Grouped& weight, int64_t rows, const LaidValues<A>& x,
                                  int64_t first, float* out, int64_t out_stride,
                                  Scratch& scratch) {
  constexpr int kGroups = kPanelRows * kSequences / kLanes;
  const int64_t after = x.batch - first, sequences = after < kSequences ? after : kSequences;
  auto* panels = scratch.take<Panel<A, kSequences>>(x.leaves);
  for (int64_t leaf = 0; leaf < x.leaves; ++leaf)
    panels[leaf] = panel_of<A, kBits, kSequences>(x.laid[leaf].values + first, sequences,
                                               x.laid[leaf].leaf, weight.block(), scratch);
  auto* terms = scratch.take<Registers>(x.leaves * kGroups);
  const int64_t far = rows_far_ahead(weight);
  for (int64_t row = 0; row < rows; row += kPanelRows) {
    Lines ahead(far_ahead(weight, row, rows - row, far, scratch));
    for (int64_t leaf = 0; leaf < x.leaves; ++leaf) {
      const int64_t lanes = panels[leaf].blocks < kLanes ? panels[leaf].blocks : kLanes;
      Registers totals[kLanes * kGroups];
      std::memset(totals, 0, sizeof(Registers) * static_cast<size_t>(lanes * kGroups));
      PanelRows<A, kBits, kSequences>(weight.from(row, 0), rows - row, x.laid[leaf].leaf,
                                   panels[leaf])
          .run(ahead, totals);
      // The tree of `sum`. Lanes without blocks would add zeros.
      for (int64_t apart = kLanes / 2; apart > 0; apart /= 2)
        for (int64_t at = 0; at < apart && at + apart < lanes; ++at)
          add_lane<kGroups>(totals + at * kGroups, totals + (at + apart) * kGroups);
      std::memcpy(terms + leaf * kGroups, totals, sizeof(Registers) * kGroups);
    }
    const auto* found = reinterpret_cast<float*>(terms);
    fold_sums(reinterpret_cast<float*>(terms), x.leaves, kGroups * kLanes);
    const int64_t count = rows - row < kPanelRows ? rows - row : kPanelRows;
    for (int64_t b = 0; b < sequences; ++b)
      for (int64_t own = 0; own < count; ++own)
        out[row + own + (first + b) * out_stride] = found[own * kSequences + b];
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
