// Operations on many tokens, with AVX-512 and its dot products of bf16.
#include "prompts_avx512.h"

namespace {

constexpr int64_t kRows = 6, kStrip = 8 * kRows, kSteps = 1;

struct Tiles {};

// Return rows in bf16 as an operand; they are stored so.
TPC_INLINE const Packed* as_packed(const bf16* rows) {
  return reinterpret_cast<const Packed*>(rows);
}

// Set or increase `out` by products of 6 rows of `a` with 16·kVectors columns of `b`, 16 of which
// are side by side.
template <int kVectors, bool kAdd>
TPC_INLINE void multiply(const Packed* a, int64_t a_stride, const Packed* b, int64_t b_stride,
                         int64_t b_next, int64_t steps, float* out, int64_t out_stride) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 6
  for (int64_t row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sums[row][v] =
          kAdd ? _mm512_loadu_ps(out + row * out_stride + kLanes * v) : _mm512_setzero_ps();
  for (int64_t step = 0; step < steps; ++step) {
    __m512bh columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      columns[v] = (__m512bh)_mm512_loadu_si512(b + v * b_next + step * b_stride);
#pragma GCC unroll 6
    for (int64_t row = 0; row < kRows; ++row) {
      const auto factor =
          (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(a[row * a_stride + step]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sums[row][v] = _mm512_dpbf16_ps(sums[row][v], factor, columns[v]);
    }
  }
#pragma GCC unroll 6
  for (int64_t row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      _mm512_storeu_ps(out + row * out_stride + kLanes * v, sums[row][v]);
}

}  // namespace

#include "prompts_kernels.h"

extern "C" const void* tpc_prompts_avx512_bf16() {
  static constexpr tpc::ManyKernel kMany[] = {TPC_MANY_KERNELS};
  return kMany;
}
