// Vectors for operations on many tokens, with AVX-512 and its dot products of bf16.
#pragma once

#include "interface.h"
#include "numbers.h"
#include "shuffles.h"

namespace {

// Round to the nearest bf16, by the CPU's conversion; values below the normal ones become 0.
TPC_INLINE __m256i narrow(Lanes values) { return (__m256i)_mm512_cvtneps_pbh((__m512)values); }

TPC_INLINE Lanes rounded(Lanes values) {
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(values)), 16);
}

// exp(x) within 2 units in the last place, for all x, in half the instructions of `exponential`.
TPC_INLINE Lanes power_of_e(Lanes x) {
  // The second operand is the result if one is NaN.
  const __m512 within = _mm512_min_ps(all(89.0f), _mm512_max_ps(all(-104.0f), (__m512)x));
  const __m512 whole = _mm512_roundscale_ps(within * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
  const __m512 reduced = (within - whole * 0.693359375f) + whole * 2.12194440e-4f;
  __m512 poly = all(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f})
    poly = poly * reduced + factor;
  return (Lanes)_mm512_scalef_ps(poly * (reduced * reduced) + reduced + 1.0f, whole);
}

TPC_INLINE void put_some(bf16* out, Lanes values, int64_t count) {
  const __m256i bits = narrow(values);
  if (count >= kLanes)
    std::memcpy(out, &bits, sizeof bits);
  else
    std::memcpy(out, &bits, sizeof(bf16) * static_cast<size_t>(count));
}

TPC_INLINE Lanes square_roots(Lanes x) { return (Lanes)_mm512_sqrt_ps((__m512)x); }

using Chosen = __mmask16;

// The lanes from `first` to `last` of 16.
TPC_INLINE __mmask16 lanes_from(int64_t first, int64_t last) {
  const auto below = [](int64_t lane) {
    const int64_t held = lane < 0 ? 0 : (lane > kLanes ? kLanes : lane);
    return (1u << held) - 1u;
  };
  return static_cast<__mmask16>(below(last) & ~below(first));
}

TPC_INLINE Lanes chosen(Chosen lanes, Lanes values, Lanes otherwise) {
  return (Lanes)_mm512_mask_blend_ps(lanes, (__m512)otherwise, (__m512)values);
}

TPC_INLINE Lanes larger(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)a, (__m512)b); }

TPC_INLINE float greatest_of(Lanes x) { return _mm512_reduce_max_ps((__m512)x); }

constexpr int64_t kPanel = 64;

// Two adjacent values in bf16.
using Packed = uint32_t;
constexpr int64_t kColumns = 2;

// Copy values to an operand.
TPC_INLINE void hold(const bf16* x, int64_t count, Packed* held) {
  std::memcpy(held, x, sizeof(bf16) * static_cast<size_t>(count));
}

TPC_INLINE void hold(Lanes x, Packed* held) {
  const __m256i bits = narrow(x);
  std::memcpy(held, &bits, sizeof bits);
}

// Lay out 16 rows as `[pair of columns][row]`, with `stride` between pairs; null stands for zeros.
TPC_INLINE void pack_rows(const bf16* const* rows, int64_t columns, Packed* packed, int64_t stride) {
  for (int64_t column = 0; column < columns; column += 2 * kLanes) {
    Lanes block[kLanes];
#pragma GCC unroll 16
    for (int64_t line = 0; line < kLanes; ++line)
      block[line] = rows[line] ? load_bytes<Lanes>(rows[line] + column) : Lanes{};
    transpose(block);
#pragma GCC unroll 16
    for (int64_t line = 0; line < kLanes; ++line)
      std::memcpy(packed + (column / 2 + line) * stride, block + line, sizeof(Lanes));
  }
}

// Lay out two rows with the values of each column side by side; null stands for zeros.
TPC_INLINE void interleave(const bf16* const* rows, int64_t columns, Packed* packed) {
  alignas(64) uint16_t low[2 * kLanes], high[2 * kLanes];
  for (int place = 0; place < 2 * kLanes; ++place) {
    low[place] = static_cast<uint16_t>(place / 2 + (place % 2) * 2 * kLanes);
    high[place] = static_cast<uint16_t>(low[place] + kLanes);
  }
  const __m512i first = _mm512_load_si512(low), second = _mm512_load_si512(high);
  for (int64_t column = 0; column < columns; column += 2 * kLanes) {
    const __m512i none = _mm512_setzero_si512();
    const __m512i a = rows[0] ? _mm512_loadu_si512(rows[0] + column) : none;
    const __m512i b = rows[1] ? _mm512_loadu_si512(rows[1] + column) : none;
    _mm512_storeu_si512(packed + column, _mm512_permutex2var_epi16(a, first, b));
    _mm512_storeu_si512(packed + column + kLanes, _mm512_permutex2var_epi16(a, second, b));
  }
}

// Load 32 rows of 16 values, add a bias to each row if there is one, and round. A vector has the
// values of two rows, side by side.
TPC_INLINE void load_pairs(const float* source, int64_t stride, const bf16* bias, Lanes* block) {
  alignas(64) static constexpr uint16_t kSides[] = {
      0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i sides = _mm512_load_si512(kSides);
#pragma GCC unroll 16
  for (int64_t line = 0; line < kLanes; ++line) {
    Lanes first = load(source + 2 * line * stride), second = load(source + (2 * line + 1) * stride);
    if (bias) first += number(bias + 2 * line), second += number(bias + 2 * line + 1);
    const auto pair = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    block[line] = (Lanes)_mm512_permutexvar_epi16(sides, pair);
  }
}

// Load 16 rows of 16 values, and transpose them.
TPC_INLINE void load_transposed(const float* source, int64_t stride, Lanes* block) {
#pragma GCC unroll 16
  for (int64_t line = 0; line < kLanes; ++line) block[line] = load(source + line * stride);
  transpose(block);
}

}  // namespace
