// Integers in registers of the path: 16 lanes of int32, and 32 of int16, which multiply in pairs.
#pragma once

#include "numbers.h"

namespace {

typedef int32_t IntRegister __attribute__((vector_size(4 * kRegister)));
typedef int16_t ShortRegister __attribute__((vector_size(4 * kRegister)));
typedef uint16_t WordRegister __attribute__((vector_size(4 * kRegister)));

struct IntRegisters {
  IntRegister each[kRegisters];
};

struct ShortRegisters {
  ShortRegister each[kRegisters];
};

TPC_INLINE ShortRegisters load_shorts(const void* from) {
  ShortRegisters found;
  for (int own = 0; own < kRegisters; ++own)
    found.each[own] =
        load_bytes<ShortRegister>(static_cast<const char*>(from) + 4 * kRegister * own);
  return found;
}

// Hold a value in registers: compilers would load it again for each use.
TPC_INLINE void keep(ShortRegisters& value) {
#if defined(__AVX2__)
  for (int own = 0; own < kRegisters; ++own) __asm__("" : "+v"(value.each[own]));
#endif
}

TPC_INLINE IntRegisters load_ints(const int32_t* from) {
  IntRegisters found;
  for (int own = 0; own < kRegisters; ++own)
    found.each[own] = load_bytes<IntRegister>(from + kRegister * own);
  return found;
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

// Return every second lane: those of `a`, then those of `b`.
template <int kOdd>
TPC_INLINE IntRegisters every_second(IntRegisters a, IntRegisters b) {
#if defined(__AVX512F__)
  const IntRegister even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return {(IntRegister)_mm512_permutex2var_epi32((__m512i)a.each[0], (__m512i)(even + kOdd),
                                                 (__m512i)b.each[0])};
#elif defined(__AVX2__)
  const auto join = [](IntRegister low, IntRegister high) {
    const __m256 found = _mm256_shuffle_ps((__m256)low, (__m256)high, kOdd ? 0xdd : 0x88);
    return (IntRegister)_mm256_permute4x64_epi64((__m256i)found, 0xd8);
  };
  return {join(a.each[0], a.each[1]), join(b.each[0], b.each[1])};
#else
  int32_t held[2 * kLanes], found[kLanes];
  std::memcpy(held, &a, sizeof a);
  std::memcpy(held + kLanes, &b, sizeof b);
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = held[2 * lane + kOdd];
  return load_ints(found);
#endif
}

TPC_INLINE IntRegisters evens(IntRegisters a, IntRegisters b) { return every_second<0>(a, b); }
TPC_INLINE IntRegisters odds(IntRegisters a, IntRegisters b) { return every_second<1>(a, b); }

// Return the sums of adjacent lanes: those of `a`, then those of `b`.
TPC_INLINE IntRegisters pairs_added(IntRegisters a, IntRegisters b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const auto join = [](IntRegister low, IntRegister high) {
    const __m256i sums = _mm256_hadd_epi32((__m256i)low, (__m256i)high);
    return (IntRegister)_mm256_permute4x64_epi64(sums, 0xd8);
  };
  return {join(a.each[0], a.each[1]), join(b.each[0], b.each[1])};
#else
  IntRegisters found = evens(a, b);
  const IntRegisters more = odds(a, b);
  for (int own = 0; own < kRegisters; ++own) found.each[own] += more.each[own];
  return found;
#endif
}

TPC_INLINE Registers pairs_added(Registers a, Registers b) {
  const Lanes x = lanes(a), y = lanes(b);
  Lanes found;
  for (int lane = 0; lane < kLanes / 2; ++lane) {
    found[lane] = x[2 * lane] + x[2 * lane + 1];
    found[kLanes / 2 + lane] = y[2 * lane] + y[2 * lane + 1];
  }
  return load_bytes<Registers>(&found);
}

// Store lanes as integers of 16 bits, which their values need at most.
TPC_INLINE void narrow(IntRegisters from, int16_t* to) {
  typedef int16_t Narrow __attribute__((vector_size(2 * kRegister)));
  for (int own = 0; own < kRegisters; ++own) {
    const Narrow found = __builtin_convertvector(from.each[own], Narrow);
    std::memcpy(to + own * kRegister, &found, sizeof found);
  }
}

typedef uint32_t EightBits __attribute__((vector_size(32)));
typedef uint32_t FourBits __attribute__((vector_size(16)));

// The largest lane.
TPC_INLINE uint32_t greatest(BitLanes from) {
  const auto larger = [](auto a, auto b) { return a > b ? a : b; };
  EightBits eight[2];
  std::memcpy(eight, &from, sizeof from);
  eight[0] = larger(eight[0], eight[1]);
  FourBits four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] = larger(four[0], four[1]);
  return larger(larger(four[0][0], four[0][2]), larger(four[0][1], four[0][3]));
}

// The sum of the lanes.
TPC_INLINE int32_t added(IntLanes from) {
  EightBits eight[2];
  std::memcpy(eight, &from, sizeof from);
  eight[0] += eight[1];
  FourBits four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return static_cast<int32_t>((four[0][0] + four[0][2]) + (four[0][1] + four[0][3]));
}

TPC_INLINE Registers floats(IntRegisters from) {
  Registers found;
  for (int own = 0; own < kRegisters; ++own)
    found.each[own] = __builtin_convertvector(from.each[own], Register);
  return found;
}

TPC_INLINE Registers multiply(Registers a, Registers b) {
  for (int own = 0; own < kRegisters; ++own) a.each[own] *= b.each[own];
  return a;
}

}  // namespace
