// Products of rows of few bits whose blocks have a scale of 16 bits and nothing else, as those of most
// weights have. Included by grouped.h.
//
// `run_dots` asks of each row what its blocks have. Here rows are alike, and loops have a constant
// length, so that rows take two thirds of the time. The bits are those of `run_dots`.

// Multiply rows by a run whose last 16 blocks have `kLast` sums of lanes. `take` gets the products of
// blocks, a register at a time, and their scales; then `end` gets the row.
template <class A, int kBits, int kLoads, int kBlocks, int kLast, class Take, class End>
TPC_INLINE void steady_rows(const Grouped& weight, int64_t rows, int64_t left,
                            const LaidRun<A>& run, const Laid<A>& x, const Scratch& scratch,
                            const Take& take, const End& end) {
  constexpr int kSums = kLanes / kBlocks;
  const int64_t stride = weight.stride(), groups = weight.groups(), far = rows_far_ahead(weight);
  const int64_t here = groups - weight.group_of(run.block);  // those of a row from the run on
  const bool halves = weight.scale_type() == TPC_DTYPE_F16;
  const char* bytes = weight.address(0) + weight.offset(run.start);
  const auto* scales = reinterpret_cast<const uint16_t*>(weight.place(0, run.block).scales);
  for (int64_t row = 0; row < rows; ++row, bytes += stride, scales += groups) {
    const char* ahead = ahead_of(bytes, stride, far, left - row, scratch.next_weights);
    const char* scales_ahead = ahead_of(reinterpret_cast<const char*>(scales), 2 * groups, far,
                                        left - row, scratch.next_scales);
    for (int64_t at = 0; at < 2 * groups; at += kLoad) __builtin_prefetch(scales_ahead + at);
    int64_t load = 0, place = 0;
    const auto add = [&](auto used, auto whole) TPC_ALWAYS {
      const Blocks<A, kBits, kLoads> blocks{bytes + load * kLoad, nullptr, ahead + load * kLoad,
                                            x.values + load * kColumns<kBits>};
      each_register([&](auto own) TPC_ALWAYS {
        constexpr int kOwn = decltype(own)::value, kUsed = decltype(used)::value * kRegisters;
        const int64_t at = place + kOwn * kRegister;
        const auto found = blocks.template sums<kSums, kUsed, kOwn>();
        const IntRegister offsets = IntRegister{} + A::template kRaised<kBits>;
        const Register factors = load_register(x.factors + at);
        const Register products = A::less(found, offsets, x.sums + at) * factors;
        const Register loaded = halves ? load_register(reinterpret_cast<const f16*>(scales + at))
                                       : load_register(reinterpret_cast<const bf16*>(scales + at));
        take(own, row, at, products,
             decltype(whole)::value ? loaded : first_lanes(loaded, here - at));
      });
      load += kSums * kLoads, place += kLanes;
    };
    while (place + kLanes < run.rounds * kLanes)
      add(std::integral_constant<int, kSums>(), std::true_type());
    add(std::integral_constant<int, kLast>(), std::false_type());
    end(row);
  }
}

// Multiply the first rows by a sequence. Return how many; the others need `run_dots`.
template <class A, int kBits, int kLoads, int kBlocks, class Take, class End>
TPC_INLINE int64_t steady_dots(const Grouped& weight, int64_t rows, int64_t left,
                               const LaidValues<A>& x, int64_t b, const Scratch& scratch,
                               const Take& take, const End& end) {
  if constexpr (std::is_base_of_v<Integers, A> && kHigh<kBits> == 0) {
    constexpr int kSums = kLanes / kBlocks;
    const LaidRun<A>& run = *x.laid;
    const int64_t last = run.loads / kLoads - (run.rounds - 1) * kSums;
    const int64_t steady = weight.steady_rows(rows, run);
    if (x.runs > 1 || 4 * last <= kSums || steady == 0) return 0;
    const auto with = [&](auto sums) TPC_ALWAYS {
      steady_rows<A, kBits, kLoads, kBlocks, decltype(sums)::value>(
          weight, steady, left, run, run.values[b], scratch, take, end);
      return steady;
    };
    if (2 * last <= kSums) return with(std::integral_constant<int, kSums / 2>());
    if (4 * last <= 3 * kSums) return with(std::integral_constant<int, 3 * kSums / 4>());
    return with(std::integral_constant<int, kSums>());
  }
  return 0;
}
