// Dot products of weight rows with the values of each sequence, accumulated in fp32.
//
// The order of additions depends only on the number of columns: even and odd chunks have an
// accumulator each, whose lanes are added in a fixed tree. So a result does not depend on the
// batch, on the rows of the instruction, or on the worker.
#pragma once

#include <type_traits>

#include "machine.h"
#include "numbers.h"
#if defined(__AMX_BF16__)
#include "transpose.h"
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "transpose.h"
#define TPC_PANELS
#endif

namespace {

using tpc::Memory;
using tpc::Scratch;

// The number of bytes between a load and the prefetch that precedes it. Rows are contiguous, so
// the prefetch runs across the ends of rows.
constexpr int64_t kAhead = 4096;

// How the values of sequences are held for dot products with weights of type T.
template <class T>
struct Form {
  using Value = float;
  static constexpr int64_t kChunk = kLanes;
  using Loaded = Registers;

  static TPC_INLINE Loaded weights(const T* from) { return load_registers(from); }
  static TPC_INLINE Loaded some_weights(const T* from, int64_t count) {
    return load_some_registers(from, count);
  }
  static TPC_INLINE Loaded values(const float* from) { return load_registers(from); }
  static TPC_INLINE Loaded some_values(const float* from, int64_t count) {
    return load_some_registers(from, count);
  }
  static TPC_INLINE Registers add(Registers total, Loaded weight, Loaded value) {
    return multiply_add(total, weight, value);
  }
};

#if defined(__AVX512BF16__)
template <>
struct Form<bf16> {
  using Value = bf16;
  static constexpr int64_t kChunk = 2 * kLanes;
  using Loaded = __m512i;

  static TPC_INLINE Loaded weights(const bf16* from) { return _mm512_loadu_si512(from); }
  static TPC_INLINE Loaded some_weights(const bf16* from, int64_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), from);
  }
  static TPC_INLINE Loaded values(const bf16* from) { return weights(from); }
  static TPC_INLINE Loaded some_values(const bf16* from, int64_t count) {
    return some_weights(from, count);
  }
  static TPC_INLINE Registers add(Registers total, Loaded weight, Loaded value) {
    return {(Register)_mm512_dpbf16_ps((__m512)total.each[0], (__m512bh)weight, (__m512bh)value)};
  }
};
#endif

// Values of all sequences, `stride` values apart.
template <class T>
struct Sequences {
  const typename Form<T>::Value* first;
  int64_t stride;
};

// Round or widen values to another type.
template <class From, class To>
inline void convert(const From* from, int64_t count, To* to) {
  for (int64_t at = 0; at < count; at += kLanes)
    store_some(to + at, load_some(from + at, count - at), count - at);
}

// Return values of type T in the form for dot products with weights of type T.
template <class T>
TPC_INLINE const typename Form<T>::Value* in_form(const T* from, int64_t count, Scratch& scratch) {
  if constexpr (sizeof(typename Form<T>::Value) == sizeof(T)) {
    return reinterpret_cast<const typename Form<T>::Value*>(from);
  } else {
    float* found = scratch.take<float>(count);
    convert(from, count, found);
    return found;
  }
}

template <class T>
TPC_INLINE Sequences<T> sequences(const T* from, int64_t batch, int64_t width, Scratch& scratch) {
  return {in_form(from, batch * width, scratch), width};
}

// Sums of lanes that are still to be added, eight at a time. A flush writes all of them.
class Sums {
 public:
  TPC_INLINE void add(Lanes total, float* out) {
    totals_[count_] = total;
    outs_[count_] = out;
    if (++count_ < 8) return;
    const EightLanes found = sums(totals_);
    for (int own = 0; own < 8; ++own) *outs_[own] = found[own];
    count_ = 0;
  }

  TPC_INLINE void flush() {
    for (int own = 0; own < count_; ++own) *outs_[own] = sum(totals_[own]);
    count_ = 0;
  }

 private:
  Lanes totals_[8];
  float* outs_[8];
  int count_ = 0;
};

// Multiply one row by `kBatch` sequences. `ahead` is where the loads will be `kAhead` bytes later.
template <class T, int kBatch>
TPC_INLINE void row_dots(const T* row, const char* ahead, const typename Form<T>::Value* x,
                         int64_t stride, int64_t columns, float* out, int64_t out_stride,
                         Sums& sums) {
  using Of = Form<T>;
  Registers even[kBatch] = {}, odd[kBatch] = {};
  constexpr int64_t kChunk = Of::kChunk;
  int64_t at = 0;
  for (; at + 2 * kChunk <= columns; at += 2 * kChunk) {
    const char* next = ahead + at * static_cast<int64_t>(sizeof(T));
    __builtin_prefetch(next);
    if (2 * kChunk * sizeof(T) > 64) __builtin_prefetch(next + 64);
    const auto first = Of::weights(row + at), second = Of::weights(row + at + kChunk);
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      const auto* own = x + b * stride + at;
      even[b] = Of::add(even[b], first, Of::values(own));
      odd[b] = Of::add(odd[b], second, Of::values(own + kChunk));
    }
  }
  for (; at < columns; at += kChunk) {
    const int64_t left = columns - at < kChunk ? columns - at : kChunk;
    const bool is_odd = at / kChunk % 2;
    const auto some =
        left == kChunk ? Of::weights(row + at) : Of::some_weights(row + at, left);
    for (int b = 0; b < kBatch; ++b) {
      const auto* own = x + b * stride + at;
      const auto values = left == kChunk ? Of::values(own) : Of::some_values(own, left);
      if (is_odd)
        odd[b] = Of::add(odd[b], some, values);
      else
        even[b] = Of::add(even[b], some, values);
    }
  }
  for (int b = 0; b < kBatch; ++b) sums.add(lanes(even[b]) + lanes(odd[b]), out + b * out_stride);
}

// Multiply one row by all sequences, eight at a time. The row stays in the nearest cache.
template <class T>
inline void row_dots(const T* row, const char* ahead, Sequences<T> x, int64_t batch,
                     int64_t columns, float* out, int64_t out_stride, Sums& sums) {
  const auto* own = x.first;
  const auto run = [&](auto count) {
    row_dots<T, decltype(count)::value>(row, ahead, own, x.stride, columns, out, out_stride,
                                          sums);
    own += count * x.stride;
    out += count * out_stride;
    batch -= count;
  };
  while (batch >= 8) run(std::integral_constant<int, 8>());
  if (batch >= 4) run(std::integral_constant<int, 4>());
  if (batch >= 2) run(std::integral_constant<int, 2>());
  if (batch >= 1) run(std::integral_constant<int, 1>());
}

// The number of rows in about `kAhead` bytes.
TPC_INLINE int64_t rows_ahead(int64_t stride, size_t size) {
  const int64_t bytes = stride * static_cast<int64_t>(size);
  return bytes >= kAhead ? 1 : kAhead / bytes;
}

// The place about `kAhead` bytes after a row, of which `left` rows are left: this or the next
// weights.
template <class T>
TPC_INLINE const char* ahead_of(const T* row, int64_t stride, int64_t left, const char* next) {
  const int64_t rows = rows_ahead(stride, sizeof(T)), bytes = stride * static_cast<int64_t>(sizeof(T));
  if (rows < left || next == nullptr) return reinterpret_cast<const char*>(row) + rows * bytes;
  return next + (rows - left) * bytes;
}

// Combine `count` terms in a fixed tree, neighbours first, then neighbours of neighbours. The
// result is term 0. `join(to, one)` combines `one` and the term after it, `move(to, one)` keeps a
// last one.
template <class Join, class Move>
TPC_INLINE void fold(int64_t count, const Join& join, const Move& move) {
  for (; count > 1; count = (count + 1) / 2) {
    for (int64_t pair = 0; pair < count / 2; ++pair) join(pair, 2 * pair);
    if (count % 2) move(count / 2, count - 1);
  }
}

// Add `count` runs of `size` terms, each term to its like.
template <class Term>
TPC_INLINE void fold_sums(Term* terms, int64_t count, int64_t size) {
  const auto join = [&](int64_t to, int64_t one) {
    for (int64_t at = 0; at < size; ++at)
      terms[to * size + at] = terms[one * size + at] + terms[(one + 1) * size + at];
  };
  const auto move = [&](int64_t to, int64_t one) {
    for (int64_t at = 0; at < size; ++at) terms[to * size + at] = terms[one * size + at];
  };
  fold(count, join, move);
}

// Values of all sequences that rows of weights are multiplied by. A product is a sum over `leaves`
// even runs of columns, added in a fixed tree.
template <class T>
struct Operand {
  Sequences<T> values;
  int64_t batch, columns, leaves;
  const float* const* packed;  // tiles for AMX, or panels for AVX2, if there are enough sequences
};

// Prefetches of the rows after a block of rows, a few lines at a time. They come in the order of
// memory, so that the prefetchers of the CPU follow them.
class NextRows {
 public:
  // `from` is the first of the rows, of `bytes` bytes each and `stride` bytes apart.
  TPC_INLINE NextRows(const void* from, int64_t stride, int64_t bytes)
      : row_(static_cast<const char*>(from)), stride_(stride), bytes_(bytes) {}

  TPC_INLINE void fetch(int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) {
      __builtin_prefetch(row_ + at_);
      at_ += 64;
      if (at_ < bytes_) continue;
      at_ = 0, row_ += stride_;
    }
  }

 private:
  const char* row_;
  int64_t stride_, bytes_, at_ = 0;
};

// The rows and sequences of a block, and the least number of sequences that blocks are for.
constexpr int kBlock = 4;

// Pack the values of all sequences, in groups of 16, each with a run of columns for each leaf.
template <class T, class Pack>
inline const float* const* packed_runs(const T* x, int64_t stride, int64_t batch, int64_t columns,
                                       int64_t leaves, Scratch& scratch, const Pack& pack) {
  const float** found = scratch.take<const float*>((batch + 15) / 16 * leaves);
  const float** next = found;
  for (int64_t group = 0; group < batch; group += 16) {
    const int64_t left = batch - group, sequences = left < 16 ? left : 16;
    for (int64_t leaf = 0, first = 0; leaf < leaves; ++leaf) {
      const int64_t width = columns / leaves + (leaf < columns % leaves);
      *next++ = pack(x + group * stride + first, stride, sequences, width, scratch);
      first += width;
    }
  }
  return found;
}

#if defined(__AMX_BF16__)
#include "tiles.h"
#elif defined(TPC_PANELS)
#include "panels.h"
#endif

template <class T>
inline Operand<T> operand(Sequences<T> values, int64_t batch, int64_t columns, int64_t leaves,
                          [[maybe_unused]] Scratch& scratch) {
  Operand<T> found{values, batch, columns, leaves, nullptr};
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>)
    found.packed =
        packed_runs(values.first, values.stride, batch, columns, leaves, scratch, tiled);
#elif defined(TPC_PANELS)
  if (batch >= kFewest)
    found.packed =
        packed_runs(values.first, values.stride, batch, columns, leaves, scratch, panel);
#endif
  return found;
}

// Multiply `kRows` rows by `kBatch` sequences. Return the sums, `[kBatch][kRows]`.
//
// Each loaded vector serves all rows or all sequences. Even chunks come first, then odd ones, so
// that there is one accumulator per sum at a time. The bits are those of `row_dots`.
template <class T, int kRows, int kBatch>
TPC_INLINE Lanes block_dots(const T* weight, int64_t stride, const typename Form<T>::Value* x,
                            int64_t x_stride, int64_t columns, NextRows& next, int64_t lines) {
  using Of = Form<T>;
  constexpr int64_t kChunk = Of::kChunk;
  static_assert(kRows * kBatch <= kLanes);
  Lanes totals[kLanes] = {};
  for (int64_t odd = 0; odd < 2; ++odd) {
    Registers own[kBatch * kRows] = {};
    int64_t at = odd * kChunk;
    for (; at + kChunk <= columns; at += 2 * kChunk) {
      next.fetch(lines);
      typename Of::Loaded rows[kRows];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) rows[row] = Of::weights(weight + row * stride + at);
#pragma GCC unroll 4
      for (int b = 0; b < kBatch; ++b) {
        const auto values = Of::values(x + b * x_stride + at);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
          own[b * kRows + row] = Of::add(own[b * kRows + row], rows[row], values);
      }
    }
    if (at < columns) {
      for (int b = 0; b < kBatch; ++b) {
        const auto values = Of::some_values(x + b * x_stride + at, columns - at);
        for (int row = 0; row < kRows; ++row) {
          const auto some = Of::some_weights(weight + row * stride + at, columns - at);
          own[b * kRows + row] = Of::add(own[b * kRows + row], some, values);
        }
      }
    }
    for (int sum = 0; sum < kBatch * kRows; ++sum) totals[sum] = totals[sum] + lanes(own[sum]);
  }
  return sums_of_all(totals);
}

// Multiply `kRows` rows by all sequences, some at a time.
template <class T, int kRows>
TPC_INLINE void block_dots(const T* weight, int64_t stride, const Operand<T>& x, float* out,
                           int64_t out_stride, Lanes* terms) {
  const int64_t groups = (x.batch + kBlock - 1) / kBlock, size = sizeof(T);
  const int64_t lines = (kRows * Form<T>::kChunk * size / 64 + groups - 1) / groups;
  const int64_t each = x.columns / x.leaves, longer = x.columns % x.leaves;
  for (int64_t leaf = 0, first = 0; leaf < x.leaves; ++leaf) {
    const int64_t width = each + (leaf < longer);
    const T* rows = weight + first;
    NextRows next(rows + kRows * stride, stride * size, width * size);
    Lanes* to = terms + leaf * groups;
    for (int64_t group = 0; group < groups; ++group) {
      const auto* own = x.values.first + first + group * kBlock * x.values.stride;
      const auto run = [&](auto count) {
        to[group] = block_dots<T, kRows, decltype(count)::value>(rows, stride, own, x.values.stride,
                                                                width, next, lines);
      };
      const int64_t left = x.batch - group * kBlock;
      if (left >= kBlock) run(std::integral_constant<int, kBlock>());
      else if (left == 3) run(std::integral_constant<int, 3>());
      else if (left == 2) run(std::integral_constant<int, 2>());
      else run(std::integral_constant<int, 1>());
    }
    first += width;
  }
  fold_sums(terms, x.leaves, groups);
  for (int64_t b = 0; b < x.batch; ++b)
    std::memcpy(out + b * out_stride, reinterpret_cast<const float*>(terms) +
                b / kBlock * kLanes + b % kBlock * kRows, sizeof(float) * kRows);
}

// Multiply rows by all sequences: `out[row + sequence * out_stride]`.
template <class T>
inline void dots(const T* weight, int64_t stride, int64_t rows, const Operand<T>& x, float* out,
                 int64_t out_stride, Scratch& scratch) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<T, bf16>)
    return tile_dots(weight, stride, rows, x, out, out_stride, scratch);
#elif defined(TPC_PANELS)
  if (x.batch >= kFewest) return panel_dots(weight, stride, rows, x, out, out_stride, scratch);
#endif
  if (x.batch >= kBlock) {
    Lanes* terms = scratch.take<Lanes>(x.leaves * ((x.batch + kBlock - 1) / kBlock));
    int64_t row = 0;
    for (; row + kBlock <= rows; row += kBlock)
      block_dots<T, kBlock>(weight + row * stride, stride, x, out + row, out_stride, terms);
    for (; row < rows; ++row)
      block_dots<T, 1>(weight + row * stride, stride, x, out + row, out_stride, terms);
    return;
  }
  Sums sums;
  float* terms = x.leaves == 1 ? nullptr : scratch.take<float>(x.leaves * x.batch);
  const int64_t each = x.columns / x.leaves, longer = x.columns % x.leaves;
  for (int64_t row = 0; row < rows; ++row) {
    const T* own = weight + row * stride;
    const char* ahead = ahead_of(own, stride, rows - row, scratch.next_weights);
    if (x.leaves == 1) {
      row_dots(own, ahead, x.values, x.batch, x.columns, out + row, out_stride, sums);
      continue;
    }
    int64_t first = 0;
    for (int64_t leaf = 0; leaf < x.leaves; ++leaf) {
      const int64_t width = each + (leaf < longer);
      row_dots(own + first, ahead + first * static_cast<int64_t>(sizeof(T)),
               Sequences<T>{x.values.first + first, x.values.stride}, x.batch, width,
               terms + leaf * x.batch, 1, sums);
      first += width;
    }
    sums.flush();
    fold_sums(terms, x.leaves, x.batch);
    for (int64_t b = 0; b < x.batch; ++b) out[row + b * out_stride] = terms[b];
  }
  sums.flush();
}

// Add the bias of some rows, if there is one.
template <class T>
TPC_INLINE void add_bias(const Memory& memory, int32_t bias, int64_t first, int64_t rows,
                         int64_t batch, float* values, int64_t stride) {
  if (bias == TPC_NONE) return;
  const T* own = memory.at<T>(bias) + first;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t row = 0; row < rows; row += kLanes) {
      float* at = values + b * stride + row;
      store_some(at, load_some(at, rows - row) + load_some(own + row, rows - row), rows - row);
    }
}

// Round values to T where they are.
template <class T>
TPC_INLINE void round_all(float* values, int64_t count) {
  for (int64_t at = 0; at < count; at += kLanes)
    store_some(values + at, rounded<T>(load_some(values + at, count - at)), count - at);
}

}  // namespace
