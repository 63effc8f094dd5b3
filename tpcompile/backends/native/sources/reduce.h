// Sums over ranks and over the splits of a projection, added to the residual.
#pragma once

#include "normed.h"

namespace {

template <class Types>
void all_reduce(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using N = typename Types::Vector;
  const auto& at = *reinterpret_cast<const tpc_all_reduce*>(words);
  const int64_t columns = at.columns.stop - at.columns.start, whole = memory.extent(at.out, 1);
  const int64_t count = int64_t{at.ranks} * at.slots;
  const bool by_slot = at.site == TPC_SITE_EXPERTS;  // slots one after the other, not ranks
  Lanes* terms = scratch.take<Lanes>(count);
  for (int64_t b = 0; b < at.batch; ++b)
    for (int64_t column = 0; column < columns; column += kLanes) {
      const int64_t left = columns - column, place = b * whole + at.columns.start + column;
      for (int64_t rank = 0; rank < at.ranks; ++rank)
        for (int64_t slot = 0; slot < at.slots; ++slot)
          terms[by_slot ? slot * at.ranks + rank : rank * at.slots + slot] = load_some(
              memory.at<float>(at.terms + rank) + slot * at.batch * whole + place, left);
      fold_sums(terms, count, 1);
      Lanes found = terms[0];
      if (at.bias != TPC_NONE)
        found = found + load_some(memory.at<N>(at.bias) + at.columns.start + column, left);
      if (at.residual != TPC_NONE)
        found = load_some(memory.at<T>(at.residual) + place, left) + found;
      store_some(memory.at<T>(at.out) + place, found, left);
    }
}

}  // namespace
