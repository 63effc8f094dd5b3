// AVX-512 for CPUs without it: the intrinsics that kernels use, as functions over lanes.
//
// It is included before the kernels, which are compiled for AVX2. `tests/emulated.py` builds with it,
// and makes `_mm512_add_epi16` a name of `emulated_add_epi16`. Functions are not inlined, as that
// would take compilers several times as long.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#define EMULATED static __attribute__((noinline, unused))

typedef int32_t Ints __attribute__((vector_size(64), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), may_alias));
typedef float Floats __attribute__((vector_size(64), may_alias));
typedef int16_t Shorts __attribute__((vector_size(64), may_alias));
typedef uint16_t Halves __attribute__((vector_size(64), may_alias));
typedef int8_t Chars __attribute__((vector_size(64), may_alias));
typedef uint8_t Bytes8 __attribute__((vector_size(64), may_alias));

// Memory.
template <class To, class From>
EMULATED To bytes_of(const From& source) {
  static_assert(sizeof(To) == sizeof(From));
  To value;
  memcpy(&value, &source, sizeof value);
  return value;
}
EMULATED __m512i emulated_loadu_si512(const void* source) {
  __m512i values;
  memcpy(&values, source, sizeof values);
  return values;
}
EMULATED __m512i emulated_load_si512(const void* source) { return emulated_loadu_si512(source); }
EMULATED __m512 emulated_loadu_ps(const void* source) {
  return (__m512)emulated_loadu_si512(source);
}
EMULATED void emulated_storeu_si512(void* out, __m512i a) { memcpy(out, &a, sizeof a); }
EMULATED void emulated_storeu_ps(void* out, __m512 a) { memcpy(out, &a, sizeof a); }
EMULATED __m512i emulated_maskz_loadu_epi16(__mmask32 mask, const void* source) {
  Shorts values{};
  for (int lane = 0; lane < 32; ++lane) {
    int16_t value;
    if (!(mask >> lane & 1)) continue;
    memcpy(&value, static_cast<const char*>(source) + 2 * lane, sizeof value);
    values[lane] = value;
  }
  return (__m512i)values;
}

// Constants, and parts of registers.
EMULATED __m512i emulated_setzero_si512() { return __m512i{}; }
EMULATED __m512 emulated_setzero_ps() { return __m512{}; }
EMULATED __m512 emulated_set1_ps(float value) {
  __m512 values;
  for (int lane = 0; lane < 16; ++lane) values[lane] = value;
  return values;
}
EMULATED __m512i emulated_set1_epi8(char value) { return (__m512i)(Chars{} + value); }
EMULATED __m512i emulated_set1_epi16(short value) { return (__m512i)(Shorts{} + value); }
EMULATED __m512i emulated_set1_epi32(int value) { return (__m512i)(Ints{} + value); }
EMULATED __m512i emulated_castsi256_si512(__m256i a) {
  __m512i values{};
  memcpy(&values, &a, sizeof a);
  return values;
}
EMULATED __m512i emulated_broadcast_i32x4(__m128i a) {
  const __m128i values[4] = {a, a, a, a};
  return bytes_of<__m512i>(values);
}

// Integers.
EMULATED __m512i emulated_and_si512(__m512i a, __m512i b) { return (__m512i)((Ints)a & (Ints)b); }
EMULATED __m512i emulated_add_epi16(__m512i a, __m512i b) {
  return (__m512i)((Halves)a + (Halves)b);
}
EMULATED __m512i emulated_slli_epi16(__m512i a, int by) { return (__m512i)((Halves)a << by); }
EMULATED __m512i emulated_slli_epi32(__m512i a, int by) { return (__m512i)((Bits)a << by); }
EMULATED __m512i emulated_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  const Bits x = (Bits)a, y = (Bits)b, z = (Bits)c;
  Bits bits{};
  for (int row = 0; row < 8; ++row)
    if (table >> row & 1) bits |= (row & 4 ? x : ~x) & (row & 2 ? y : ~y) & (row & 1 ? z : ~z);
  return (__m512i)bits;
}
EMULATED __mmask64 emulated_testn_epi8_mask(__m512i a, __m512i b) {
  const Chars bits = (Chars)a & (Chars)b;
  __mmask64 mask = 0;
  for (int lane = 0; lane < 64; ++lane) mask |= static_cast<__mmask64>(bits[lane] == 0) << lane;
  return mask;
}
EMULATED __mmask32 emulated_testn_epi16_mask(__m512i a, __m512i b) {
  const Shorts bits = (Shorts)a & (Shorts)b;
  __mmask32 mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<__mmask32>(bits[lane] == 0) << lane;
  return mask;
}
EMULATED __m512i emulated_madd_epi16(__m512i a, __m512i b) {
  const Shorts x = (Shorts)a, y = (Shorts)b;
  Ints sums;
  for (int lane = 0; lane < 16; ++lane)
    sums[lane] = x[2 * lane] * y[2 * lane] + x[2 * lane + 1] * y[2 * lane + 1];
  return (__m512i)sums;
}
EMULATED __m512i emulated_dpwssd_epi32(__m512i total, __m512i a, __m512i b) {
  return (__m512i)((Ints)total + (Ints)emulated_madd_epi16(a, b));
}
EMULATED __m512i emulated_dpbusd_epi32(__m512i total, __m512i a, __m512i b) {
  const Bytes8 x = (Bytes8)a;
  const Chars y = (Chars)b;
  Ints sums = (Ints)total;
  for (int lane = 0; lane < 64; ++lane) sums[lane / 4] += x[lane] * y[lane];
  return (__m512i)sums;
}

// Lanes moved, and chosen by a mask.
template <class Vector, int kLanesOf>
EMULATED Vector permuted(Vector a, Vector places, Vector b) {
  Vector values;
  for (int lane = 0; lane < kLanesOf; ++lane) {
    const int place = static_cast<int>(places[lane]);
    values[lane] = (place & kLanesOf ? b : a)[place & (kLanesOf - 1)];
  }
  return values;
}
EMULATED __m512i emulated_permutex2var_epi32(__m512i a, __m512i places, __m512i b) {
  return (__m512i)permuted<Ints, 16>((Ints)a, (Ints)places, (Ints)b);
}
EMULATED __m512i emulated_permutex2var_epi16(__m512i a, __m512i places, __m512i b) {
  return (__m512i)permuted<Shorts, 32>((Shorts)a, (Shorts)places, (Shorts)b);
}
EMULATED __m512i emulated_permutexvar_epi16(__m512i places, __m512i a) {
  return emulated_permutex2var_epi16(a, places, a);
}
EMULATED __m512i emulated_mask_permutexvar_epi16(__m512i otherwise, __mmask32 mask, __m512i places,
                                                 __m512i a) {
  Shorts values = (Shorts)emulated_permutexvar_epi16(places, a);
  for (int lane = 0; lane < 32; ++lane)
    if (!(mask >> lane & 1)) values[lane] = ((Shorts)otherwise)[lane];
  return (__m512i)values;
}
EMULATED __m512 emulated_mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 a) {
  Floats values = (Floats)a;
  for (int lane = 0; lane < 16; ++lane)
    if (!(mask >> lane & 1)) values[lane] = ((Floats)otherwise)[lane];
  return (__m512)values;
}
EMULATED __m512 emulated_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  return emulated_mask_mov_ps(a, mask, b);
}
// Words of both registers in turn, from a half of each 16 bytes.
template <int kFirst>
EMULATED __m512i unpacked(__m512i a, __m512i b) {
  Shorts values;
  for (int lane = 0; lane < 32; ++lane)
    values[lane] = ((Shorts)(lane % 2 ? b : a))[lane / 8 * 8 + kFirst + lane % 8 / 2];
  return (__m512i)values;
}
EMULATED __m512i emulated_unpacklo_epi16(__m512i a, __m512i b) { return unpacked<0>(a, b); }
EMULATED __m512i emulated_unpackhi_epi16(__m512i a, __m512i b) { return unpacked<4>(a, b); }

// Conversions.
template <class Vector, class From, int kLanesOf, class Register>
EMULATED Vector widened(Register a) {
  From lanes[kLanesOf];
  static_assert(sizeof lanes == sizeof a);
  memcpy(lanes, &a, sizeof lanes);
  Vector values;
  for (int lane = 0; lane < kLanesOf; ++lane) values[lane] = lanes[lane];
  return values;
}
EMULATED __m512i emulated_cvtepu16_epi32(__m256i a) {
  return (__m512i)widened<Ints, uint16_t, 16>(a);
}
EMULATED __m512i emulated_cvtepi8_epi32(__m128i a) {
  return (__m512i)widened<Ints, int8_t, 16>(a);
}
EMULATED __m512i emulated_cvtepu8_epi32(__m128i a) {
  return (__m512i)widened<Ints, uint8_t, 16>(a);
}
EMULATED __m512i emulated_cvtepi8_epi16(__m256i a) {
  return (__m512i)widened<Shorts, int8_t, 32>(a);
}
EMULATED __m512 emulated_cvtepi32_ps(__m512i a) {
  return (__m512)__builtin_convertvector((Ints)a, Floats);
}
EMULATED __m512i emulated_cvtps_epi32(__m512 a) {
  Ints integers;
  for (int lane = 0; lane < 16; ++lane)
    integers[lane] = static_cast<int32_t>(std::nearbyint(((Floats)a)[lane]));
  return (__m512i)integers;
}
EMULATED __m512 emulated_cvtph_ps(__m256i a) {
  __m128i halves[2];
  memcpy(halves, &a, sizeof halves);
  const __m256 values[2] = {_mm256_cvtph_ps(halves[0]), _mm256_cvtph_ps(halves[1])};
  return bytes_of<__m512>(values);
}
EMULATED __m256i emulated_cvtps_ph(__m512 a, int) {
  __m256 parts[2];
  memcpy(parts, &a, sizeof parts);
  const __m128i values[2] = {_mm256_cvtps_ph(parts[0], 0), _mm256_cvtps_ph(parts[1], 0)};
  return bytes_of<__m256i>(values);
}
EMULATED __m256bh emulated_cvtneps_pbh(__m512 a) {
  uint16_t values[16];
  for (int lane = 0; lane < 16; ++lane) {
    const uint32_t bits = ((Bits)a)[lane], even = bits >> 16 & 1;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    values[lane] = static_cast<uint16_t>((nan ? bits | 0x400000 : bits + 0x7fff + even) >> 16);
  }
  return bytes_of<__m256bh>(values);
}
EMULATED __m512bh emulated_cvtne2ps_pbh(__m512 high, __m512 low) {
  const __m256bh values[2] = {emulated_cvtneps_pbh(low), emulated_cvtneps_pbh(high)};
  return bytes_of<__m512bh>(values);
}

// Floating point.
EMULATED __m512 emulated_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  Floats values;
  for (int lane = 0; lane < 16; ++lane)
    values[lane] = std::fma(((Floats)a)[lane], ((Floats)b)[lane], ((Floats)c)[lane]);
  return (__m512)values;
}
EMULATED __m512 emulated_dpbf16_ps(__m512 total, __m512bh a, __m512bh b) {
  const auto wide = [](uint32_t half) {
    const uint32_t bits = half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  };
  const Halves x = (Halves)a, y = (Halves)b;
  Floats sums = (Floats)total;
  for (int lane = 0; lane < 16; ++lane)
    for (int half : {2 * lane + 1, 2 * lane})
      sums[lane] = std::fma(wide(x[half]), wide(y[half]), sums[lane]);
  return (__m512)sums;
}
EMULATED __m512 emulated_max_ps(__m512 a, __m512 b) {
  return (__m512)((Floats)a > (Floats)b ? (Floats)a : (Floats)b);
}
EMULATED __m512 emulated_min_ps(__m512 a, __m512 b) {
  return (__m512)((Floats)a < (Floats)b ? (Floats)a : (Floats)b);
}
EMULATED float emulated_reduce_max_ps(__m512 a) {
  float largest = ((Floats)a)[0];
  for (int lane = 1; lane < 16; ++lane)
    largest = ((Floats)a)[lane] > largest ? ((Floats)a)[lane] : largest;
  return largest;
}
EMULATED __m512 emulated_sqrt_ps(__m512 a) {
  Floats values;
  for (int lane = 0; lane < 16; ++lane) values[lane] = std::sqrt(((Floats)a)[lane]);
  return (__m512)values;
}
EMULATED __m512 emulated_roundscale_ps(__m512 a, int) {
  Floats values;
  for (int lane = 0; lane < 16; ++lane) values[lane] = std::nearbyint(((Floats)a)[lane]);
  return (__m512)values;
}
EMULATED __m512 emulated_scalef_ps(__m512 a, __m512 b) {
  Floats values;
  for (int lane = 0; lane < 16; ++lane) {
    const float by = std::fmin(std::fmax(((Floats)b)[lane], -1000.0f), 1000.0f);
    values[lane] = std::scalbn(((Floats)a)[lane], static_cast<int>(std::floor(by)));
  }
  return (__m512)values;
}
