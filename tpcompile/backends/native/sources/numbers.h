// Numbers: 16 lanes of fp32, and the dtypes that they are loaded from and rounded to.
//
// The kernels of a path are one translation unit with its own target flags. Everything here has
// internal linkage, so that the linker cannot give one path the code of another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;

typedef float Lanes __attribute__((vector_size(64)));
typedef float EightLanes __attribute__((vector_size(32)));
typedef float FourLanes __attribute__((vector_size(16)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t BitLanes __attribute__((vector_size(64)));
typedef uint16_t HalfBitLanes __attribute__((vector_size(32)));
typedef _Float16 HalfLanes __attribute__((vector_size(32)));

#ifndef TPC_ALWAYS  // tests define it as empty, which makes less code of each kernel
#define TPC_ALWAYS __attribute__((always_inline))
#endif
#define TPC_INLINE inline TPC_ALWAYS

struct bf16 {
  uint16_t bits;
};
using f16 = _Float16;
using f32 = float;

template <class V>
TPC_INLINE V load_bytes(const void* source) {
  V value;
  std::memcpy(&value, source, sizeof(V));
  return value;
}

// Fetch a line of memory into the second-level cache, or into the nearest one. Compilers keep such
// fetches in order, and do not move them over a value that must be computed before the next one.
// They would gather builtin ones, and a CPU that begins many at a time reads at two thirds of its
// rate.
TPC_INLINE void fetch_line(const void* line) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

TPC_INLINE void fetch_near(const void* line) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line);
#endif
}

template <class V>
TPC_INLINE void before_next_fetch([[maybe_unused]] V& value) {
#if defined(__AVX2__)
  __asm__ volatile("" : "+v"(value));
#elif defined(__x86_64__)
  __asm__ volatile("" : "+x"(value));
#endif
}

// GCC's intrinsics of tiles do not tell the compiler which memory they read and write.
TPC_INLINE void complete_writes() { __asm__ volatile("" ::: "memory"); }

TPC_INLINE Lanes all(float value) { return Lanes{} + value; }

// The same lanes in registers of the path. Compilers hold vectors wider than a register in memory,
// so loops that run for each weight use these.
#if defined(__AVX512F__)
constexpr int kRegister = 16;
#elif defined(__AVX__)
constexpr int kRegister = 8;
#else
constexpr int kRegister = 4;
#endif
constexpr int kRegisters = kLanes / kRegister;
typedef float Register __attribute__((vector_size(4 * kRegister)));
typedef uint32_t BitRegister __attribute__((vector_size(4 * kRegister)));
typedef uint16_t HalfBits __attribute__((vector_size(2 * kRegister)));
typedef _Float16 HalfRegister __attribute__((vector_size(2 * kRegister)));

struct Registers {
  Register each[kRegisters];
};

TPC_INLINE Lanes lanes(Registers registers) {
  Lanes values;
  std::memcpy(&values, &registers, sizeof values);
  return values;
}

// Store one register after the other: GCC copies all of them at once through scalar registers.
TPC_INLINE void store_registers(void* out, Registers registers) {
#pragma GCC unroll 4
  for (int part = 0; part < kRegisters; ++part)
    std::memcpy(static_cast<Register*>(out) + part, registers.each + part, sizeof(Register));
}

TPC_INLINE Registers operator+(Registers a, Registers b) {
#pragma GCC unroll 4
  for (int part = 0; part < kRegisters; ++part) a.each[part] += b.each[part];
  return a;
}

// Return total + a * b, rounded once where the CPU can. Compilers fuse a product and a sum in some
// places and not in others, so that fp32 results would depend on the kernel that made them.
TPC_INLINE Register multiply_add(Register total, Register a, Register b) {
#if defined(__AVX512F__)
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)total);
#elif defined(__FMA__)
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#else
  return total + a * b;
#endif
}

TPC_INLINE Registers multiply_add(Registers total, Registers a, Registers b) {
  for (int part = 0; part < kRegisters; ++part)
    total.each[part] = multiply_add(total.each[part], a.each[part], b.each[part]);
  return total;
}

TPC_INLINE Registers multiply_add(Registers total, Registers a, float b) {
  for (int part = 0; part < kRegisters; ++part)
    total.each[part] = multiply_add(total.each[part], a.each[part], Register{} + b);
  return total;
}

TPC_INLINE Register load_register(const f32* source) { return load_bytes<Register>(source); }

TPC_INLINE Register load_register(const f16* source) {
#if defined(__AVX512F__)
  return (Register)_mm512_cvtph_ps(load_bytes<__m256i>(source));
#elif defined(__F16C__)
  return (Register)_mm256_cvtph_ps(load_bytes<__m128i>(source));
#else
  return __builtin_convertvector(load_bytes<HalfRegister>(source), Register);
#endif
}

// A value in all lanes. `Register{}` plus a value needs an addition, because 0 plus -0 is 0.
TPC_INLINE Register everywhere(float value) {
#if defined(__AVX512F__)
  return (Register)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (Register)_mm256_set1_ps(value);
#else
  Register values;
  for (int lane = 0; lane < kRegister; ++lane) values[lane] = value;
  return values;
#endif
}

// One number in all lanes.
TPC_INLINE Register everywhere(const f16* source) {
#if defined(__AVX512F__)
  return (Register)_mm512_cvtph_ps(_mm256_set1_epi16(load_bytes<int16_t>(source)));
#elif defined(__F16C__)
  return (Register)_mm256_cvtph_ps(_mm_set1_epi16(load_bytes<int16_t>(source)));
#else
  return Register{} + static_cast<float>(*source);
#endif
}

TPC_INLINE Register load_register(const bf16* source) {
#if defined(__AVX512F__)  // GCC widens halves of a register, and joins them
  const auto wide = (BitRegister)_mm512_cvtepu16_epi32(load_bytes<__m256i>(source));
#elif defined(__AVX2__)
  const auto wide = (BitRegister)_mm256_cvtepu16_epi32(load_bytes<__m128i>(source));
#else
  const BitRegister wide = __builtin_convertvector(load_bytes<HalfBits>(source), BitRegister);
#endif
  return (Register)(wide << 16);
}

template <class T>
TPC_INLINE Registers load_registers(const T* source) {
  Registers registers;
  for (int part = 0; part < kRegisters; ++part)
    registers.each[part] = load_register(source + part * kRegister);
  return registers;
}

TPC_INLINE Lanes load(const f32* source) { return load_bytes<Lanes>(source); }

TPC_INLINE Lanes load(const f16* source) { return lanes(load_registers(source)); }

TPC_INLINE Lanes load(const bf16* source) { return lanes(load_registers(source)); }

TPC_INLINE void store(f32* out, Lanes values) { std::memcpy(out, &values, sizeof values); }

TPC_INLINE void store(f16* out, Lanes values) {
#if defined(__AVX512F__)
  const __m256i stored = _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  __m256 halves[2];
  std::memcpy(halves, &values, sizeof values);
  const __m128i stored[] = {_mm256_cvtps_ph(halves[0], _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(halves[1], _MM_FROUND_TO_NEAREST_INT)};
#else
  const HalfLanes stored = __builtin_convertvector(values, HalfLanes);
#endif
  std::memcpy(out, &stored, sizeof stored);
}

// Round to the nearest bf16, ties to even; NaN stays NaN. The result is in the upper halves.
template <class V>
TPC_INLINE auto nearest_bf16(V values) {
  typedef uint32_t Bits __attribute__((vector_size(sizeof(V))));
  const Bits bits = (Bits)values;
  const Bits nearest = bits + 0x7fff + ((bits >> 16) & 1);
  const Bits rounded = values == values ? nearest : bits | 0x400000;
  return rounded & 0xffff0000;
}

// Apply `f` to each register of 16 lanes.
template <class F>
TPC_INLINE Lanes by_register(Lanes values, const F& f) {
  auto registers = load_bytes<Registers>(&values);
  for (Register& part : registers.each) part = f(part);
  return lanes(registers);
}

TPC_INLINE void store(bf16* out, Lanes values) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const auto registers = load_bytes<Registers>(&values);
  const auto half = [&](int part) TPC_ALWAYS {
    return _mm256_srli_epi32((__m256i)nearest_bf16(registers.each[part]), 16);
  };
  // The result has the lower halves of both first.
  const __m256i stored = _mm256_permute4x64_epi64(_mm256_packus_epi32(half(0), half(1)), 0xd8);
#else
  const HalfBitLanes stored = __builtin_convertvector(nearest_bf16(values) >> 16, HalfBitLanes);
#endif
  std::memcpy(out, &stored, sizeof stored);
}

// Round fp32 values to T and back.
template <class T>
TPC_INLINE Lanes rounded(Lanes values) {
  T held[kLanes];
  store(held, values);
  return load(held);
}

template <>
TPC_INLINE Lanes rounded<f32>(Lanes values) {
  return values;
}

template <>
TPC_INLINE Lanes rounded<bf16>(Lanes values) {
  return by_register(values, [](Register part) TPC_ALWAYS { return (Register)nearest_bf16(part); });
}

// Load up to 16 values; the other lanes are 0.
template <class T>
TPC_INLINE Registers load_some_registers(const T* source, int64_t count) {
  if (count >= kLanes) return load_registers(source);
  T held[kLanes] = {};
  std::memcpy(held, source, sizeof(T) * static_cast<size_t>(count));
  return load_registers(held);
}

template <class T>
TPC_INLINE Lanes load_some(const T* source, int64_t count) {
  return lanes(load_some_registers(source, count));
}

template <class T>
TPC_INLINE void store_some(T* out, Lanes values, int64_t count) {
  if (count >= kLanes) {
    store(out, values);
    return;
  }
  T held[kLanes];
  store(held, values);
  std::memcpy(out, held, sizeof(T) * static_cast<size_t>(count));
}

TPC_INLINE float number(const f32* source) { return *source; }

TPC_INLINE float number(const f16* source) { return static_cast<float>(*source); }

TPC_INLINE float number(const bf16* source) {
  const uint32_t bits = static_cast<uint32_t>(source->bits) << 16;
  return load_bytes<float>(&bits);
}

TPC_INLINE float largest(Lanes values) {
  float most = values[0];
  for (int lane = 1; lane < kLanes; ++lane) most = values[lane] > most ? values[lane] : most;
  return most;
}

// exp(x) within 2 units in the last place. The result is 0 below -87.3 and infinite above 88.3.
template <class V>
TPC_INLINE V exponential(V x) {
  using Ints = decltype(x < x);
  const V low = V{} - 87.3f, high = V{} + 88.3f;
  const V within = x < low ? low : (x > high ? high : x);
  const V turned = within * 1.44269504f;
  const V half = turned < 0 ? V{} - 0.5f : V{} + 0.5f;
  const Ints power = __builtin_convertvector(turned + half, Ints);
  const V whole = __builtin_convertvector(power, V);
  const V reduced = (within - whole * 0.693359375f) + whole * 2.12194440e-4f;
  V poly = V{} + 1.9875691500e-4f;
  poly = poly * reduced + 1.3981999507e-3f;
  poly = poly * reduced + 8.3334519073e-3f;
  poly = poly * reduced + 4.1665795894e-2f;
  poly = poly * reduced + 1.6666665459e-1f;
  poly = poly * reduced + 5.0000001201e-1f;
  poly = poly * reduced * reduced + reduced + 1.0f;
  const V value = poly * (V)((power + 127) << 23);
  const V ends = x < low ? V{} : V{} + std::numeric_limits<float>::infinity();
  const V finite = (x < low) | (x > high) ? ends : value;
  return x == x ? finite : x;
}

template <class V>
TPC_INLINE V sigmoid(V x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace
