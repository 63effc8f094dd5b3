// Transposing 16 vectors of 16 lanes with AVX-512, or 8 of 8 lanes with AVX2.
#pragma once

#include "numbers.h"

namespace {

// A vector with one lane per row of a transposition.
#if defined(__AVX512F__)
using Square = Lanes;

// One stage of a transposition: swap lanes between any two vectors whose numbers differ in `kBit`.
template <int kBit>
TPC_INLINE void exchange(Lanes* rows) {
  IntLanes low, high;
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane & kBit ? kLanes + lane - kBit : lane;
    high[lane] = lane & kBit ? kLanes + lane : lane + kBit;
  }
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    if (row & kBit) continue;
    const auto a = (__m512)rows[row], b = (__m512)rows[row + kBit];
    rows[row] = (Lanes)_mm512_permutex2var_ps(a, (__m512i)low, b);
    rows[row + kBit] = (Lanes)_mm512_permutex2var_ps(a, (__m512i)high, b);
  }
}

TPC_INLINE void transpose(Lanes* rows) {
  exchange<1>(rows), exchange<2>(rows), exchange<4>(rows), exchange<8>(rows);
}
#else
using Square = __m256;

TPC_INLINE void transpose(__m256* rows) {
  __m256 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int row = 0; row < 8; row += 2) {
    pairs[row] = _mm256_unpacklo_ps(rows[row], rows[row + 1]);
    pairs[row + 1] = _mm256_unpackhi_ps(rows[row], rows[row + 1]);
  }
#pragma GCC unroll 2
  for (int row = 0; row < 8; row += 4)
#pragma GCC unroll 2
    for (int high = 0; high < 2; ++high) {
      const __m256 a = pairs[row + high], b = pairs[row + 2 + high];
      fours[row + 2 * high] = _mm256_shuffle_ps(a, b, _MM_SHUFFLE(1, 0, 1, 0));
      fours[row + 2 * high + 1] = _mm256_shuffle_ps(a, b, _MM_SHUFFLE(3, 2, 3, 2));
    }
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row) {
    rows[row] = _mm256_permute2f128_ps(fours[row], fours[row + 4], 0x20);
    rows[row + 4] = _mm256_permute2f128_ps(fours[row], fours[row + 4], 0x31);
  }
}
#endif

}  // namespace
