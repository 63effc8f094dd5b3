// The normed residual, which each instruction computes for itself, and rows of linears of it.
#pragma once

#include "dots.h"

namespace {

// Normalise a row in fp32, round it to T, multiply by the weight and round again. If it is
// zero-centred, multiply by 1 + weight, and round only the product.
template <class T, class N>
inline void rms_norm(const float* x, const N* weight, int64_t width, float eps, bool zero_centered,
                     float* out) {
  Lanes even{}, odd{};
  for (int64_t column = 0; column < width; column += kLanes) {
    const Lanes values = load_some(x + column, width - column);
    if (column / kLanes % 2)
      odd = odd + values * values;
    else
      even = even + values * values;
  }
  const float root = std::sqrt(sum(even + odd) / static_cast<float>(width) + eps);
  for (int64_t column = 0; column < width; column += kLanes) {
    const Lanes normal = load_some(x + column, width - column) / root;
    const Lanes scale = load_some(weight + column, width - column);
    const Lanes scaled = zero_centered ? (scale + 1.0f) * normal : scale * rounded<T>(normal);
    store_some(out + column, rounded<T>(scaled), width - column);
  }
}

// Return the normed residual of all sequences. `Words` are of an instruction that begins with a
// norm.
template <class Types, class Words>
inline Sequences<typename Types::Product> normed_rows(const Memory& memory, const Words& operands,
                                                      Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  using Value = typename F::Value;
  const int64_t batch = operands.normed_batch, width = operands.normed_width;
  Value* rows = scratch.take<Value>(batch * width);
  float* row = scratch.take<float>(width);
  for (int64_t b = 0; b < batch; ++b) {
    convert(memory.at<T>(operands.normed_x) + b * width, width, row);
    rms_norm<T>(row, memory.at<typename Types::Vector>(operands.normed_weight), width,
                operands.normed_eps, operands.normed_zero_centered, row);
    convert(row, width, rows + b * width);
  }
  return {rows, width};
}

// The same, as rows of the weight are multiplied by it.
template <class Types, class Words>
inline const Operand<typename Types::Product>& normed(const Memory& memory, const Words& operands,
                                                      Scratch& scratch) {
  return scratch.once([&] {
    const auto rows = normed_rows<Types>(memory, operands, scratch);
    const typename Types::Weight weight(memory, operands.weight);
    return operand(rows, operands.normed_batch, operands.normed_width, 1, weight, scratch);
  });
}

// Apply rows of a linear to the normed residual; round the results as values.
template <class Types, class Words>
inline void linear_rows(const Memory& memory, const Words& operands,
                        const Operand<typename Types::Product>& x, int64_t first, int64_t rows,
                        float* out, int64_t out_stride, Scratch& scratch) {
  const typename Types::Weight weight(memory, operands.weight);
  dots(weight.from(first, 0), rows, x, out, out_stride, scratch);
  add_bias<typename Types::Vector>(memory, operands.bias, first, rows, x.batch, out, out_stride);
  for (int64_t b = 0; b < x.batch; ++b)
    round_all<typename Types::Value>(out + b * out_stride, rows);
}

}  // namespace
