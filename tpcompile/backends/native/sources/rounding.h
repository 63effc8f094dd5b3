// Values of a block of columns, rounded to integers.
#pragma once

#include "integers.h"

namespace {

constexpr int64_t kMostBlock = 128;

// The bits of the largest magnitude of a block.
TPC_INLINE uint32_t largest_of(const float* x, int64_t block) {
  BitRegister most{};
  for (int64_t column = 0; column < block; column += kRegister) {
    const BitRegister bits = (BitRegister)load_register(x + column) & 0x7fffffff;
    most = most > bits ? most : bits;
  }
  return greatest(most);
}

constexpr uint32_t kInfinite = 0x7f800000;

// Round values times a factor to integers, and return their sum.
TPC_INLINE int32_t rounded(const float* x, int64_t block, float factor, int32_t* whole) {
  IntRegister total{};
  for (int64_t column = 0; column < block; column += kRegister) {
    const IntRegister integers = nearest(load_register(x + column) * factor);
    total += integers;
    std::memcpy(whole + column, &integers, sizeof integers);
  }
  return added(total);
}

// Round values of a block to integers of at most `steps`, and return what to multiply them by: see
// `rounded` in tpcompile/ir/quantize.py. `sum` becomes the sum of the integers.
TPC_INLINE float rounded_to_integers(const float* x, int64_t block, float steps, int32_t* whole,
                                     int32_t& sum) {
  const uint32_t bits = largest_of(x, block);
  const bool finite = bits < kInfinite;
  const float most = finite ? load_bytes<float>(&bits) : 0.0f, factor = steps / most;
  const bool some = factor <= std::numeric_limits<float>::max();
  sum = rounded(x, block, some ? factor : 0.0f, whole);
  return finite ? most / steps : std::numeric_limits<float>::quiet_NaN();
}

TPC_INLINE float rounded_to_bytes(const float* x, int64_t block, int32_t* whole, int32_t& sum) {
  return rounded_to_integers(x, block, 127.0f, whole, sum);
}

}  // namespace
