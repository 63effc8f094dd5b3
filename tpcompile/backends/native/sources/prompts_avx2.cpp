// Operations on many tokens, with AVX2 and FMA. Products take values in bf16 as fp32.
#include "numbers.h"
#include "transpose.h"

namespace {

struct Halves {
  __m256 low, high;
};

TPC_INLINE Halves halves(Lanes x) { return load_bytes<Halves>(&x); }

TPC_INLINE Lanes joined(__m256 low, __m256 high) {
  const Halves both{low, high};
  return load_bytes<Lanes>(&both);
}

// Round to the nearest bf16, ties to even; NaN stays NaN. The result is in the upper half of each
// lane.
TPC_INLINE __m256i rounded(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest =
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_and_si256(_mm256_blendv_epi8(nearest, quiet, nan),
                          _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u)));
}

TPC_INLINE Lanes rounded(Lanes values) {
  const Halves own = halves(values);
  return joined(_mm256_castsi256_ps(rounded(own.low)), _mm256_castsi256_ps(rounded(own.high)));
}

TPC_INLINE void put_some(bf16* to, Lanes values, int64_t count) {
  const Halves own = halves(values);
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded(own.low), 16),
                                             _mm256_srli_epi32(rounded(own.high), 16));
  const __m256i found = _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
  std::memcpy(to, &found, sizeof(bf16) * static_cast<size_t>(count < kLanes ? count : kLanes));
}

// `exponential` in registers: compilers hold vectors of 64 bytes in memory.
TPC_INLINE __m256 power_of_e(__m256 x) {
  const __m256 low = _mm256_set1_ps(-87.3f), high = _mm256_set1_ps(88.3f);
  // The second operand is the result if one is NaN.
  const __m256 within = _mm256_min_ps(high, _mm256_max_ps(low, x));
  const __m256 whole = _mm256_round_ps(_mm256_mul_ps(within, _mm256_set1_ps(1.44269504f)),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 rest = (within - whole * 0.693359375f) + whole * 2.12194440e-4f;
  __m256 poly = _mm256_set1_ps(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f})
    poly = poly * rest + factor;
  const __m256 found = poly * (rest * rest) + rest + 1.0f;
  const __m256i power = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  const __m256 scaled = found * _mm256_castsi256_ps(power);
  const __m256 infinite = _mm256_set1_ps(std::numeric_limits<float>::infinity());
  const __m256 above = _mm256_blendv_ps(scaled, infinite, _mm256_cmp_ps(x, high, _CMP_GT_OQ));
  return _mm256_andnot_ps(_mm256_cmp_ps(x, low, _CMP_LT_OQ), above);
}

TPC_INLINE Lanes power_of_e(Lanes x) {
  const Halves own = halves(x);
  return joined(power_of_e(own.low), power_of_e(own.high));
}

TPC_INLINE Lanes square_roots(Lanes x) {
  const Halves own = halves(x);
  return joined(_mm256_sqrt_ps(own.low), _mm256_sqrt_ps(own.high));
}

using Chosen = Halves;

// The lanes from `first` to `last` of 16.
TPC_INLINE Chosen lanes_from(int64_t first, int64_t last) {
  const auto bound = [](int64_t lane) {
    return _mm256_set1_epi32(static_cast<int32_t>(lane < 0 ? 0 : (lane > kLanes ? kLanes : lane)));
  };
  const __m256i from = bound(first), to = bound(last);
  const auto within = [&](__m256i lane) {
    return _mm256_castsi256_ps(
        _mm256_andnot_si256(_mm256_cmpgt_epi32(from, lane), _mm256_cmpgt_epi32(to, lane)));
  };
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {within(lane), within(_mm256_add_epi32(lane, _mm256_set1_epi32(8)))};
}

TPC_INLINE Lanes chosen(Chosen lanes, Lanes values, Lanes others) {
  const Halves own = halves(values), other = halves(others);
  return joined(_mm256_blendv_ps(other.low, own.low, lanes.low),
                _mm256_blendv_ps(other.high, own.high, lanes.high));
}

TPC_INLINE Lanes larger(Lanes a, Lanes b) {
  const Halves one = halves(a), other = halves(b);
  return joined(_mm256_max_ps(one.low, other.low), _mm256_max_ps(one.high, other.high));
}

TPC_INLINE float greatest_of(Lanes x) { return largest(x); }

constexpr int64_t kPanel = 16, kRows = 6;

using Packed = float;
constexpr int64_t kColumns = 1;

// Return values in bf16 as operands: null, because they must be widened.
TPC_INLINE const Packed* as_packed(const bf16*) { return nullptr; }

// Widen values to an operand.
TPC_INLINE void hold(const bf16* x, int64_t count, Packed* held) {
  int64_t place = 0;
  for (; place + kRegister <= count; place += kRegister) {
    const Register own = load_register(x + place);
    std::memcpy(held + place, &own, sizeof own);
  }
  for (; place < count; ++place) held[place] = number(x + place);
}

TPC_INLINE void hold(Lanes x, Packed* held) { store(held, rounded(x)); }

TPC_INLINE void hold(Register x, Packed* held) {
  const __m256i found = rounded((__m256)x);
  std::memcpy(held, &found, sizeof found);
}

// Set or increase `out` by products of 6 rows of `a` with 16 columns of `b`.
template <bool kAdd>
TPC_INLINE void multiply_16(const Packed* a, int64_t a_stride, const Packed* b, int64_t b_stride,
                            int64_t steps, float* out, int64_t out_stride) {
  __m256 low[kRows], high[kRows];
#pragma GCC unroll 6
  for (int64_t row = 0; row < kRows; ++row) {
    low[row] = kAdd ? _mm256_loadu_ps(out + row * out_stride) : _mm256_setzero_ps();
    high[row] = kAdd ? _mm256_loadu_ps(out + row * out_stride + 8) : _mm256_setzero_ps();
  }
  for (int64_t step = 0; step < steps; ++step) {
    const __m256 one = _mm256_loadu_ps(b + step * b_stride);
    const __m256 two = _mm256_loadu_ps(b + step * b_stride + 8);
#pragma GCC unroll 6
    for (int64_t row = 0; row < kRows; ++row) {
      const __m256 own = _mm256_broadcast_ss(a + row * a_stride + step);
      low[row] = _mm256_fmadd_ps(own, one, low[row]);
      high[row] = _mm256_fmadd_ps(own, two, high[row]);
    }
  }
#pragma GCC unroll 6
  for (int64_t row = 0; row < kRows; ++row) {
    _mm256_storeu_ps(out + row * out_stride, low[row]);
    _mm256_storeu_ps(out + row * out_stride + 8, high[row]);
  }
}

// Set or increase `out` by products of 6 rows of `a` with 16·kVectors columns of `b`.
template <int kVectors, bool kAdd>
void multiply(const Packed* a, int64_t a_stride, const Packed* b, int64_t b_stride, int64_t steps,
              float* out, int64_t out_stride) {
  for (int v = 0; v < kVectors; ++v)
    multiply_16<kAdd>(a, a_stride, b + kLanes * v, b_stride, steps, out + kLanes * v, out_stride);
}

// Lay out 16 rows as `[column][row]`, with `stride` between columns; null stands for zeros.
TPC_INLINE void pack_rows(const bf16* const* rows, int64_t columns, Packed* packed,
                          int64_t stride) {
  for (int64_t column = 0; column < columns; column += 8)
    for (int64_t first = 0; first < kLanes; first += 8) {
      __m256 block[8];
#pragma GCC unroll 8
      for (int64_t own = 0; own < 8; ++own)
        block[own] = rows[first + own] ? (__m256)load_register(rows[first + own] + column)
                                       : _mm256_setzero_ps();
      transpose(block);
#pragma GCC unroll 8
      for (int64_t own = 0; own < 8; ++own)
        _mm256_storeu_ps(packed + (column + own) * stride + first, block[own]);
    }
}

// Widen a row; null stands for zeros.
TPC_INLINE void interleave(const bf16* const* rows, int64_t columns, Packed* packed) {
  if (rows[0])
    hold(rows[0], columns, packed);
  else
    std::memset(packed, 0, sizeof(Packed) * static_cast<size_t>(columns));
}

// Load 16 rows of 16 values, and transpose them.
TPC_INLINE void load_transposed(const float* from, int64_t stride, Lanes* block) {
  for (int64_t line = 0; line < kLanes; line += 8) {
    __m256 rows[2][8];
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
      for (int64_t own = 0; own < 8; ++own)
        rows[half][own] = _mm256_loadu_ps(from + (8 * half + own) * stride + line);
      transpose(rows[half]);
    }
    for (int64_t own = 0; own < 8; ++own)
      block[line + own] = joined(rows[0][own], rows[1][own]);
  }
}

}  // namespace

#include "prompts_kernels.h"

namespace tpc {

const ManyKernel many_avx2[] = {norm,      add_norm,    swiglu, rope,         append,
                                attention, pack_panels, linear, pack_rounded, linear_rounded};

}  // namespace tpc
