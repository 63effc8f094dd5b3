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

  static TPC_INLINE Loaded weights(const S* row, int64_t column) {
    return load_registers(row + column);
  }
  static TPC_INLINE Loaded some_weights(const S* row, int64_t column, int64_t count) {
    return load_some_registers(row + column, count);
  }
  static TPC_INLINE Loaded values(const float* source) { return load_registers(source); }
  static TPC_INLINE Loaded some_values(const float* source, int64_t count) {
    return load_some_registers(source, count);
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

  static TPC_INLINE Loaded weights(const bf16* row, int64_t column) { return values(row + column); }
  static TPC_INLINE Loaded some_weights(const bf16* row, int64_t column, int64_t count) {
    return some_values(row + column, count);
  }
  static TPC_INLINE Loaded values(const bf16* source) { return _mm512_loadu_si512(source); }
  static TPC_INLINE Loaded some_values(const bf16* source, int64_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), source);
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
inline void convert(const From* values, int64_t count, To* out) {
  for (int64_t place = 0; place < count; place += kLanes)
    store_some(out + place, load_some(values + place, count - place), count - place);
}

// Return values as a form holds them.
template <class F, class T>
TPC_INLINE const typename F::Value* in_form(const T* values, int64_t count, Scratch& scratch) {
  if constexpr (std::is_same_v<typename F::Value, T>) {
    return values;
  } else {
    auto* converted = scratch.take<typename F::Value>(count);
    convert(values, count, converted);
    return converted;
  }
}

template <class F, class T>
TPC_INLINE Sequences<F> sequences(const T* values, int64_t batch, int64_t width, Scratch& scratch) {
  return {in_form<F>(values, batch * width, scratch), width};
}

}  // namespace
