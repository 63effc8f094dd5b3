// Products of rows of few bits that are all alike. Included by grouped_rows.h.
//
// `run_dots` checks for each row what its blocks have. Here the sums of a row's blocks are
// multiplied by their scales as soon as they are found, so that memory is read all the time. The
// bits are those of `run_dots`.

// The scales of rows that have nothing else than scales of 16 bits, as most weights do, from the
// block on with which a run begins.
class SteadyScales {
 public:
  TPC_INLINE SteadyScales(const Grouped& weight, int64_t block)
      : of_rows_(weight.has_row_scales()),
        halves_(weight.scale_type() == TPC_DTYPE_F16),
        groups_(weight.groups()),
        here_(groups_ - weight.group_of(block)),
        first_(reinterpret_cast<const uint16_t*>(of_rows_ ? weight.scales_address(0)
                                                          : weight.place(0, block).scales)) {}

  // The first scale of a row.
  TPC_INLINE const uint16_t* of_row(int64_t row) const { return first_ + row * groups_; }

  TPC_INLINE void fetch(const RowsAhead& after, const uint16_t* scales, int64_t row) const {
    after.fetch_scales(scales, groups_, row);
  }

  // Those of a register of blocks, so many blocks after the first one.
  TPC_INLINE Register load(const uint16_t* first, int64_t after) const {
    return halves_ ? load(reinterpret_cast<const f16*>(first), after)
                   : load(reinterpret_cast<const bf16*>(first), after);
  }

  // Add the products of such blocks, given the sums of their products of integers.
  template <class A>
  TPC_INLINE Register add(Register total, typename A::Sums sums, const Laid<A>& x,
                          const uint16_t* row, int64_t after) const {
    const Register factors = load_register(x.factors + after);
    return multiply_add(total, A::less(sums, x.raised + after) * factors, load(row, after));
  }

 private:
  template <class S>
  TPC_INLINE Register load(const S* first, int64_t after) const {
    if (of_rows_) return Register{} + number(first);
    const Register scales = load_register(first + after);
    return after + kRegister <= here_ ? scales : first_lanes(scales, here_ - after);
  }

  const bool of_rows_, halves_;
  const int64_t groups_, here_;  // the latter is the number of scales of a row from the block on
  const uint16_t* const first_;
};

// The same for superblocks of `kEach` blocks, as k-quants have them. There are minima if `kMinima`.
template <int kEach, bool kMinima>
class SuperScales {
 public:
  TPC_INLINE SuperScales(const Grouped& weight, int64_t block) : weight_(weight), block_(block) {}

  TPC_INLINE Grouped::Place of_row(int64_t row) const { return weight_.place(row, block_); }

  TPC_INLINE void fetch(const RowsAhead& after, const Grouped::Place&, int64_t row) const {
    weight_.fetch_scales(row + after.far);
  }

  template <class A>
  TPC_INLINE Register add(Register total, typename A::Sums sums, const Laid<A>& x,
                          const Grouped::Place& row, int64_t after) const {
    const Register factors = load_register(x.factors + after);
    const Register scales =
        Grouped::of_whole_supers<kEach>(row.scales, row.super_scales, after);
    if constexpr (!kMinima)
      return multiply_add(total, A::less(sums, x.raised + after) * factors, scales);
    total = multiply_add(total, A::numbers(sums) * factors, scales);
    const Register minima = Grouped::of_whole_supers<kEach>(row.minima, row.super_minima, after);
    return multiply_add(total, load_register(x.minima + after), -minima);
  }

 private:
  const Grouped weight_;
  const int64_t block_;
};

// Add the products of some rows' blocks with a sequence to `products`, which has `width` numbers
// for each row: one for each block, or 16 for the sums of a lane's blocks, of each leaf if there are
// shares.
template <class A, int kBits, int kLoads, int kBlocks, class Scales>
[[gnu::noinline]] void add_alike(const Grouped& weight, int64_t row, int64_t rows,
                                 const LaidRun<A>& run, const Laid<A>& laid,
                                 const RowsAhead& rows_ahead, int64_t width, float* products) {
  using Form = Blocks<A, kBits, kLoads, kBlocks>;
  constexpr int64_t kEach = Form::kEach, kFewest = Form::kFewest;
  const Laid<A> x = laid;  // products may overlap the operands, as far as compilers know
  const RowsAhead after = rows_ahead;
  const Scales of_blocks(weight, run.block);
  const int64_t start = weight.offset(run.start), count = run.loads / kLoads * kRegisters;
  const int64_t high_start = kHigh<kBits> ? weight.high_offset(run.start) : 0;
  const int64_t stride = weight.stride(), high_stride = weight.high_stride();
  const Share* const* const shares = run.shares;
  const char *bytes = weight.address(row), *high = kHigh<kBits> ? weight.high(row) : nullptr;
  // The last sums, which are used while the next ones are found.
  typename A::Sums sums{};
  auto scales = of_blocks.of_row(row);
  int64_t block_of_sums = 0;
  float* out = nullptr;
  const auto added = [&](Register total) TPC_ALWAYS {
    return of_blocks.template add<A>(total, sums, x, scales, block_of_sums);
  };
  const auto use = [&]() TPC_ALWAYS {
    const auto store = [](float* place, Register total) { std::memcpy(place, &total, sizeof total); };
    if (!shares) return store(out, added(load_register(out)));
    const int64_t round = block_of_sums / kLanes, part = block_of_sums % kLanes / kRegister;
    for (const Share* share = shares[round]; share != shares[round + 1]; ++share) {
      float* place = out + share->leaf * kLanes + part * kRegister;
      const Register before = load_register(place);
      store(place, either(share->lanes.each[part], added(before), before));
    }
  };
  for (const int64_t end = row + rows; row < end; ++row, bytes += stride, high += high_stride) {
    const char* from = bytes + start;
    const char* ahead = after.of(bytes, row) + start;
    const auto scales_here = of_blocks.of_row(row);
    of_blocks.fetch(after, scales_here, row);
    for (int64_t first = 0, block = 0; first < count; first += Form::kSums, block += kRegister) {
      const int64_t place = first * kEach;
      const Form blocks{from + place, high + high_start + place * kHigh<kBits> / 4, ahead + place,
                        Form::values(x.values, place)};
      const auto next = blocks.sums((count - first + kFewest - 1) / kFewest * kFewest);
      if (out) use();
      sums = next, scales = scales_here, block_of_sums = block;
      out = products + (shares ? 0 : block % width);
    }
    products += width;
  }
  if (out) use();
}
