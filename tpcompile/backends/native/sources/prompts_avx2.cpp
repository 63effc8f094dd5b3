// Operations on many tokens, with AVX2 and FMA. Products take values in bf16 as fp32.
#include "interface.h"
#include "numbers.h"
#include "shuffles.h"

namespace {

struct Halves {
  __m256 low, high;
};

TPC_INLINE Halves halves(Lanes x) { return load_bytes<Halves>(&x); }

TPC_INLINE Lanes joined(__m256 low, __m256 high) {
  const Halves parts{low, high};
  return load_bytes<Lanes>(&parts);
}

TPC_INLINE Lanes rounded(Lanes values) { return rounded<bf16>(values); }

TPC_INLINE void put_some(bf16* out, Lanes values, int64_t count) { store_some(out, values, count); }

TPC_INLINE Lanes power_of_e(Lanes x) { return by_register(x, exponential<Register>); }

TPC_INLINE Lanes square_roots(Lanes x) {
  const Halves parts = halves(x);
  return joined(_mm256_sqrt_ps(parts.low), _mm256_sqrt_ps(parts.high));
}

using Chosen = Halves;

// The lanes from `first` to `last` of 16.
TPC_INLINE Chosen lanes_from(int64_t first, int64_t last) {
  const auto bound = [](int64_t lane) {
    return _mm256_set1_epi32(static_cast<int32_t>(lane < 0 ? 0 : (lane > kLanes ? kLanes : lane)));
  };
  const __m256i begin = bound(first), end = bound(last);
  const auto within = [&](__m256i lane) {
    return _mm256_castsi256_ps(
        _mm256_andnot_si256(_mm256_cmpgt_epi32(begin, lane), _mm256_cmpgt_epi32(end, lane)));
  };
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {within(lane), within(_mm256_add_epi32(lane, _mm256_set1_epi32(8)))};
}

TPC_INLINE Lanes chosen(Chosen lanes, Lanes values, Lanes otherwise) {
  const Halves parts = halves(values), other_parts = halves(otherwise);
  return joined(_mm256_blendv_ps(other_parts.low, parts.low, lanes.low),
                _mm256_blendv_ps(other_parts.high, parts.high, lanes.high));
}

TPC_INLINE Lanes larger(Lanes a, Lanes b) {
  const Halves first = halves(a), second = halves(b);
  return joined(_mm256_max_ps(first.low, second.low), _mm256_max_ps(first.high, second.high));
}

TPC_INLINE float greatest_of(Lanes x) { return largest(x); }

constexpr int64_t kPanel = 16, kRows = 6, kStrip = 8 * kRows, kSteps = 1;

struct Tiles {};

using Packed = float;
constexpr int64_t kColumns = 1;

// Return rows in bf16 as an operand: null, because they must be widened.
TPC_INLINE const Packed* as_packed(const bf16*) { return nullptr; }

// Widen values to an operand.
TPC_INLINE void hold(const bf16* x, int64_t count, Packed* held) {
  int64_t place = 0;
  for (; place + kRegister <= count; place += kRegister) {
    const Register values = load_register(x + place);
    std::memcpy(held + place, &values, sizeof values);
  }
  for (; place < count; ++place) held[place] = number(x + place);
}

TPC_INLINE void hold(Lanes x, Packed* held) { store(held, rounded(x)); }

TPC_INLINE void hold(Register x, Packed* held) {
  const auto bits = nearest_bf16(x);
  std::memcpy(held, &bits, sizeof bits);
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
    const __m256 first = _mm256_loadu_ps(b + step * b_stride);
    const __m256 second = _mm256_loadu_ps(b + step * b_stride + 8);
#pragma GCC unroll 6
    for (int64_t row = 0; row < kRows; ++row) {
      const __m256 factor = _mm256_broadcast_ss(a + row * a_stride + step);
      low[row] = _mm256_fmadd_ps(factor, first, low[row]);
      high[row] = _mm256_fmadd_ps(factor, second, high[row]);
    }
  }
#pragma GCC unroll 6
  for (int64_t row = 0; row < kRows; ++row) {
    _mm256_storeu_ps(out + row * out_stride, low[row]);
    _mm256_storeu_ps(out + row * out_stride + 8, high[row]);
  }
}

// Set or increase `out` by products of 6 rows of `a` with 16·kVectors columns of `b`, 16 of which
// are side by side.
template <int kVectors, bool kAdd>
void multiply(const Packed* a, int64_t a_stride, const Packed* b, int64_t b_stride, int64_t b_next,
              int64_t steps, float* out, int64_t out_stride) {
  for (int v = 0; v < kVectors; ++v)
    multiply_16<kAdd>(a, a_stride, b + v * b_next, b_stride, steps, out + kLanes * v, out_stride);
}

// Lay out 16 rows as `[column][row]`, with `stride` between columns; null stands for zeros.
TPC_INLINE void pack_rows(const bf16* const* rows, int64_t columns, Packed* packed,
                          int64_t stride) {
  for (int64_t column = 0; column < columns; column += 8)
    for (int64_t first = 0; first < kLanes; first += 8) {
      __m256 block[8];
#pragma GCC unroll 8
      for (int64_t line = 0; line < 8; ++line)
        block[line] = rows[first + line] ? (__m256)load_register(rows[first + line] + column)
                                         : _mm256_setzero_ps();
      transpose(block);
#pragma GCC unroll 8
      for (int64_t line = 0; line < 8; ++line)
        _mm256_storeu_ps(packed + (column + line) * stride + first, block[line]);
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
TPC_INLINE void load_transposed(const float* source, int64_t stride, Lanes* block) {
  for (int64_t line = 0; line < kLanes; line += 8) {
    __m256 rows[2][8];
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
      for (int64_t row = 0; row < 8; ++row)
        rows[half][row] = _mm256_loadu_ps(source + (8 * half + row) * stride + line);
      transpose(rows[half]);
    }
    for (int64_t row = 0; row < 8; ++row)
      block[line + row] = joined(rows[0][row], rows[1][row]);
  }
}

}  // namespace

#include "prompts_kernels.h"

extern "C" const void* tpc_prompts_avx2() {
  static constexpr tpc::ManyKernel kMany[] = {TPC_MANY_KERNELS};
  return kMany;
}
