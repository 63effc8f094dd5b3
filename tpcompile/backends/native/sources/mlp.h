// Gate and up projections of the normed residual, and their activation.
#pragma once

#include "normed.h"

namespace {

// silu(gate) * up with the arithmetic of torch in dtype T: the activation is rounded first.
template <class T>
TPC_INLINE Lanes swiglu(Lanes gate, Lanes up) {
  return rounded<T>(gate / (1.0f + exponential(-gate))) * up;
}

template <class Types>
void norm_gate_up_swiglu(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& at = *reinterpret_cast<const tpc_norm_gate_up_swiglu*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, batch = at.normed_batch;
  const auto x = normed<Types>(memory, at, scratch);
  float* gate = scratch.take<float>(batch * rows);
  float* up = scratch.take<float>(batch * rows);
  const char* const next_weights = scratch.next_weights;
  const int64_t first_up = int64_t{at.ffn} + at.rows.start;
  scratch.next_weights = typename Types::Weight(memory, at.weight).address(first_up);
  linear_rows<Types>(memory, at, x, at.rows.start, rows, gate, rows, scratch);
  scratch.next_weights = next_weights;
  linear_rows<Types>(memory, at, x, first_up, rows, up, rows, scratch);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t row = 0; row < rows; row += kLanes) {
      const Lanes found = swiglu<T>(load_some(gate + b * rows + row, rows - row),
                                    load_some(up + b * rows + row, rows - row));
      store_some(memory.at<T>(at.out) + b * int64_t{at.ffn} + at.rows.start + row, found,
                 rows - row);
    }
}

}  // namespace
