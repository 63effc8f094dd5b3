// Products of weights and values, chunk by chunk.
//
// A form belongs to a type T of values and a format W of weights:
// - `Value` is the type in which values are held, and `kChunk` the columns of a load;
// - `weights` and `values` load a chunk from a column on, `some_weights` and `some_values` a
//   shorter one, whose other numbers are 0;
// - `add` increases sums in fp32 by the products of two chunks.
#pragma once

#include <type_traits>

#include "formats.h"

namespace {

template <class T, class W>
struct Form;

// Values and weights are widened to fp32.
template <class T, class S>
struct Form<T, Plain<S>> {
  using Weights = Plain<S>;
  using Value = float;
  static constexpr int64_t kChunk = kLanes;
  using Loaded = Registers;

  static TPC_INLINE Loaded weights(const S* row, int64_t at) { return load_registers(row + at); }
  static TPC_INLINE Loaded some_weights(const S* row, int64_t at, int64_t count) {
    return load_some_registers(row + at, count);
  }
  static TPC_INLINE Loaded values(const float* from) { return load_registers(from); }
  static TPC_INLINE Loaded some_values(const float* from, int64_t count) {
    return load_some_registers(from, count);
  }
  static TPC_INLINE Registers add(Registers total, Loaded weight, Loaded value) {
    return multiply_add(total, weight, value);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Form<bf16, Plain<bf16>> {
  using Weights = Plain<bf16>;
  using Value = bf16;
  static constexpr int64_t kChunk = 2 * kLanes;
  using Loaded = __m512i;

  static TPC_INLINE Loaded weights(const bf16* row, int64_t at) { return values(row + at); }
  static TPC_INLINE Loaded some_weights(const bf16* row, int64_t at, int64_t count) {
    return some_values(row + at, count);
  }
  static TPC_INLINE Loaded values(const bf16* from) { return _mm512_loadu_si512(from); }
  static TPC_INLINE Loaded some_values(const bf16* from, int64_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), from);
  }
  static TPC_INLINE Registers add(Registers total, Loaded weight, Loaded value) {
    return {(Register)_mm512_dpbf16_ps((__m512)total.each[0], (__m512bh)weight, (__m512bh)value)};
  }
};
#endif

// Whether a form widens values to fp32 first, so that it is that of values in fp32.
template <class T, class W>
constexpr bool kWidens = false;

// The types of a kernel: of values, of the weight, of norms and biases, and of the cache.
template <class V, class W, class N, class C>
struct Types {
  using Value = V;
  using Weight = W;
  using Vector = N;
  using Cache = C;
  using Product = std::conditional_t<kWidens<V, W>, Form<f32, W>, Form<V, W>>;
  using Score = Form<V, Plain<C>>;  // of queries and keys
};

// Values of all sequences, `stride` values apart.
template <class F>
struct Sequences {
  const typename F::Value* first;
  int64_t stride;
};

// Round or widen values to another type.
template <class From, class To>
inline void convert(const From* from, int64_t count, To* to) {
  for (int64_t at = 0; at < count; at += kLanes)
    store_some(to + at, load_some(from + at, count - at), count - at);
}

// Return values as a form holds them.
template <class F, class T>
TPC_INLINE const typename F::Value* in_form(const T* from, int64_t count, Scratch& scratch) {
  if constexpr (std::is_same_v<typename F::Value, T>) {
    return from;
  } else {
    auto* found = scratch.take<typename F::Value>(count);
    convert(from, count, found);
    return found;
  }
}

template <class F, class T>
TPC_INLINE Sequences<F> sequences(const T* from, int64_t batch, int64_t width, Scratch& scratch) {
  return {in_form<F>(from, batch * width, scratch), width};
}

}  // namespace
