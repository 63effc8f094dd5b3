// Products of rows of few bits whose blocks have a scale of 16 bits and nothing else, as those of most
// weights have. Included by grouped_rows.h.
//
// `run_dots` asks of each row what its blocks have. Here rows are alike. The bits are those of
// `run_dots`.

// Multiply the first rows by a sequence. `take` gets the products of blocks, a register at a time, and
// their scales; then `end` gets the row. Return how many rows; the others need `run_dots`.
template <class A, class Take, class End>
TPC_INLINE int64_t steady_dots(const Grouped& weight, const RowForm<A>& form, int64_t rows,
                               const LaidValues<A>& x, int64_t b,
                               const RowsAhead& ahead, const Scratch& scratch, const Take& take,
                               const End& end) {
  const LaidRun<A>& run = *x.laid;
  const Laid<A>& values = run.values[b];
  const int64_t steady = x.runs > 1 ? 0 : weight.steady_rows(rows, run);
  const int64_t groups = weight.groups();
  const int64_t here = groups - weight.group_of(run.block);  // those of a row from the run on
  const bool halves = weight.scale_type() == TPC_DTYPE_F16;
  const IntRegister offsets = IntRegister{} + form.raised;
  const auto* scales = reinterpret_cast<const uint16_t*>(weight.place(0, run.block).scales);
  const auto use = [&](int64_t row, const typename A::Sums* sums) TPC_ALWAYS {
    const char* scales_ahead = ahead_of(reinterpret_cast<const char*>(scales), 2 * groups,
                                        ahead.far, ahead.left - row, scratch.next_scales);
    for (int64_t at = 0; at < 2 * groups; at += kLoad) __builtin_prefetch(scales_ahead + at);
    int64_t place = 0;
    const auto add = [&](auto whole) TPC_ALWAYS {
      each_register([&](auto own) TPC_ALWAYS {
        const int64_t at = place + own * kRegister;
        const Register factors = load_register(values.factors + at);
        const Register products =
            A::less(sums[at / kRegister], offsets, values.sums + at) * factors;
        const Register loaded = halves ? load_register(reinterpret_cast<const f16*>(scales + at))
                                       : load_register(reinterpret_cast<const bf16*>(scales + at));
        take(own, row, at, products,
             decltype(whole)::value ? loaded : first_lanes(loaded, here - at));
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
