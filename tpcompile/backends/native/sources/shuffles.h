// Lanes of several vectors: their order, their sums in a fixed tree, and transpositions.
#pragma once

#include "numbers.h"

namespace {

#if defined(__AVX512F__)
// Ports that do not multiply move lanes within quarters of 128 bits, and whole quarters nearly as
// cheaply. A choice of any lanes of two registers keeps a port that multiplies busy.
typedef int64_t Pairs __attribute__((vector_size(64)));

// Lanes of the lower or upper half of each quarter, of `a` and `b` by turns.
template <class V>
TPC_INLINE V low_by_turns(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
template <class V>
TPC_INLINE V high_by_turns(V a, V b) {
  return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}

// Every second lane of each quarter, of `a` and then of `b`.
template <class V>
TPC_INLINE V even_lanes(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
}
template <class V>
TPC_INLINE V odd_lanes(V a, V b) {
  return __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// Adjacent lanes of `a` and `b`, by the numbers of pairs.
template <int... kPairs, class V>
TPC_INLINE V pairs_of(V a, V b) {
  return (V)__builtin_shufflevector((Pairs)a, (Pairs)b, kPairs...);
}

// The lower or upper halves of each quarter, of `a` and `b` by turns.
template <class V>
TPC_INLINE V low_halves(V a, V b) {
  return pairs_of<0, 8, 2, 10, 4, 12, 6, 14>(a, b);
}
template <class V>
TPC_INLINE V high_halves(V a, V b) {
  return pairs_of<1, 9, 3, 11, 5, 13, 7, 15>(a, b);
}

// Every second quarter of `a`, then of `b`.
template <class V>
TPC_INLINE V even_quarters(V a, V b) {
  return pairs_of<0, 1, 4, 5, 8, 9, 12, 13>(a, b);
}
template <class V>
TPC_INLINE V odd_quarters(V a, V b) {
  return pairs_of<2, 3, 6, 7, 10, 11, 14, 15>(a, b);
}

// Add the halves of each quarter of two registers: the sums have two lanes of `a` and `b` by turns.
template <class V>
TPC_INLINE V pairs_in_quarters(V a, V b) {
  return low_by_turns(a, b) + high_by_turns(a, b);
}

// The same, but each quarter has the two lanes of `a` and then those of `b`.
template <class V>
TPC_INLINE V halves_in_quarters(V a, V b) {
  return low_halves(a, b) + high_halves(a, b);
}

// Add adjacent quarters: those of `a`, then those of `b`.
template <class V>
TPC_INLINE V quarters_added(V a, V b) {
  return even_quarters(a, b) + odd_quarters(a, b);
}

// Transpose the lanes of each quarter of four registers.
template <class V>
TPC_INLINE void transpose_quarters(V* four) {
  const V a = low_by_turns(four[0], four[1]), b = high_by_turns(four[0], four[1]);
  const V c = low_by_turns(four[2], four[3]), d = high_by_turns(four[2], four[3]);
  four[0] = low_halves(a, c), four[1] = high_halves(a, c);
  four[2] = low_halves(b, d), four[3] = high_halves(b, d);
}
#endif

// Add the lanes in a fixed tree: the second half to the first until one is left.
TPC_INLINE float sum(Lanes values) {
  EightLanes eight[2];
  std::memcpy(eight, &values, sizeof values);
  eight[0] += eight[1];
  FourLanes four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// Add the lanes of eight vectors, each in the tree of `sum`.
TPC_INLINE EightLanes sums(const Lanes* values) {
  EightLanes eight[8];
  for (int vector = 0; vector < 8; ++vector) {
    EightLanes halves[2];
    std::memcpy(halves, values + vector, sizeof halves);
    eight[vector] = halves[0] + halves[1];
  }
  EightLanes four[4], pairs[2];
  for (int pair = 0; pair < 4; ++pair) {
    const EightLanes a = eight[2 * pair], b = eight[2 * pair + 1];
    four[pair] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
                 __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int pair = 0; pair < 2; ++pair) {
    const EightLanes a = four[2 * pair], b = four[2 * pair + 1];
    pairs[pair] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) +
                  __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
  }
  return __builtin_shufflevector(pairs[0], pairs[1], 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(pairs[0], pairs[1], 1, 3, 5, 7, 9, 11, 13, 15);
}

// Add the lanes of 16 vectors, each in the tree of `sum`; lane n is the sum of vector n.
TPC_INLINE Lanes sums_of_all(const Lanes* values) {
#if defined(__AVX512F__)
  Lanes quarters[4];  // each has a quarter of vectors n, n + 4, n + 8 and n + 12
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    Lanes halves[2];
#pragma GCC unroll 2
    for (int upper = 0; upper < 2; ++upper) {
      const Lanes a = values[8 * upper + n], b = values[8 * upper + n + 4];
      halves[upper] = pairs_of<0, 1, 2, 3, 8, 9, 10, 11>(a, b) +
                      pairs_of<4, 5, 6, 7, 12, 13, 14, 15>(a, b);
    }
    quarters[n] = quarters_added(halves[0], halves[1]);
  }
  const Lanes first = halves_in_quarters(quarters[0], quarters[1]);
  const Lanes second = halves_in_quarters(quarters[2], quarters[3]);
  return even_lanes(first, second) + odd_lanes(first, second);
#else
  const EightLanes halves[] = {sums(values), sums(values + 8)};
  return load_bytes<Lanes>(halves);
#endif
}

// A vector with one lane per row of a transposition.
#if defined(__AVX512F__)
using Square = Lanes;

TPC_INLINE void transpose(Lanes* rows) {
#pragma GCC unroll 4
  for (int row = 0; row < kLanes; row += 4) transpose_quarters(rows + row);
#pragma GCC unroll 4
  for (int row = 0; row < 4; ++row) {
    const Lanes a = even_quarters(rows[row], rows[row + 4]);
    const Lanes b = odd_quarters(rows[row], rows[row + 4]);
    const Lanes c = even_quarters(rows[row + 8], rows[row + 12]);
    const Lanes d = odd_quarters(rows[row + 8], rows[row + 12]);
    rows[row] = even_quarters(a, c), rows[row + 8] = odd_quarters(a, c);
    rows[row + 4] = even_quarters(b, d), rows[row + 12] = odd_quarters(b, d);
  }
}
#elif defined(__AVX2__)
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
