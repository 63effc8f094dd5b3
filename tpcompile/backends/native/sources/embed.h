// The embedding rows of the tokens.
#pragma once

#include "normed.h"

namespace {

template <class Types>
void embed(const Memory& memory, const int32_t* words, Scratch&) {
  using T = typename Types::Value;
  using W = typename Types::Weight;
  const auto& at = *reinterpret_cast<const tpc_embed*>(words);
  const int64_t width = memory.extent(at.table, 1), columns = at.columns.stop - at.columns.start;
  const W table(memory, at.table);
  for (int64_t b = 0; b < at.batch; ++b) {
    const int64_t row = int64_t{memory.at<int32_t>(at.tokens)[b]} - at.first;
    const bool held = row >= 0 && row < at.rows;
    const int64_t place = b * width + at.columns.start;
    for (int64_t column = 0; column < columns; column += kLanes) {
      // Adding 0 turns -0 into 0, as a sum across ranks does.
      const int64_t first = at.columns.start + column;
      const Lanes own = held ? numbers(table, row, first, columns - column) + 0.0f : Lanes{};
      if (at.summed)
        store_some(memory.at<float>(at.out) + place + column, own, columns - column);
      else
        store_some(memory.at<T>(at.out) + place + column, own, columns - column);
    }
  }
}

}  // namespace
