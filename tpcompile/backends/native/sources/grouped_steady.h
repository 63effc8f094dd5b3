// Products of rows of few bits that have only scales of 16 bits, as most weights do. Included by
// grouped_rows.h.
//
// `run_dots` checks for each row what its blocks have. Here all rows are alike. The bits are those
// of `run_dots`.

// The scales of such rows, from the block on with which a run begins.
class SteadyScales {
 public:
  TPC_INLINE SteadyScales(const Grouped& weight, int64_t block)
      : of_rows_(weight.has_row_scales()),
        halves_(weight.scale_type() == TPC_DTYPE_F16),
        block_(block),
        here_(weight.groups() - weight.group_of(block)) {}

  // The first scale of a row.
  TPC_INLINE const uint16_t* first(const Grouped& weight, int64_t row) const {
    return reinterpret_cast<const uint16_t*>(of_rows_ ? weight.scales_address(row)
                                                      : weight.place(row, block_).scales);
  }

  // Those of a register of blocks, so many blocks after the first one. If they are not whole, some
  // may be after the row.
  TPC_INLINE Register load(const uint16_t* first, int64_t after, bool whole) const {
    return halves_ ? load(reinterpret_cast<const f16*>(first), after, whole)
                   : load(reinterpret_cast<const bf16*>(first), after, whole);
  }

 private:
  template <class S>
  TPC_INLINE Register load(const S* first, int64_t after, bool whole) const {
    if (of_rows_) return Register{} + number(first);
    const Register scales = load_register(first + after);
    return whole ? scales : first_lanes(scales, here_ - after);
  }

  const bool of_rows_, halves_;
  const int64_t block_, here_;  // the latter is the number of scales of a row from the block on
};

// Multiply the first rows by a sequence. `take` gets the products of blocks, a register at a time,
// and their scales; then `end` gets the row. Return the number of these rows; the others need
// `run_dots`.
template <class A, class Take, class End>
TPC_INLINE int64_t steady_dots(const Grouped& weight, RowForm<A> form, int64_t rows,
                               const LaidValues<A>& x, int64_t b,
                               const RowsAhead& ahead, const Scratch& scratch, const Take& take,
                               const End& end) {
  const LaidRun<A>& run = *x.laid;
  const Laid<A>& values = run.values[b];
  const int64_t steady = x.runs > 1 ? 0 : weight.steady_rows(rows, run);
  const int64_t groups = weight.groups();
  const SteadyScales of_blocks(weight, run.block);
  const uint16_t* scales = of_blocks.first(weight, 0);
  const auto use = [&](int64_t row, const typename A::Sums* sums) TPC_ALWAYS {
    const char* scales_ahead = ahead_of(reinterpret_cast<const char*>(scales), 2 * groups,
                                        ahead.far, ahead.left - row, scratch.next_scales);
    for (int64_t offset = 0; offset < 2 * groups; offset += kLoad)
      __builtin_prefetch(scales_ahead + offset);
    int64_t place = 0;
    const auto add = [&](auto whole) TPC_ALWAYS {
      each_register([&](auto part) TPC_ALWAYS {
        const int64_t block = place + part * kRegister;
        const Register factors = load_register(values.factors + block);
        const Register products =
            A::less(sums[block / kRegister], values.raised + block) * factors;
        take(part, row, block, products, of_blocks.load(scales, block, decltype(whole)::value));
      });
      place += kLanes;
    };
    while (place + kLanes < run.rounds * kLanes) add(std::true_type());
    add(std::false_type());
    scales += groups;
    end(row);
  };
  each_row(weight, form, 0, steady, run, values, INT64_MAX, ahead, use);
  return steady;
}
