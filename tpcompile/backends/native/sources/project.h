// Projections that are added to the residual, and the terms of sums.
#pragma once

#include "normed.h"

namespace {

template <class Types>
void linear_residual(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& operands = *reinterpret_cast<const tpc_linear_residual*>(words);
  const int64_t rows = operands.rows.stop - operands.rows.start, first = operands.rows.start;
  const int64_t whole = memory.extent(operands.out, 1);
  const typename Types::Weight weight(memory, operands.weight);
  const Operand<F>& x = scratch.once([&] {
    const Sequences<F> values =
        sequences<F>(memory.at<T>(operands.x), operands.batch, operands.width, scratch);
    return operand(values, operands.batch, operands.width, operands.leaves, weight, scratch);
  });
  float* products = scratch.take<float>(operands.batch * rows);
  dots(weight.from(first, 0), rows, x, products, rows, scratch);
  add_bias<typename Types::Vector>(memory, operands.bias, first, rows, operands.batch, products,
                                   rows);
  for (int64_t b = 0; b < operands.batch; ++b)
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int64_t place = b * whole + first + row;
      const Lanes old = load_some(memory.at<T>(operands.residual) + place, rows - row);
      store_some(memory.at<T>(operands.out) + place,
                 old + load_some(products + b * rows + row, rows - row), rows - row);
    }
}

template <class Types>
void linear_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& operands = *reinterpret_cast<const tpc_linear_terms*>(words);
  const int64_t rows = operands.rows.stop - operands.rows.start;
  const int64_t whole = memory.extent(operands.out, 1);
  const typename Types::Weight weight(memory, operands.weight);
  const auto part = weight.from(0, operands.columns.start);
  const Operand<F>& x = scratch.once([&] {
    const Sequences<F> whole_rows =
        sequences<F>(memory.at<T>(operands.x), operands.batch, operands.width, scratch);
    const Sequences<F> values{whole_rows.first + operands.columns.start, whole_rows.stride};
    const int64_t columns = operands.columns.stop - operands.columns.start;
    return operand(values, operands.batch, columns, operands.own_leaves, part, scratch);
  });
  float* out =
      memory.at<float>(operands.out) + operands.slot * operands.batch * whole + operands.rows.start;
  dots(part.from(operands.rows.start, 0), rows, x, out, whole, scratch);
}

}  // namespace
