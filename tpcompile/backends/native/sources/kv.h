// Rows of the KV cache: the keys or the values of a token and a head.
//
// A row in int8 ends with the scale of its integers: see tpcompile/ir/kv.py.
#pragma once

#include <type_traits>

#include "formats.h"
#include "rounding.h"

namespace {

template <class C>
constexpr bool kIsScaled = std::is_same_v<C, scaled8>;

// The scale of a row, `columns` values after a value of it.
TPC_INLINE float scale_of(const scaled8* values, int64_t columns) {
  return load_bytes<float>(values + columns);
}

// Return the weight of a row's numbers, given that of its values.
template <class C>
TPC_INLINE float weight_of(float weight, const C*, int64_t) {
  return weight;
}

TPC_INLINE float weight_of(float weight, const scaled8* values, int64_t columns) {
  return weight * scale_of(values, columns);
}

// Round the values of a row and store it.
inline void store_row(const float* x, int64_t width, scaled8* row, Scratch& scratch) {
  const int64_t padded = (width + kLanes - 1) / kLanes * kLanes;
  float* values = scratch.take<float>(padded);
  int32_t* whole = scratch.take<int32_t>(padded);
  std::memset(values + padded - kLanes, 0, sizeof(float) * kLanes);
  std::memcpy(values, x, sizeof(float) * static_cast<size_t>(width));
  int32_t sum;
  const float scale = rounded_to_bytes(values, padded, whole, sum);
  for (int64_t column = 0; column < width; ++column)
    row[column].value = static_cast<int8_t>(whole[column]);
  std::memcpy(row + width, &scale, sizeof scale);
}

}  // namespace
