// Integers in registers of the path: 16 lanes of int32, and 32 of int16, which multiply in pairs.
#pragma once

#include "shuffles.h"

namespace {

typedef int32_t IntRegister __attribute__((vector_size(4 * kRegister)));
typedef int16_t ShortRegister __attribute__((vector_size(4 * kRegister)));
typedef uint16_t WordRegister __attribute__((vector_size(4 * kRegister)));

struct IntRegisters {
  IntRegister each[kRegisters];
};

// Compilers copy arrays of registers through memory, so the inner loops have single ones.
TPC_INLINE ShortRegister load_shorts(const void* source) {
  return load_bytes<ShortRegister>(source);
}

// Hold a value in a register: compilers would load it again for each use.
template <class V>
TPC_INLINE void keep([[maybe_unused]] V& value) {
#if defined(__AVX2__)
  __asm__("" : "+v"(value));
#endif
}

template <class V>
TPC_INLINE V kept(V value) {
  keep(value);
  return value;
}

TPC_INLINE IntRegisters load_ints(const int32_t* source) {
  IntRegisters integers;
  for (int part = 0; part < kRegisters; ++part)
    integers.each[part] = load_bytes<IntRegister>(source + kRegister * part);
  return integers;
}

TPC_INLINE int32_t number(const int8_t* source) { return *source; }

TPC_INLINE IntRegister load_register(const int8_t* source) {
#if defined(__AVX512F__)
  return (IntRegister)_mm512_cvtepi8_epi32(load_bytes<__m128i>(source));
#elif defined(__AVX2__)
  return (IntRegister)_mm256_cvtepi8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#else
  IntRegister integers;
  for (int lane = 0; lane < kRegister; ++lane) integers[lane] = source[lane];
  return integers;
#endif
}

TPC_INLINE IntRegister load_register(const uint8_t* source) {
#if defined(__AVX512F__)
  return (IntRegister)_mm512_cvtepu8_epi32(load_bytes<__m128i>(source));
#elif defined(__AVX2__)
  return (IntRegister)_mm256_cvtepu8_epi32(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source)));
#else
  IntRegister integers;
  for (int lane = 0; lane < kRegister; ++lane) integers[lane] = source[lane];
  return integers;
#endif
}

// The first lanes; others are 0.
template <class V>
TPC_INLINE V first_lanes(V values, int64_t count) {
  IntRegister places;
  for (int lane = 0; lane < kRegister; ++lane) places[lane] = lane;
  return (V)((IntRegister)values & (places < static_cast<int32_t>(count)));
}

TPC_INLINE IntRegister everywhere(int32_t value) { return IntRegister{} + value; }

// The lanes of `a` where a mask is -1, and those of `b` where it is 0.
TPC_INLINE Register either(IntRegister mask, Register a, Register b) {
  return (Register)((mask & (IntRegister)a) | (~mask & (IntRegister)b));
}

// The first lanes of one register, and the last ones of another.
template <class V>
TPC_INLINE V spliced(V first, V last, int64_t count) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>(0xffff << count);
  return (V)_mm512_mask_mov_ps((__m512)first, mask, (__m512)last);
#else
  IntRegister places;
  for (int lane = 0; lane < kRegister; ++lane) places[lane] = lane;
  return places < static_cast<int32_t>(count) ? first : last;
#endif
}

// Load one integer of 32 bits, or two, again and again.
template <int kInts>
TPC_INLINE ShortRegister everywhere(const int32_t* source) {
  typedef int64_t LongRegister __attribute__((vector_size(4 * kRegister)));
  static_assert(kInts <= 2);
  if constexpr (kInts == 1) return (ShortRegister)(IntRegister{} + *source);
  else return (ShortRegister)(LongRegister{} + load_bytes<int64_t>(source));
}

// Increase each lane by the products of two adjacent lanes.
TPC_INLINE IntRegister multiply_add(IntRegister total, ShortRegister a, ShortRegister b) {
#if defined(__AVX512VNNI__)
  return (IntRegister)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return total + (IntRegister)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return total + (IntRegister)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return total + (IntRegister)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  for (int lane = 0; lane < kRegister; ++lane)
    total[lane] += int32_t{a[2 * lane]} * b[2 * lane] + int32_t{a[2 * lane + 1]} * b[2 * lane + 1];
  return total;
#endif
}

// Increase each lane by the products of four adjacent bytes of it: of signed values, and of weights
// that are signed or not.
template <bool kSigned>
TPC_INLINE IntRegister multiply_bytes(IntRegister total, ShortRegister weight, ShortRegister x) {
#if defined(__AVX512VNNI__)
  static_assert(!kSigned);
  return (IntRegister)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weight, (__m512i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  auto a = (__m256i)weight, b = (__m256i)x;
  if constexpr (kSigned) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
  const __m256i pairs = _mm256_maddubs_epi16(a, b);
  return total + (IntRegister)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  const auto odd = [](ShortRegister values) { return values >> 8; };
  const auto even = [](ShortRegister values) { return (values << 8) >> 8; };
  total = multiply_add(total, even(weight), even(x));
  return multiply_add(total, odd(weight), odd(x));
#endif
}

// Whether `multiply_bytes` takes signed weights of 8 bits. If not, they are raised by 128.
#if defined(__AVX512VNNI__)
constexpr bool kSignedBytes = false;
#else
constexpr bool kSignedBytes = true;
#endif

// The offset that is added to integers with this number of bits for `multiply_bytes`.
constexpr int32_t raised_bytes(int bits) {
  return bits == 8 && kSignedBytes ? 0 : 1 << (bits - 1);
}

// Return every second lane: those of `a`, then those of `b`.
template <int kOdd>
TPC_INLINE IntRegisters every_second(IntRegisters a, IntRegisters b) {
#if defined(__AVX512F__)
  const IntRegister even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return {(IntRegister)_mm512_permutex2var_epi32((__m512i)a.each[0], (__m512i)(even + kOdd),
                                                 (__m512i)b.each[0])};
#elif defined(__AVX2__)
  const auto join = [](IntRegister low, IntRegister high) {
    const __m256 lanes = _mm256_shuffle_ps((__m256)low, (__m256)high, kOdd ? 0xdd : 0x88);
    return (IntRegister)_mm256_permute4x64_epi64((__m256i)lanes, 0xd8);
  };
  return {join(a.each[0], a.each[1]), join(b.each[0], b.each[1])};
#else
  int32_t held[2 * kLanes], lanes[kLanes];
  std::memcpy(held, &a, sizeof a);
  std::memcpy(held + kLanes, &b, sizeof b);
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = held[2 * lane + kOdd];
  return load_ints(lanes);
#endif
}

TPC_INLINE IntRegisters evens(IntRegisters a, IntRegisters b) { return every_second<0>(a, b); }
TPC_INLINE IntRegisters odds(IntRegisters a, IntRegisters b) { return every_second<1>(a, b); }

// Return the sums of adjacent lanes: those of `a`, then those of `b`.
TPC_INLINE IntRegister pairs_added(IntRegister a, IntRegister b) {
#if defined(__AVX512F__)
  return evens(IntRegisters{a}, IntRegisters{b}).each[0] +
         odds(IntRegisters{a}, IntRegisters{b}).each[0];
#elif defined(__AVX2__)
  const __m256i sums = _mm256_hadd_epi32((__m256i)a, (__m256i)b);
  return (IntRegister)_mm256_permute4x64_epi64(sums, 0xd8);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

#if defined(__AVX512F__)
// Order sums of fours of registers with `kBlocks` blocks each. Quarters have one block of each
// register; return all blocks of the first register, then those of the second.
template <int kBlocks>
TPC_INLINE IntRegister in_order(IntRegister v) {
  if constexpr (kBlocks == 2)
    return __builtin_shufflevector(v, v, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  else if constexpr (kBlocks == 4)
    return __builtin_shufflevector(v, v, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  else return v;
}
#elif defined(__AVX2__)
// Each lane of the upper half after its like.
TPC_INLINE IntRegister in_order(IntRegister values) {
  return (IntRegister)_mm256_permutevar8x32_epi32((__m256i)values,
                                                  _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The sums of both halves of `a`, then those of `b`.
TPC_INLINE IntRegister halves_added(IntRegister a, IntRegister b) {
  return (IntRegister)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x20) +
         (IntRegister)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x31);
}
#endif

TPC_INLINE Register pairs_added(Register a, Register b) {
#if defined(__AVX512F__)
  const IntRegisters x{(IntRegister)a}, y{(IntRegister)b};
  return (Register)evens(x, y).each[0] + (Register)odds(x, y).each[0];
#elif defined(__AVX2__)
  const __m256 sums = _mm256_hadd_ps((__m256)a, (__m256)b);
  return (Register)_mm256_permute4x64_epi64(_mm256_castps_si256(sums), 0xd8);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// Round to the nearest integers, ties to even.
TPC_INLINE IntRegister nearest(Register values) {
#if defined(__AVX512F__)
  return (IntRegister)_mm512_cvtps_epi32((__m512)values);
#elif defined(__AVX2__)
  return (IntRegister)_mm256_cvtps_epi32((__m256)values);
#elif defined(__SSE2__)
  return (IntRegister)_mm_cvtps_epi32((__m128)values);
#else
  IntRegister integers;
  for (int lane = 0; lane < kRegister; ++lane)
    integers[lane] = static_cast<int32_t>(std::nearbyint(values[lane]));
  return integers;
#endif
}

// Store lanes as shorter integers, of which their values need no more.
template <class V>
TPC_INLINE void narrow(IntRegisters integers, V* out) {
  typedef V Narrow __attribute__((vector_size(sizeof(V) * kRegister)));
  for (int part = 0; part < kRegisters; ++part) {
    const Narrow narrowed = __builtin_convertvector(integers.each[part], Narrow);
    std::memcpy(out + part * kRegister, &narrowed, sizeof narrowed);
  }
}

typedef uint32_t FourBits __attribute__((vector_size(16)));

// The largest lane.
TPC_INLINE uint32_t greatest(BitRegister values) {
  FourBits four[kRegister / 4];
  std::memcpy(four, &values, sizeof values);
  for (const FourBits& bits : four) four[0] = bits > four[0] ? bits : four[0];
  const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  return larger(larger(four[0][0], four[0][2]), larger(four[0][1], four[0][3]));
}

// The sum of the lanes.
TPC_INLINE int32_t added(IntRegister values) {
  FourBits four[kRegister / 4], total{};
  std::memcpy(four, &values, sizeof values);
  for (const FourBits& bits : four) total += bits;
  return static_cast<int32_t>((total[0] + total[2]) + (total[1] + total[3]));
}

}  // namespace
