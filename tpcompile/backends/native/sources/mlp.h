// Gate and up projections of the normed residual, or up alone, and their activation.
#pragma once

#include "normed.h"

namespace {

template <class V>
TPC_INLINE V silu(V x) { return x / (1.0f + exponential(-x)); }

// x / 2 * (1 + erf(x / sqrt(2))). The sum is 2 - erfc(|a|) or erfc(|a|) of a = x / sqrt(2) away
// from 0, and erfc is the exponential of a polynomial.
template <class V>
TPC_INLINE V gelu(V x) {
  const V a = x * 0.707106781f, size = a < 0 ? -a : a, square = a * a;
  V far = -1.72853470e-5f * size + 3.83197126e-4f;
  far = far * square + (-3.88396438e-3f * size + 2.42546219e-2f);
  far = far * size - 1.06777877e-1f;
  far = far * size - 6.34846687e-1f;
  far = far * size - 1.28717512e-1f;
  far = exponential(far * size - size);
  V near = V{} - 5.96761703e-4f;
  near = near * square + 4.99119423e-3f;
  near = near * square - 2.67681349e-2f;
  near = near * square + 1.12819925e-1f;
  near = near * square - 3.76125336e-1f;
  near = near * square + 1.28379166e-1f;
  const V sum = a < 0 ? far : 2.0f - far;
  return 0.5f * x * (size > 0.927734375f ? sum : 1.0f + (near * a + a));
}

// x / 2 * (1 + tanh(a)) = x / (1 + exp(-2a)) of a = sqrt(2 / pi) * (x + 0.044715 x^3).
template <class V>
TPC_INLINE V gelu_tanh(V x) {
  return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));
}

template <class V>
TPC_INLINE V relu(V x) { return x < 0 ? V{} : x; }

template <class V>
TPC_INLINE V relu2(V x) { return relu(x) * relu(x); }

#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"  // no activation without a function

// Replace values by their activation.
__attribute__((noinline)) void activate(int64_t activation, float* values, int64_t count) {
  const auto apply = [&](auto function) {
    for (int64_t place = 0; place < count; place += kLanes)
      store_some(values + place, by_register(load_some(values + place, count - place), function),
                 count - place);
  };
  switch (static_cast<tpc_activation>(activation)) {
    case TPC_ACTIVATION_SILU: return apply([](Register x) { return silu(x); });
    case TPC_ACTIVATION_GELU: return apply([](Register x) { return gelu(x); });
    case TPC_ACTIVATION_GELU_TANH: return apply([](Register x) { return gelu_tanh(x); });
    case TPC_ACTIVATION_RELU: return apply([](Register x) { return relu(x); });
    case TPC_ACTIVATION_RELU2: return apply([](Register x) { return relu2(x); });
  }
}

#pragma GCC diagnostic pop

// The words of all instructions begin with the same operands.
using GateUp = tpc_norm_gate_up_swiglu;
static_assert(offsetof(GateUp, format) == offsetof(tpc_norm_up_activation, format), "");
static_assert(offsetof(GateUp, format) == offsetof(tpc_norm_gate, format), "");
static_assert(offsetof(GateUp, format) == offsetof(tpc_norm_gated_up, format), "");
static_assert(offsetof(GateUp, format) == offsetof(tpc_norm_rows, format), "");

// Some rows of the projections of all sequences, rounded. `up` is null without a gate.
struct Projected {
  float *first, *up;
};

template <class Types>
inline Projected projected(const Memory& memory, const GateUp& operands, tpc_range range,
                           bool gated, Scratch& scratch) {
  const int64_t rows = range.stop - range.start, batch = operands.normed_batch;
  const auto& x = normed<Types>(memory, operands, scratch);
  float* first = scratch.take<float>(batch * rows);
  float* up = gated ? scratch.take<float>(batch * rows) : nullptr;
  const char* const next_weights = scratch.next_weights;
  const int64_t first_up = int64_t{operands.ffn} + range.start;
  if (gated) read_next(typename Types::Weight(memory, operands.weight), first_up, scratch);
  linear_rows<Types>(memory, operands, x, range.start, rows, first, rows, scratch);
  scratch.next_weights = next_weights, scratch.next_scales = nullptr;
  if (gated) linear_rows<Types>(memory, operands, x, first_up, rows, up, rows, scratch);
  return {first, up};
}

// Store `f(place, count)`, up to 16 values of the rows of a sequence.
template <class T, class Words, class F>
TPC_INLINE void store_rows(const Memory& memory, const Words& operands, F f) {
  const int64_t rows = operands.rows.stop - operands.rows.start, batch = operands.normed_batch;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t row = 0; row < rows; row += kLanes)
      store_some(memory.at<T>(operands.out) + b * int64_t{operands.ffn} + operands.rows.start + row,
                 f(b * rows + row, rows - row), rows - row);
}

// The activation is rounded before it is multiplied, as torch does.
template <class Types>
void norm_gate_up_swiglu(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& operands = *reinterpret_cast<const tpc_norm_gate_up_swiglu*>(words);
  const auto [gate, up] = projected<Types>(memory, operands, operands.rows, true, scratch);
  store_rows<T>(memory, operands, [gate = gate, up = up](int64_t place, int64_t count) {
    return rounded<T>(silu(load_some(gate + place, count))) * load_some(up + place, count);
  });
}

template <class Types>
void norm_up_activation(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& operands = *reinterpret_cast<const tpc_norm_up_activation*>(words);
  const auto& shared = *reinterpret_cast<const GateUp*>(words);
  const auto [first, up] =
      projected<Types>(memory, shared, operands.rows, operands.sides == 2, scratch);
  activate(operands.activation, first,
           int64_t{operands.normed_batch} * (operands.rows.stop - operands.rows.start));
  store_rows<T>(memory, operands, [first = first, up = up](int64_t place, int64_t count) {
    const Lanes active = load_some(first + place, count);
    return up ? rounded<T>(active) * load_some(up + place, count) : active;
  });
}

template <class Types>
void norm_gate(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& operands = *reinterpret_cast<const tpc_norm_gate*>(words);
  const auto& shared = *reinterpret_cast<const GateUp*>(words);
  const float* gate = projected<Types>(memory, shared, operands.rows, false, scratch).first;
  store_rows<typename Types::Value>(memory, operands, [gate](int64_t place, int64_t count) {
    return load_some(gate + place, count);
  });
}

// Some rows of a linear, which other instructions of the layer read.
template <class Types>
void norm_rows(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& shared = *reinterpret_cast<const GateUp*>(words);
  const auto& operands = *reinterpret_cast<const tpc_norm_rows*>(words);
  const float* results = projected<Types>(memory, shared, operands.rows, false, scratch).first;
  const int64_t rows = operands.rows.stop - operands.rows.start;
  for (int64_t b = 0; b < operands.normed_batch; ++b)
    convert(results + b * rows, rows,
            memory.at<typename Types::Value>(operands.out) + b * int64_t{operands.width} +
                operands.rows.start);
}

template <class Types>
void norm_gated_up(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& operands = *reinterpret_cast<const tpc_norm_gated_up*>(words);
  const auto& shared = *reinterpret_cast<const GateUp*>(words);
  const int64_t rows = operands.rows.stop - operands.rows.start, batch = operands.normed_batch;
  const float* up = projected<Types>(memory, shared, operands.rows, false, scratch).first;
  float* gate = scratch.take<float>(batch * rows);
  for (int64_t b = 0; b < batch; ++b)
    convert(memory.at<T>(operands.gate) + b * int64_t{operands.ffn} + operands.rows.start, rows,
            gate + b * rows);
  activate(operands.activation, gate, batch * rows);
  store_rows<T>(memory, operands, [gate, up](int64_t place, int64_t count) {
    return rounded<T>(load_some(gate + place, count)) * load_some(up + place, count);
  });
}

}  // namespace
