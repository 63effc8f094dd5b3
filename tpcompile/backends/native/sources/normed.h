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
  for (int64_t at = 0; at < width; at += kLanes) {
    const Lanes own = load_some(x + at, width - at);
    if (at / kLanes % 2)
      odd = odd + own * own;
    else
      even = even + own * own;
  }
  const float root = std::sqrt(sum(even + odd) / static_cast<float>(width) + eps);
  for (int64_t at = 0; at < width; at += kLanes) {
    const Lanes normal = load_some(x + at, width - at) / root;
    const Lanes scale = load_some(weight + at, width - at);
    const Lanes found = zero_centered ? (scale + 1.0f) * normal : scale * rounded<T>(normal);
    store_some(out + at, rounded<T>(found), width - at);
  }
}

// Return the normed residual of all sequences. `Words` are of an instruction that begins with a
// norm.
template <class Types, class Words>
inline Sequences<typename Types::Product> normed_rows(const Memory& memory, const Words& at,
                                                      Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  using Value = typename F::Value;
  const int64_t batch = at.normed_batch, width = at.normed_width;
  Value* found = scratch.take<Value>(batch * width);
  float* row = scratch.take<float>(width);
  for (int64_t b = 0; b < batch; ++b) {
    convert(memory.at<T>(at.normed_x) + b * width, width, row);
    rms_norm<T>(row, memory.at<typename Types::Vector>(at.normed_weight), width, at.normed_eps,
                at.normed_zero_centered, row);
    convert(row, width, found + b * width);
  }
  return {found, width};
}

// The same, as rows of the weight are multiplied by it.
template <class Types, class Words>
inline const Operand<typename Types::Product>& normed(const Memory& memory, const Words& at,
                                                      Scratch& scratch) {
  return scratch.once([&] {
    const auto rows = normed_rows<Types>(memory, at, scratch);
    const typename Types::Weight weight(memory, at.weight);
    return operand(rows, at.normed_batch, at.normed_width, 1, weight, scratch);
  });
}

// Apply rows of a linear to the normed residual; round the results as values.
template <class Types, class Words>
inline void linear_rows(const Memory& memory, const Words& at,
                        const Operand<typename Types::Product>& x, int64_t first, int64_t rows,
                        float* out, int64_t out_stride, Scratch& scratch) {
  const typename Types::Weight weight(memory, at.weight);
  dots(weight.from(first, 0), rows, x, out, out_stride, scratch);
  add_bias<typename Types::Vector>(memory, at.bias, first, rows, x.batch, out, out_stride);
  for (int64_t b = 0; b < x.batch; ++b)
    round_all<typename Types::Value>(out + b * out_stride, rows);
}

}  // namespace
