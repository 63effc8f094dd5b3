// Formats of weights: how rows are found in memory, and how their numbers are loaded.
//
// A format is a class W whose objects are some rows of a weight, each from the same column on:
// - `kFormat` is its number in words;
// - `W(memory, weight)` is all of a weight, and `from(row, column)` a part of it;
// - `row(n)` is a `W::Row`, from which numbers are loaded, and `address(n)` is its first byte;
// - `stride()` is the bytes between rows, and `W::bytes(columns)` those of adjacent columns: by
//   both, prefetches find the bytes that loads read later;
// - `numbers(rows, row, column, count)` widens up to 16 numbers.
//
// A `Form` (see forms.h) multiplies numbers of a format by values of a type.
#pragma once

#include "integers.h"
#include "machine.h"

namespace {

using tpc::Memory;
using tpc::Scratch;

// An integer of a row that ends with the scale of its integers, as in a KV cache of 8 bits.
struct scaled8 {
  int8_t value;
};

TPC_INLINE Register load_register(const scaled8* integers) {
  return __builtin_convertvector(load_register(&integers->value), Register);
}

// The numbers of types in words and in the table of buffers.
template <class S>
constexpr int64_t kDType = 0;
template <>
constexpr int64_t kDType<f32> = TPC_DTYPE_F32;
template <>
constexpr int64_t kDType<bf16> = TPC_DTYPE_BF16;
template <>
constexpr int64_t kDType<f16> = TPC_DTYPE_F16;
template <>
constexpr int64_t kDType<scaled8> = TPC_KIND_INT8 | TPC_SCALES_F32 << 8;

// Rows of numbers of type S.
template <class S>
class Plain {
 public:
  static constexpr int64_t kFormat = kDType<S>;
  using Row = const S*;

  Plain(const Memory& memory, int32_t weight)
      : Plain(memory.at<S>(weight), bytes(memory.extent(weight, 1))) {}

  TPC_INLINE Plain(const S* first, int64_t stride)
      : first_(reinterpret_cast<const char*>(first)), stride_(stride) {}

  TPC_INLINE Plain from(int64_t row, int64_t column) const {
    return {this->row(row) + column, stride_};
  }

  TPC_INLINE Row row(int64_t row) const { return reinterpret_cast<Row>(address(row)); }

  TPC_INLINE const char* address(int64_t row) const { return first_ + row * stride_; }

  TPC_INLINE int64_t stride() const { return stride_; }

  static constexpr int64_t bytes(int64_t columns) {
    return columns * static_cast<int64_t>(sizeof(S));
  }

 private:
  const char* first_;
  int64_t stride_;
};

template <class S>
TPC_INLINE Lanes numbers(const Plain<S>& rows, int64_t row, int64_t column, int64_t count) {
  return load_some(rows.row(row) + column, count);
}

}  // namespace
