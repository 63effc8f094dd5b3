// Sums over ranks and over the splits of a projection, added to the residual.
#pragma once

#include "normed.h"

namespace {

template <class Types>
void all_reduce(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using N = typename Types::Vector;
  const auto& operands = *reinterpret_cast<const tpc_all_reduce*>(words);
  const int64_t columns = operands.columns.stop - operands.columns.start;
  const int64_t whole = memory.extent(operands.out, 1);
  const int64_t count = int64_t{operands.ranks} * operands.slots;
  const bool by_slot = operands.site == TPC_SITE_EXPERTS;  // slots one after the other, not ranks
  Lanes* terms = scratch.take<Lanes>(count);
  for (int64_t b = 0; b < operands.batch; ++b)
    for (int64_t column = 0; column < columns; column += kLanes) {
      const int64_t left = columns - column, place = b * whole + operands.columns.start + column;
      for (int64_t rank = 0; rank < operands.ranks; ++rank)
        for (int64_t slot = 0; slot < operands.slots; ++slot)
          terms[by_slot ? slot * operands.ranks + rank : rank * operands.slots + slot] = load_some(
              memory.at<float>(operands.terms + rank) + slot * operands.batch * whole + place,
              left);
      fold_sums(terms, count, 1);
      Lanes total = terms[0];
      if (operands.bias != TPC_NONE)
        total =
            total + load_some(memory.at<N>(operands.bias) + operands.columns.start + column, left);
      if (operands.residual != TPC_NONE)
        total = load_some(memory.at<T>(operands.residual) + place, left) + total;
      store_some(memory.at<T>(operands.out) + place, total, left);
    }
}

}  // namespace
