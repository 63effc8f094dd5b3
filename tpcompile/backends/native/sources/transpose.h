// Transposing 16 vectors of 16 lanes, with AVX-512.
#pragma once

#include "numbers.h"

namespace {

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

}  // namespace
