// Projections that are added to the residual, and the terms of sums.
#pragma once

#include "normed.h"

namespace {

template <class Types>
void linear_residual(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_linear_residual*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, first = at.rows.start;
  const int64_t whole = memory.extent(at.out, 1);
  const typename Types::Weight weight(memory, at.weight);
  const Operand<F>& x = scratch.once([&] {
    const Sequences<F> values = sequences<F>(memory.at<T>(at.x), at.batch, at.width, scratch);
    return operand(values, at.batch, at.width, at.leaves, weight, scratch);
  });
  float* found = scratch.take<float>(at.batch * rows);
  dots(weight.from(first, 0), rows, x, found, rows, scratch);
  add_bias<typename Types::Vector>(memory, at.bias, first, rows, at.batch, found, rows);
  for (int64_t b = 0; b < at.batch; ++b)
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int64_t place = b * whole + first + row;
      const Lanes old = load_some(memory.at<T>(at.residual) + place, rows - row);
      store_some(memory.at<T>(at.out) + place, old + load_some(found + b * rows + row, rows - row),
                 rows - row);
    }
}

template <class Types>
void linear_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_linear_terms*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, whole = memory.extent(at.out, 1);
  const typename Types::Weight weight(memory, at.weight);
  const auto own = weight.from(0, at.columns.start);
  const Operand<F>& x = scratch.once([&] {
    const Sequences<F> whole_rows = sequences<F>(memory.at<T>(at.x), at.batch, at.width, scratch);
    const Sequences<F> values{whole_rows.first + at.columns.start, whole_rows.stride};
    const int64_t columns = at.columns.stop - at.columns.start;
    return operand(values, at.batch, columns, at.own_leaves, own, scratch);
  });
  float* out = memory.at<float>(at.out) + at.slot * at.batch * whole + at.rows.start;
  dots(own.from(at.rows.start, 0), rows, x, out, whole, scratch);
}

}  // namespace
