// Projections that are added to the residual, and the terms of sums.
#pragma once

#include "normed.h"

namespace {

template <class T>
void linear_residual(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& at = *reinterpret_cast<const tpc_linear_residual*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, first = at.rows.start;
  const int64_t whole = memory.extent(at.out, 1);
  const Sequences<T> values = sequences(memory.at<T>(at.x), at.batch, at.width, scratch);
  const Operand<T> x = operand(values, at.batch, at.width, at.leaves, scratch);
  float* found = scratch.take<float>(at.batch * rows);
  dots(memory.at<T>(at.weight) + first * at.width, at.width, rows, x, found, rows, scratch);
  add_bias<T>(memory, at.bias, first, rows, at.batch, found, rows);
  for (int64_t b = 0; b < at.batch; ++b)
    for (int64_t row = 0; row < rows; row += kLanes) {
      const int64_t place = b * whole + first + row;
      const Lanes old = load_some(memory.at<T>(at.residual) + place, rows - row);
      store_some(memory.at<T>(at.out) + place, old + load_some(found + b * rows + row, rows - row),
                 rows - row);
    }
}

template <class T>
void linear_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& at = *reinterpret_cast<const tpc_linear_terms*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, whole = memory.extent(at.out, 1);
  const Sequences<T> whole_rows = sequences(memory.at<T>(at.x), at.batch, at.width, scratch);
  const Sequences<T> values{whole_rows.first + at.columns.start, whole_rows.stride};
  const Operand<T> x = operand(values, at.batch, at.columns.stop - at.columns.start,
                               at.own_leaves, scratch);
  float* out = memory.at<float>(at.out) + at.slot * at.batch * whole + at.rows.start;
  dots(memory.at<T>(at.weight) + int64_t{at.rows.start} * at.width + at.columns.start, at.width,
       rows, x, out, whole, scratch);
}

}  // namespace
