// The embedding rows of the tokens.
#pragma once

#include "normed.h"

namespace {

template <class Types>
void embed(const Memory& memory, const int32_t* words, Scratch&) {
  using T = typename Types::Value;
  using W = typename Types::Weight;
  const auto& operands = *reinterpret_cast<const tpc_embed*>(words);
  const int64_t width = memory.extent(operands.table, 1);
  const int64_t columns = operands.columns.stop - operands.columns.start;
  const W table(memory, operands.table);
  for (int64_t b = 0; b < operands.batch; ++b) {
    const int64_t row = int64_t{memory.at<int32_t>(operands.tokens)[b]} - operands.first;
    const bool held = row >= 0 && row < operands.rows;
    const int64_t place = b * width + operands.columns.start;
    for (int64_t column = 0; column < columns; column += kLanes) {
      // Adding 0 turns -0 into 0, as a sum across ranks does.
      const int64_t first = operands.columns.start + column;
      const Lanes values = held ? numbers(table, row, first, columns - column) + 0.0f : Lanes{};
      if (operands.summed)
        store_some(memory.at<float>(operands.out) + place + column, values, columns - column);
      else
        store_some(memory.at<T>(operands.out) + place + column, values, columns - column);
    }
  }
}

}  // namespace
