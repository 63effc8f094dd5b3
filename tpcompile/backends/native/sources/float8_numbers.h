// Numbers of 8 bits: a sign, four bits of exponent and three of mantissa (e4m3). The largest is
// 448, the smallest above 0 is 2^-9. Checkpoints with NaN are refused.
#pragma once

#include "integers.h"

namespace {

// The factor between the results of `float8` and the numbers.
#if defined(__F16C__)
constexpr float kFloat8 = 256.0f;
#else
constexpr float kFloat8 = 1.0f / 512.0f;

struct Float8Values {
  float of[256];
};

constexpr Float8Values float8_values() {
  Float8Values values{};
  for (int bits = 0; bits < 128; ++bits) {
    const int exponent = bits >> 3, mantissa = bits & 7;
    const int size = exponent ? (8 + mantissa) << (exponent - 1) : mantissa;
    values.of[bits] = static_cast<float>(size), values.of[bits + 128] = static_cast<float>(-size);
  }
  return values;
}

constexpr Float8Values kFloat8Values = float8_values();
#endif

// Load a register of numbers, divided by `kFloat8`. All quotients are exact.
TPC_INLINE Register float8(const uint8_t* bytes) {
#if defined(__AVX512F__)  // the same fields in float16, whose exponents are larger by 8
  const __m256i wide = _mm256_cvtepi8_epi16(load_bytes<__m128i>(bytes));
  const __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
  const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(-0x8000));
  return (Register)_mm512_cvtph_ps(_mm256_or_si256(size, sign));
#elif defined(__F16C__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  const __m128i size = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
  const __m128i sign = _mm_and_si128(wide, _mm_set1_epi16(-0x8000));
  return (Register)_mm256_cvtph_ps(_mm_or_si128(size, sign));
#else
  Register values;
  for (int lane = 0; lane < kRegister; ++lane) values[lane] = kFloat8Values.of[bytes[lane]];
  return values;
#endif
}

#if defined(__AVX512BF16__)
// Load 32 numbers as bf16, divided by `kFloat8`. Those without a leading one are looked up.
TPC_INLINE __m512i float8_as_bf16(const uint8_t* bytes) {
  constexpr int16_t kSmall[] = {0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860};
  const __m512i small = _mm512_broadcast_i32x4(load_bytes<__m128i>(kSmall));
  const __m512i wide = _mm512_cvtepi8_epi16(load_bytes<__m256i>(bytes));
  const __m512i fields = _mm512_and_si512(_mm512_slli_epi16(wide, 4), _mm512_set1_epi16(0x07f0));
  const __m512i size = _mm512_add_epi16(fields, _mm512_set1_epi16(0x3800));
  const __mmask32 tiny = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
  const __m512i values = _mm512_mask_permutexvar_epi16(size, tiny, wide, small);
  return _mm512_ternarylogic_epi32(values, wide, _mm512_set1_epi16(-0x8000), 0xf8);
}
#endif

// The numbers that are looked at together, before they are loaded.
constexpr int64_t kMany = 128;

// Numbers with a leading one, as most are. All their bits only move, which takes half of the time.
// An object holds the constants for this in registers.
class LargeFloat8 {
 public:
#if defined(__AVX512F__)
  TPC_INLINE LargeFloat8() { keep(exponents_), keep(bits_), keep(highest_), keep(highest_of_16_); }

  // Whether `kMany` numbers are all large.
  TPC_INLINE bool are(const uint8_t* bytes) const {
    const __m512i first = load_bytes<__m512i>(bytes), second = load_bytes<__m512i>(bytes + 64);
    return !(_mm512_testn_epi8_mask(first, exponents_) |
             _mm512_testn_epi8_mask(second, exponents_));
  }

  // Load a register of them, divided by `kFloat8`.
  TPC_INLINE Register load(const uint8_t* bytes) const {
    const __m512i wide = _mm512_cvtepi8_epi32(load_bytes<__m128i>(bytes));
    return (Register)placed(_mm512_slli_epi32(wide, 20), highest_);
  }

#if defined(__AVX512BF16__)
  // Load 32 of them as bf16.
  TPC_INLINE __m512i load_bf16(const uint8_t* bytes) const {
    const __m512i wide = _mm512_cvtepi8_epi16(load_bytes<__m256i>(bytes));
    return placed(_mm512_slli_epi16(wide, 4), highest_of_16_);
  }
#endif

 private:
  TPC_INLINE __m512i placed(__m512i shifted, __m512i highest) const {
    return _mm512_ternarylogic_epi32(shifted, bits_, highest, 0xea);
  }

  __m512i exponents_ = _mm512_set1_epi8(0x78), bits_ = _mm512_set1_epi16(-0x7810),
          highest_ = _mm512_set1_epi32(0x38000000), highest_of_16_ = _mm512_set1_epi16(0x3800);
#elif defined(__AVX2__) && defined(__F16C__)
  TPC_INLINE LargeFloat8() { keep(exponents_), keep(bits_), keep(highest_); }

  TPC_INLINE bool are(const uint8_t* bytes) const {
    __m256i least = exponents_;
    for (int64_t place = 0; place < kMany; place += sizeof least)
      least = _mm256_min_epu8(
          least, _mm256_and_si256(load_bytes<__m256i>(bytes + place), exponents_));
    return !_mm256_movemask_epi8(_mm256_cmpeq_epi8(least, _mm256_setzero_si256()));
  }

  TPC_INLINE Register load(const uint8_t* bytes) const {
    const __m128i loaded = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepi8_epi32(loaded), 20);
    return (Register)_mm256_or_si256(_mm256_and_si256(wide, bits_), highest_);
  }

 private:
  __m256i exponents_ = _mm256_set1_epi8(0x78), bits_ = _mm256_set1_epi32(-0x78100000),
          highest_ = _mm256_set1_epi32(0x38000000);
#else  // all numbers are looked up
  static constexpr bool are(const uint8_t*) { return false; }

  static TPC_INLINE Register load(const uint8_t* bytes) { return float8(bytes); }
#endif
};

}  // namespace
