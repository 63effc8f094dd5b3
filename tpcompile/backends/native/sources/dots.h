// Dot products of weight rows with the values of each sequence, accumulated in fp32.
//
// The order of additions depends only on the number of columns: even and odd chunks have an
// accumulator each, whose lanes are added in a fixed tree. So a result does not depend on the
// batch, on the rows of the instruction, or on the worker.
#pragma once

#include "float8_numbers.h"
#include "forms.h"
#include "rounding.h"
#if defined(__AVX2__) && !defined(__AVX512F__)
#define TPC_PANELS
#endif

namespace {

// The number of bytes between a load and the prefetch that precedes it. Rows are contiguous, so
// the prefetch runs across the ends of rows. With AVX-512, loads of weights for few sequences, one
// or two, are so fast that the prefetchers of the CPU follow them; a far prefetch would begin
// another stream. Other paths are slower, and need a far one.
constexpr int64_t kAhead = 4096, kFarAhead = 1 << 15;
constexpr int64_t kAheadOfFew = kRegisters > 1 ? 1 << 13 : 3 << 9;

// Sums of lanes that are still to be added, eight at a time. A flush writes all of them.
class Sums {
 public:
  TPC_INLINE void add(Registers total, float* out) {
    store_registers(totals_ + count_, total);
    outs_[count_] = out;
    if (++count_ < 8) return;
    const EightLanes results = sums(totals_);
    for (int place = 0; place < 8; ++place) *outs_[place] = results[place];
    count_ = 0;
  }

  TPC_INLINE void flush() {
    for (int place = 0; place < count_; ++place) *outs_[place] = sum(totals_[place]);
    count_ = 0;
  }

 private:
  Lanes totals_[8];
  float* outs_[8];
  int count_ = 0;
};

// One row that is fetched while others are multiplied.
struct RowAhead {
  const char* row;

  TPC_INLINE void fetch(int64_t first, int64_t bytes) const {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + first + line, 0, 2);
  }
};

// Increase the sums of even and odd chunks by the products of a row with `kBatch` sequences.
// `ahead` is the address of later loads, which is fetched into the second-level cache.
template <class F, int kBatch>
TPC_INLINE void add_products(typename F::Weights::Row row, const char* ahead,
                             const typename F::Value* x, int64_t stride, int64_t columns,
                             Registers* even, Registers* odd) {
  using W = typename F::Weights;
  constexpr int64_t kChunk = F::kChunk;
  int64_t column = 0;
  for (; column + 2 * kChunk <= columns; column += 2 * kChunk) {
    RowAhead{ahead}.fetch(W::bytes(column), W::bytes(2 * kChunk));
    const auto first = F::weights(row, column), second = F::weights(row, column + kChunk);
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      const auto* sequence = x + b * stride + column;
      even[b] = F::add(even[b], first, F::values(sequence));
      odd[b] = F::add(odd[b], second, F::values(sequence + kChunk));
    }
  }
  for (; column < columns; column += kChunk) {
    const int64_t left = columns - column < kChunk ? columns - column : kChunk;
    const bool is_odd = column / kChunk % 2;
    RowAhead{ahead}.fetch(W::bytes(column), W::bytes(kChunk));
    const auto some =
        left == kChunk ? F::weights(row, column) : F::some_weights(row, column, left);
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      const auto* sequence = x + b * stride + column;
      const auto values = left == kChunk ? F::values(sequence) : F::some_values(sequence, left);
      if (is_odd)
        odd[b] = F::add(odd[b], some, values);
      else
        even[b] = F::add(even[b], some, values);
    }
  }
}

// The same for every second chunk from a column on, without prefetches.
template <class F, int kBatch>
TPC_INLINE void add_every_second(typename F::Weights::Row row, int64_t column,
                                 const typename F::Value* x, int64_t stride, int64_t columns,
                                 Registers* total) {
  constexpr int64_t kChunk = F::kChunk;
  for (; column + kChunk <= columns; column += 2 * kChunk) {
    const auto weights = F::weights(row, column);
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b)
      total[b] = F::add(total[b], weights, F::values(x + b * stride + column));
  }
  if (column >= columns) return;
  const auto weights = F::some_weights(row, column, columns - column);
  for (int b = 0; b < kBatch; ++b)
    total[b] = F::add(total[b], weights, F::some_values(x + b * stride + column, columns - column));
}

// The maximum number of sequences that a row is multiplied by at a time, and that for which the
// sums of even and of odd chunks fit in registers together.
constexpr int kOfRow = kRegisters > 1 ? 4 : 8, kOfChunks = kRegisters > 1 ? 2 : 8;

// Multiply one row by `kBatch` sequences. Call `use(b, total)` with lanes whose sum is the product.
template <class F, int kBatch, class Use>
TPC_INLINE void row_dots(typename F::Weights::Row row, const char* ahead,
                         const typename F::Value* x, int64_t stride, int64_t columns,
                         const Use& use) {
  Registers even[kBatch], odd[kBatch];
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b)  // compilers would call a slow function for an empty array
#pragma GCC unroll 4
    for (int part = 0; part < kRegisters; ++part)
      even[b].each[part] = odd[b].each[part] = Register{};
  if constexpr (kBatch > kOfChunks) {
    RowAhead{ahead}.fetch(0, F::Weights::bytes(columns));
    add_every_second<F, kBatch>(row, 0, x, stride, columns, even);
    add_every_second<F, kBatch>(row, F::kChunk, x, stride, columns, odd);
  } else {
    add_products<F, kBatch>(row, ahead, x, stride, columns, even, odd);
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) use(b, even[b] + odd[b]);
}

// Call `run` with a constant that equals `count`, from 1 to `kMost`; for 0, do nothing.
template <int kMost, class Run>
TPC_INLINE void with_count(int64_t count, const Run& run) {
  if (count == kMost) return run(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) with_count<kMost - 1>(count, run);
}

// Call `run` with runs of at most `kMost` of so many sequences: a constant, and the first one.
template <int kMost, class Run>
TPC_INLINE void in_runs(int64_t batch, const Run& run) {
  int64_t first = 0;
  for (; batch - first >= kMost; first += kMost) run(std::integral_constant<int, kMost>(), first);
  with_count<kMost - 1>(batch - first, [&](auto count) TPC_ALWAYS { run(count, first); });
}

// The number of rows in about so many bytes, if they are `stride` bytes apart.
TPC_INLINE int64_t rows_within(int64_t bytes, int64_t stride) {
  return stride >= bytes ? 1 : bytes / stride;
}

TPC_INLINE int64_t rows_ahead(int64_t stride) { return rows_within(kAhead, stride); }

// The place `rows` rows after a row, of which `left` rows are left: in these or the next weights.
TPC_INLINE const char* ahead_of(const char* row, int64_t stride, int64_t rows, int64_t left,
                                const char* next) {
  if (rows < left || next == nullptr) return row + rows * stride;
  return next + (rows - left) * stride;
}

// Combine `count` terms in a fixed tree, neighbours first, then neighbours of neighbours. The
// result is term 0. `join(out, term)` combines `term` and the one after it, `move(out, term)` keeps
// a last one.
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
  const auto join = [&](int64_t out, int64_t term) {
    for (int64_t place = 0; place < size; ++place)
      terms[out * size + place] = terms[term * size + place] + terms[(term + 1) * size + place];
  };
  const auto move = [&](int64_t out, int64_t term) {
    for (int64_t place = 0; place < size; ++place)
      terms[out * size + place] = terms[term * size + place];
  };
  fold(count, join, move);
}

// The most rows of a block, and the most that are multiplied by values in the nearest cache before
// other values come there: as many as have so many bytes, but at least some blocks. These rows, and
// those that are fetched meanwhile, should be in the second-level cache, which is smaller in CPUs
// without AVX-512.
constexpr int kBlock = 2, kMostHeld = kRegisters > 1 ? 8 : 32;
constexpr int64_t kBytesHeld = 1 << 18, kFewestBlocks = 8;

// Values of all sequences that rows of weights are multiplied by. A product is a sum over `leaves`
// even runs of columns, added in a fixed tree.
template <class F>
struct Operand {
  Sequences<F> values;
  int64_t batch, columns, leaves;
  // If there are enough sequences, columns of some of them: tiles for AMX, panels for AVX2, or
  // chunks.
  const void* const* packed;
  // If not 0, the sums of leaves are not added, but stored at this distance from each other.
  int64_t apart = 0;
};

// Add the sums of leaves, unless they stay apart. Return the number of those that are stored.
template <class X, class Term>
TPC_INLINE int64_t join_leaves(const X& x, Term* terms, int64_t size) {
  if (x.apart) return x.leaves;
  fold_sums(terms, x.leaves, size);
  return 1;
}

// Prefetches of the rows after a block of rows, a few lines at a time. They come in the order of
// memory, so that the prefetchers of the CPU follow them. They go into the second-level cache: in
// the first, which holds this block and values, they would wait for each other.
class NextRows {
 public:
  // `first` is the first of the rows, of `bytes` bytes each and `stride` bytes apart.
  TPC_INLINE NextRows(const void* first, int64_t stride, int64_t bytes)
      : row_(static_cast<const char*>(first)), stride_(stride), bytes_(bytes) {}

  TPC_INLINE void fetch(int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) {
      __builtin_prefetch(row_ + at_, 0, 2);
      at_ += 64;
      if (at_ < bytes_) continue;
      at_ = 0, row_ += stride_;
    }
  }

 private:
  const char* row_;
  int64_t stride_, bytes_, at_ = 0;
};

// Pack the values of all sequences, in groups of `most`, each with a run of columns for each leaf.
template <class T, class Pack>
inline const void* const* packed_runs(const T* x, int64_t stride, int64_t batch, int64_t columns,
                                      int64_t leaves, int64_t most, Scratch& scratch,
                                      const Pack& pack) {
  const void** packed = scratch.take<const void*>((batch + most - 1) / most * leaves);
  const void** next = packed;
  for (int64_t group = 0; group < batch; group += most) {
    const int64_t left = batch - group, sequences = left < most ? left : most;
    for (int64_t leaf = 0, first = 0; leaf < leaves; ++leaf) {
      const int64_t width = columns / leaves + (leaf < columns % leaves);
      *next++ = pack(x + group * stride + first, stride, sequences, width, scratch);
      first += width;
    }
  }
  return packed;
}

#if defined(__AMX_BF16__)
#include "tiles.h"
#elif defined(TPC_PANELS)
#include "panels.h"
#endif
#include "float8.h"
#include "grouped.h"

// The bytes of values that stay in the nearest cache while blocks of rows pass through it, and while
// one row after the other does.
constexpr int64_t kKept = 3 << 13, kKeptByRows = kRegisters > 1 ? 5 << 12 : 3 << 12;

// The bytes of the values of some columns.
template <class F>
TPC_INLINE int64_t bytes_of_values(int64_t columns, int64_t sequences) {
  return columns * sequences * int64_t{sizeof(typename F::Value)};
}

// Whether values of sequences are packed. Those of one or two stay where they are, unless rows would
// displace them from the nearest cache.
template <class F>
TPC_INLINE bool packs(int64_t columns, int64_t sequences) {
  return sequences > 2 || bytes_of_values<F>(columns, sequences) > kKeptByRows;
}

// The maximum number of sequences that are multiplied at a time.
#if defined(TPC_PANELS)
constexpr int kTogether = kFewest - 1;
#else
constexpr int kTogether = 8;
#endif

// Lay out columns of some sequences as `[chunk][sequence][column]`, first all even chunks, then all
// odd ones. The last columns are zeros.
template <class F>
inline const void* in_chunks(const typename F::Value* x, int64_t stride, int64_t sequences,
                             int64_t columns, Scratch& scratch) {
  using Value = typename F::Value;
  constexpr int64_t kChunk = F::kChunk;
  auto* packed = scratch.take<Value>((columns + kChunk - 1) / kChunk * sequences * kChunk);
  Value* next = packed;
  for (int64_t odd = 0; odd < 2; ++odd)
    for (int64_t column = odd * kChunk; column < columns; column += 2 * kChunk)
      for (int64_t b = 0; b < sequences; ++b, next += kChunk) {
        const Value* chunk = x + b * stride + column;
        if (column + kChunk <= columns) {
          std::memcpy(next, chunk, sizeof(Value) * kChunk);
          continue;
        }
        const auto left = static_cast<size_t>(columns - column);
        std::memcpy(next, chunk, sizeof(Value) * left);
        std::memset(next + left, 0, sizeof(Value) * (kChunk - left));
      }
  return packed;
}

// The place of the odd chunks of so many columns.
template <class F>
TPC_INLINE int64_t odd_chunks(int64_t columns, int64_t sequences) {
  return (columns + 2 * F::kChunk - 1) / (2 * F::kChunk) * F::kChunk * sequences;
}

template <class F, class S>
inline Operand<F> operand(Sequences<F> values, int64_t batch, int64_t columns, int64_t leaves,
                          const Plain<S>&, Scratch& scratch) {
  const auto packed = [&](int64_t most, const auto& pack) {
    return packed_runs(values.first, values.stride, batch, columns, leaves, most, scratch, pack);
  };
  Operand<F> x{values, batch, columns, leaves, nullptr};
#if defined(__AMX_BF16__)
  if constexpr (kHasTiles<F>) {
    x.packed = packed(kTileSequences, tiled);
    return x;
  }
#elif defined(TPC_PANELS)
  if constexpr (kHasPanels<F>)
    if (batch >= kFewest) {
      x.packed = packed(kGroup, panel);
      return x;
    }
#endif
  if (packs<F>(columns, batch)) x.packed = packed(kTogether, in_chunks<F>);
  return x;
}

// Fetch columns of the block of rows after the next one a second time. With AVX-512, rows are then
// read up to a quarter faster: CPUs seem to drop prefetches while they wait for many lines.
template <int kRows, class S>
TPC_INLINE void fetch_again(const Plain<S>& rows, int64_t first, int64_t bytes) {
  if constexpr (kRegisters > 1) return;
#pragma GCC unroll 2
  for (int row = 0; row < kRows; ++row)
    RowAhead{rows.address(2 * kRows + row)}.fetch(first, bytes);
}

// Increase the sums of even or of odd chunks of `kRows` rows, times `kBatch` sequences in chunks:
// `[kBatch][kRows]`. Each loaded vector serves all rows or all sequences. Meanwhile, fetch as many
// columns of what is `ahead`.
template <class F, int kRows, int kBatch, class Ahead>
TPC_INLINE void add_chunks(typename F::Weights weight, int64_t odd, const typename F::Value* x,
                           int64_t columns, Ahead ahead, Registers* sums) {
  using W = typename F::Weights;
  constexpr int64_t kChunk = F::kChunk;
  const auto add = [&](const typename F::Loaded* rows) TPC_ALWAYS {
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      const auto values = F::values(x + b * kChunk);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
        sums[b * kRows + row] = F::add(sums[b * kRows + row], rows[row], values);
    }
    x += kBatch * kChunk;
  };
  typename F::Loaded rows[kRows];
  int64_t column = odd * kChunk;
  for (; column + kChunk <= columns; column += 2 * kChunk) {
    ahead.fetch(W::bytes(column - odd * kChunk), W::bytes(2 * kChunk));
    fetch_again<kRows>(weight, W::bytes(column), W::bytes(kChunk));
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) rows[row] = F::weights(weight.row(row), column);
    add(rows);
  }
  if (column >= columns) return;
  for (int row = 0; row < kRows; ++row)
    rows[row] = F::some_weights(weight.row(row), column, columns - column);
  add(rows);
}

// The sums that registers hold beside rows and values.
constexpr int kSumsHeld = kRegisters > 1 ? 8 : 16;

// Increase the sums of even and of odd chunks together, in the order of memory, while both are
// left. Return how many columns are done.
template <class F, int kRows, int kBatch, class Ahead>
TPC_INLINE int64_t add_pairs(typename F::Weights weight, const typename F::Value* x,
                             const typename F::Value* x_odd, int64_t columns, Ahead ahead,
                             Ahead ahead_odd, Registers* even, Registers* odd) {
  using W = typename F::Weights;
  constexpr int64_t kChunk = F::kChunk;
  int64_t column = 0;
  for (; column + 2 * kChunk <= columns; column += 2 * kChunk) {
    ahead.fetch(W::bytes(column), W::bytes(2 * kChunk));
    ahead_odd.fetch(W::bytes(column), W::bytes(2 * kChunk));
    fetch_again<kRows>(weight, W::bytes(column), W::bytes(2 * kChunk));
    typename F::Loaded first[kRows], second[kRows];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      first[row] = F::weights(weight.row(row), column);
      second[row] = F::weights(weight.row(row), column + kChunk);
    }
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b, x += kChunk, x_odd += kChunk) {
      const auto values = F::values(x), odd_values = F::values(x_odd);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        Registers &of_even = even[b * kRows + row], &of_odd = odd[b * kRows + row];
        of_even = F::add(of_even, first[row], values);
        of_odd = F::add(of_odd, second[row], odd_values);
      }
    }
  }
  return column;
}

// Multiply `kRows` rows by `kBatch` sequences in chunks, the even ones at `x` and the odd ones at
// `x_odd`. Return the sums, `[kBatch][kRows]`. Even chunks come first, unless registers hold the sums
// of both. The bits are those of `row_dots`. A function of its own takes compilers half of the time.
template <class F, int kRows, int kBatch, class Ahead>
[[gnu::noinline]] Lanes block_dots(typename F::Weights weight, const typename F::Value* x,
                                   const typename F::Value* x_odd, int64_t columns, Ahead ahead,
                                   Ahead ahead_odd) {
  static_assert(kRows * kBatch <= kLanes);
  Registers even[kBatch * kRows] = {}, odd[kBatch * kRows] = {};
  int64_t done = 0;
  if constexpr (2 * kRows * kBatch * kRegisters <= kSumsHeld)
    done = add_pairs<F, kRows, kBatch>(weight, x, x_odd, columns, ahead, ahead_odd, even, odd);
  const auto rest = weight.from(0, done);
  x += done / 2 * kBatch, x_odd += done / 2 * kBatch;
  add_chunks<F, kRows, kBatch>(rest, 0, x, columns - done, ahead, even);
  add_chunks<F, kRows, kBatch>(rest, 1, x_odd, columns - done, ahead_odd, odd);
  Lanes totals[kLanes] = {};
#pragma GCC unroll 16
  for (int sum = 0; sum < kBatch * kRows; ++sum) totals[sum] = lanes(even[sum] + odd[sum]);
  return sums_of_all(totals);
}

// The sums of even and of odd chunks of a block between passes.
struct BlockSoFar {
  Registers of[2][kLanes];
};

// Whether a pass has the first columns of its chunks, and whether it is the last pass of a block.
struct Pass {
  bool first, last;
};

// The same in several passes, each with some columns of the even or of the odd chunks. The last
// pass returns the sums.
template <class F, int kRows, int kBatch>
[[gnu::noinline]] Lanes pass_dots(typename F::Weights weight, int64_t odd,
                                  const typename F::Value* x, int64_t columns, RowAhead ahead,
                                  Pass pass, BlockSoFar& so_far) {
  constexpr int kSums = kRows * kBatch;
  Registers sums[kSums] = {};
  Lanes totals[kLanes] = {};
  if (!pass.first) {
#pragma GCC unroll 16
    for (int sum = 0; sum < kSums; ++sum) sums[sum] = so_far.of[odd][sum];
  }
  add_chunks<F, kRows, kBatch>(weight, odd, x, columns, ahead, sums);
  if (!pass.last) {
#pragma GCC unroll 16
    for (int sum = 0; sum < kSums; ++sum) so_far.of[odd][sum] = sums[sum];
    return totals[0];
  }
#pragma GCC unroll 16
  for (int sum = 0; sum < kSums; ++sum) totals[sum] = lanes(so_far.of[!odd][sum] + sums[sum]);
  return sums_of_all(totals);
}

// Multiply blocks of rows, in passes whose values stay in the nearest cache: sums go to every
// `groups`-th place. `ahead(second, block, column)` is what the first or second pass of a block
// fetches from a column on.
template <class F, int kRows, int kBatch, class Ahead>
TPC_INLINE void passes_dots(typename F::Weights weight, int64_t blocks,
                            const typename F::Value* x, const typename F::Value* x_odd,
                            int64_t width, bool odd_first, Lanes* place, int64_t groups,
                            BlockSoFar* so_far, const Ahead& ahead) {
  constexpr int64_t kPair = 2 * F::kChunk;
  const int64_t parts = (bytes_of_values<F>(width, kBatch) + 2 * kKept - 1) / (2 * kKept);
  const int64_t part = (width + parts * kPair - 1) / (parts * kPair) * kPair;
  for (int64_t start = 0; start < width; start += part) {
    const int64_t columns = width - start < part ? width - start : part;
    for (int second = 0; second < 2; ++second) {
      const bool odd = second != odd_first;
      const Pass pass{start == 0, second && start + part >= width};
      const auto* some = (odd ? x_odd : x) + start / 2 * kBatch;
      for (int64_t block = 0; block < blocks; ++block)
        place[block * groups] =
            pass_dots<F, kRows, kBatch>(weight.from(block * kRows, start), odd, some, columns,
                                        ahead(second, block, start), pass, so_far[block]);
    }
  }
}

// Multiply `rows` of the `left` rows of an instruction by all sequences, in blocks of `kRows`.
//
// All rows are multiplied by values that stay in the nearest cache: by those of some sequences and
// of a leaf, or if these are too many, by those of its even chunks, and then by those of odd ones,
// or the other way round: the next rows begin with those that are there.
template <class F, int kRows>
TPC_INLINE void block_dots(typename F::Weights weight, int64_t rows, int64_t left,
                           const Operand<F>& x, float* out, int64_t out_stride, Scratch& scratch,
                           Lanes* terms, BlockSoFar* so_far, bool odd_first) {
  using W = typename F::Weights;
  const int64_t groups = (x.batch + kTogether - 1) / kTogether;
  const int64_t blocks = rows / kRows, size = blocks * groups;
  const int64_t least = x.columns / x.leaves, longer = x.columns % x.leaves;
  const int64_t stride = weight.stride();
  const int64_t together = x.batch < kTogether ? x.batch : kTogether;
  // Rows pass once, or several times, each time with some of their columns.
  const bool once = x.leaves == 1 && bytes_of_values<F>(x.columns, together) <= kKept;
  const int64_t far = once ? rows_within(kFarAhead, stride) : rows;
  const auto ahead = [&](int64_t row, int64_t column) TPC_ALWAYS {
    const char* later =
        ahead_of(weight.address(row), stride, far, left - row, scratch.next_weights);
    return RowAhead{later + W::bytes(column)};
  };
  Lanes* leaf_terms = terms;
  for (int64_t leaf = 0, first = 0; leaf < x.leaves; ++leaf, leaf_terms += size) {
    const int64_t width = least + (leaf < longer);
    in_runs<kTogether>(x.batch, [&](auto count, int64_t b) TPC_ALWAYS {
      constexpr int kBatch = decltype(count)::value;
      const int64_t group = b / kTogether;
      Lanes* place = leaf_terms + group;
      const auto* values =
          static_cast<const typename F::Value*>(x.packed[group * x.leaves + leaf]);
      const auto* odd_values = values + odd_chunks<F>(width, kBatch);
      if (bytes_of_values<F>(width, kBatch) <= kKept) {
        for (int64_t row = 0; row < rows; row += kRows, place += groups)
          *place = block_dots<F, kRows, kBatch>(weight.from(row, first), values, odd_values, width,
                                                ahead(row, first), ahead(row + 1, first));
        return;
      }
      // All passes of all groups together fetch as many of the next rows.
      const auto next = [&](int64_t second, int64_t block, int64_t column) TPC_ALWAYS {
        const int64_t earlier = (group * 2 + second) * blocks + block;
        return ahead(earlier * kRows / (2 * groups), first + column);
      };
      passes_dots<F, kRows, kBatch>(weight.from(0, first), blocks, values, odd_values, width,
                                    odd_first, place, groups, so_far, next);
    });
    first += width;
  }
  const int64_t stored = join_leaves(x, terms, size);
  for (int64_t leaf = 0; leaf < stored; ++leaf)
    for (int64_t block = 0; block < size; ++block) {
      const auto* sums = reinterpret_cast<const float*>(terms + leaf * size + block);
      const int64_t b = block % groups * kTogether, after = x.batch - b;
      float* place = out + leaf * x.apart + block / groups * kRows + b * out_stride;
      for (int64_t sequence = 0; sequence < kTogether && sequence < after; ++sequence)
        std::memcpy(place + sequence * out_stride, sums + sequence * kRows, sizeof(float) * kRows);
    }
}

// The same for any number of rows, in blocks of `kRows` where so many are left.
template <class F, int kRows>
inline void blocks_dots(typename F::Weights weight, int64_t rows, const Operand<F>& x, float* out,
                        int64_t out_stride, Scratch& scratch) {
  const int64_t groups = (x.batch + kTogether - 1) / kTogether;
  Lanes* terms = scratch.take<Lanes>(x.leaves * (kMostHeld / kRows) * groups);
  auto* so_far = scratch.take<BlockSoFar>(kMostHeld / kRows);
  const int64_t fitting = rows_within(kBytesHeld, weight.stride()) / kRows;
  const int64_t blocks = fitting > kFewestBlocks ? fitting : kFewestBlocks;
  const int64_t most = blocks * kRows < kMostHeld ? blocks * kRows : kMostHeld;
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row, held = left < most ? left / kRows * kRows : most;
    const bool odd_first = row / most % 2;
    const auto block = weight.from(row, 0);
    if (held > 0)
      block_dots<F, kRows>(block, held, left, x, out + row, out_stride, scratch, terms, so_far,
                           odd_first);
    else
      block_dots<F, 1>(block, 1, left, x, out + row, out_stride, scratch, terms, so_far, odd_first);
    row += held > 0 ? held : 1;
  }
}

// Multiply rows by `kBatch` sequences, one row after the other: a CPU's prefetchers follow them.
template <class F, int kBatch, class S>
inline void rows_dots(const Plain<S>& weight, int64_t rows, const Operand<F>& x, float* out,
                      int64_t out_stride, Scratch& scratch) {
  static_assert(kLanes % kBatch == 0);
  const int64_t least = x.columns / x.leaves, longer = x.columns % x.leaves;
  const int64_t stride = weight.stride(), far = rows_within(kAheadOfFew, stride);
  const int64_t back = stride > kAheadOfFew ? stride - kAheadOfFew : 0;
  // The terms of a row, and the rows whose terms are added together.
  const int64_t size = x.leaves * kBatch, together = size < kLanes ? kLanes / size : 1;
  float* terms = scratch.take<float>(size + kLanes);
  for (int64_t begin = 0; begin < rows; begin += together) {
    const int64_t end = rows - begin < together ? rows : begin + together;
    Lanes totals[kLanes] = {};
    float* next = terms;
    int held = 0;
    for (int64_t row = begin; row < end; ++row) {
      const char* ahead =
          ahead_of(weight.address(row), stride, far, rows - row, scratch.next_weights);
      if (row + 1 < rows) ahead -= back;
      for (int64_t leaf = 0, first = 0; leaf < x.leaves; ++leaf) {
        const int64_t width = least + (leaf < longer);
        Registers even[kBatch] = {}, odd[kBatch] = {};
        add_products<F, kBatch>(weight.from(row, first).row(0), ahead + F::Weights::bytes(first),
                                x.values.first + first, x.values.stride, width, even, odd);
#pragma GCC unroll 2
        for (int b = 0; b < kBatch; ++b, ++held) store_registers(totals + held, even[b] + odd[b]);
        if (held == kLanes) store(next, sums_of_all(totals)), next += kLanes, held = 0;
        first += width;
      }
    }
    if (held > 0) store(next, sums_of_all(totals));  // the others are not used
    float* own = terms;
    for (int64_t row = begin; row < end; ++row, own += size) {
      const int64_t stored = join_leaves(x, own, kBatch);
      for (int64_t leaf = 0; leaf < stored; ++leaf)
        for (int64_t b = 0; b < kBatch; ++b)
          out[row + leaf * x.apart + b * out_stride] = own[leaf * kBatch + b];
    }
  }
}

// Multiply rows by all sequences: `out[row + sequence * out_stride]`.
template <class F, class S>
inline void dots(const Plain<S>& weight, int64_t rows, const Operand<F>& x, float* out,
                 int64_t out_stride, Scratch& scratch) {
#if defined(__AMX_BF16__)
  if constexpr (kHasTiles<F>) return tile_dots(weight, rows, x, out, out_stride, scratch);
#elif defined(TPC_PANELS)
  if constexpr (kHasPanels<F>)
    if (x.batch >= kFewest) return panel_dots(weight, rows, x, out, out_stride, scratch);
#endif
  if (x.packed) {
    // Products of few sequences wait for memory, which single rows read in its order.
    const auto run = x.batch > 2 ? blocks_dots<F, kBlock> : blocks_dots<F, 1>;
    return run(weight, rows, x, out, out_stride, scratch);
  }
  with_count<2>(x.batch, [&](auto batch) {
    rows_dots<F, decltype(batch)::value>(weight, rows, x, out, out_stride, scratch);
  });
}

// Go on with row `row` of a weight after the next products. Scales of few bits are apart.
template <class Weight>
inline void read_next(const Weight& weight, int64_t row, Scratch& scratch) {
  scratch.next_weights = weight.address(row);
  if constexpr (std::is_base_of_v<Grouped, Weight>) scratch.next_scales = weight.scales_address(row);
}

// Add the bias of some rows, if there is one.
template <class T>
TPC_INLINE void add_bias(const Memory& memory, int32_t bias, int64_t first, int64_t rows,
                         int64_t batch, float* values, int64_t stride) {
  if (bias == TPC_NONE) return;
  const T* biases = memory.at<T>(bias) + first;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t row = 0; row < rows; row += kLanes) {
      float* out = values + b * stride + row;
      store_some(out, load_some(out, rows - row) + load_some(biases + row, rows - row), rows - row);
    }
}

// Round values to T where they are.
template <class T>
TPC_INLINE void round_all(float* values, int64_t count) {
  for (int64_t place = 0; place < count; place += kLanes)
    store_some(values + place, rounded<T>(load_some(values + place, count - place)), count - place);
}

}  // namespace
