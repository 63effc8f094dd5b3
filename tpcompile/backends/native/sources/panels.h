// Dot products with a sequence in each lane, for paths with 16 registers.
//
// Included by dots.h. The bits are those of `row_dots`, in which each of 32 lanes adds every 32nd
// product: the lanes of even and of odd chunks. Here these sums are made one after the other, each
// for some rows and up to 16 sequences at a time.

constexpr int64_t kPlaces = 2 * kLanes;
// The columns of a block of rows that stays in the nearest cache, in steps of 32.
constexpr int64_t kStepsHeld = 32;
// The sequences of a register, and the maximum number that are multiplied at a time. Blocks of rows
// are faster for fewer than `kFewest`.
constexpr int64_t kHalf = 8, kGroup = 16, kFewest = 5;
static_assert(kRegister == kHalf && Form<bf16, Plain<bf16>>::kChunk == kLanes);

// Whether a form has panels. If not, blocks of rows serve any number of sequences.
template <class F>
constexpr bool kHasPanels = false;
template <class T, class S>
constexpr bool kHasPanels<Form<T, Plain<S>>> = true;

TPC_INLINE int64_t steps_of(int64_t columns) { return (columns + kPlaces - 1) / kPlaces; }

// The registers that the last sequences take.
TPC_INLINE int64_t halves_of(int64_t left) { return left > kHalf ? 2 : 1; }

// Lay out columns of some sequences as `[place][step][sequence]`; the last ones are zeros.
inline const float* panel(const float* x, int64_t stride, int64_t sequences, int64_t columns,
                          Scratch& scratch) {
  const int64_t steps = steps_of(columns), wide = kHalf * halves_of(sequences);
  float* packed = scratch.take<float>(kPlaces * steps * wide);
  for (int64_t first = 0; first < wide; first += kHalf)
    for (int64_t column = 0; column < kPlaces * steps; column += kHalf) {
      __m256 block[kHalf];
      for (int64_t line = 0; line < kHalf; ++line) {
        float held[kHalf] = {};
        const int64_t left = first + line < sequences ? columns - column : 0;
        if (left > 0)
          std::memcpy(held, x + (first + line) * stride + column,
                      sizeof(float) * static_cast<size_t>(left < kHalf ? left : kHalf));
        block[line] = _mm256_loadu_ps(held);
      }
      transpose(block);
      const int64_t step = column / kPlaces, place = column % kPlaces;
      for (int64_t line = 0; line < kHalf; ++line)
        _mm256_storeu_ps(packed + ((place + line) * steps + step) * wide + first, block[line]);
    }
  return packed;
}

// A weight in all lanes. Weights in bf16 are loaded in pairs: broadcasts of 16 bits take longer.
template <bool kOdd>
TPC_INLINE __m256 everywhere(const f32* weight) {
  return _mm256_broadcast_ss(weight);
}

template <bool kOdd>
TPC_INLINE __m256 everywhere(const bf16* weight) {
  const __m256i pair = _mm256_set1_epi32(load_bytes<int32_t>(weight - kOdd));
  return _mm256_castsi256_ps(
      kOdd ? _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u)))
           : _mm256_slli_epi32(pair, 16));
}

template <bool kOdd>
TPC_INLINE __m256 everywhere(const f16* weight) {
  return _mm256_cvtph_ps(_mm_set1_epi16(load_bytes<int16_t>(weight)));
}

// Increase the sums of a place by some steps of all rows.
template <bool kOdd, int kRows, int kHalves, class S>
TPC_INLINE void add_steps(Plain<S> weight, const float* x, int64_t steps, bool first,
                          __m256* sums) {
  __m256 totals[kRows * kHalves];
#pragma GCC unroll 12
  for (int sum = 0; sum < kRows * kHalves; ++sum)
    totals[sum] = first ? _mm256_setzero_ps() : sums[sum];
  for (int64_t step = 0; step < steps; ++step) {
    __m256 loaded[kHalves];
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half)
      loaded[half] = _mm256_loadu_ps(x + (step * kHalves + half) * kHalf);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m256 factor = everywhere<kOdd>(weight.row(row) + step * kPlaces);
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        __m256& sum = totals[row * kHalves + half];
        sum = _mm256_fmadd_ps(factor, loaded[half], sum);
      }
    }
  }
#pragma GCC unroll 12
  for (int sum = 0; sum < kRows * kHalves; ++sum) sums[sum] = totals[sum];
}

// Multiply `kRows` rows by a panel: `out[row][sequence]`, 16 sequences apart.
template <int kRows, int kHalves, class S>
inline void panel_dots(Plain<S> weight, const float* x, int64_t columns, NextRows& next,
                       int64_t lines, float* out) {
  constexpr int kSums = kRows * kHalves;
  __m256 sums[kPlaces][kSums] = {};
  const int64_t whole = columns / kPlaces, x_stride = steps_of(columns) * kHalves * kHalf;
  bool first = true;
  const auto add = [&](Plain<S> rows, int64_t step, int64_t steps, int64_t ahead) {
    for (int64_t place = 0; place < kPlaces; place += 2) {
      next.fetch(2 * ahead);
      const float* values = x + place * x_stride + step * kHalves * kHalf;
      add_steps<false, kRows, kHalves>(rows.from(0, place), values, steps, first, sums[place]);
      add_steps<true, kRows, kHalves>(rows.from(0, place + 1), values + x_stride, steps, first,
                                      sums[place + 1]);
    }
  };
  for (int64_t step = 0; step < whole; step += kStepsHeld, first = false) {
    const int64_t steps = whole - step < kStepsHeld ? whole - step : kStepsHeld;
    add(weight.from(0, step * kPlaces), step, steps, lines);
  }
  if (columns % kPlaces) {
    S last[kRows * kPlaces] = {};
    for (int row = 0; row < kRows; ++row)
      std::memcpy(last + row * kPlaces, weight.row(row) + whole * kPlaces,
                  static_cast<size_t>(weight.bytes(columns % kPlaces)));
    add(Plain<S>(last, Plain<S>::bytes(kPlaces)), whole, 1, 0);
  }
  // The tree of `sum`, after even and odd chunks.
  for (int64_t apart = kPlaces / 2; apart > 0; apart /= 2)
    for (int64_t place = 0; place < apart; ++place)
#pragma GCC unroll 12
      for (int sum = 0; sum < kSums; ++sum)
        sums[place][sum] = _mm256_add_ps(sums[place][sum], sums[place + apart][sum]);
  for (int row = 0; row < kRows; ++row)
    for (int half = 0; half < kHalves; ++half)
      _mm256_storeu_ps(out + row * kGroup + half * kHalf, sums[0][row * kHalves + half]);
}

// Multiply `kRows` rows by all sequences. `terms` has room for a block of each leaf.
template <int kRows, class F>
TPC_INLINE void panel_rows(typename F::Weights weight, const Operand<F>& x, float* out,
                           int64_t out_stride, float* terms) {
  using W = typename F::Weights;
  constexpr int64_t kSize = kRows * kGroup;
  const int64_t groups = (x.batch + kGroup - 1) / kGroup;
  const int64_t least = x.columns / x.leaves, longer = x.columns % x.leaves;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t left = x.batch - group * kGroup, sequences = left < kGroup ? left : kGroup;
    for (int64_t leaf = 0, first = 0; leaf < x.leaves; ++leaf) {
      const int64_t width = least + (leaf < longer);
      const W rows = weight.from(0, first);
      const auto* values = static_cast<const float*>(x.packed[group * x.leaves + leaf]);
      NextRows next(rows.address(kRows), rows.stride(), W::bytes(width));
      const int64_t passes = (width / kPlaces + kStepsHeld - 1) / kStepsHeld * kPlaces;
      const int64_t lines =
          group || passes == 0 ? 0 : (kRows * W::bytes(width) / 64 + passes - 1) / passes;
      float* sums = terms + leaf * kSize;
      if (halves_of(sequences) == 2)
        panel_dots<kRows, 2>(rows, values, width, next, lines, sums);
      else
        panel_dots<kRows, 1>(rows, values, width, next, lines, sums);
      first += width;
    }
    const int64_t stored = join_leaves(x, terms, kSize);
    for (int64_t leaf = 0; leaf < stored; ++leaf)
      for (int64_t b = 0; b < sequences; ++b)
        for (int64_t row = 0; row < kRows; ++row)
          out[leaf * x.apart + (group * kGroup + b) * out_stride + row] =
              terms[leaf * kSize + row * kGroup + b];
  }
}

template <class F>
inline void panel_dots(typename F::Weights weight, int64_t rows, const Operand<F>& x, float* out,
                       int64_t out_stride, Scratch& scratch) {
  constexpr int kMany = 8, kFew = 6;  // as the registers allow
  float* terms = scratch.take<float>(x.leaves * kMany * kGroup);
  int64_t row = 0;
  if (x.batch <= kHalf)
    for (; row + kMany <= rows; row += kMany)
      panel_rows<kMany>(weight.from(row, 0), x, out + row, out_stride, terms);
  for (; row + kFew <= rows; row += kFew)
    panel_rows<kFew>(weight.from(row, 0), x, out + row, out_stride, terms);
  for (; row < rows; ++row)
    panel_rows<1>(weight.from(row, 0), x, out + row, out_stride, terms);
}
