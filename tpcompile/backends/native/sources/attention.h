// Attention of new tokens to spans of the cache, and the merge of the spans.
#pragma once

#include "attention_integers.h"
#include "normed.h"
#include "spans.h"

namespace {

// Whether several keys are multiplied at a time: there are registers for their sums.
constexpr bool kInBlocks = kRegisters == 1;

// The tokens whose values are mixed at a time, so that they stay in the nearest cache, and the most
// heads. Sums are in registers, of which some paths have enough for all columns.
#if defined(__AVX512F__)
constexpr int64_t kMixed = std::numeric_limits<int64_t>::max();
constexpr int kHeadsMixed = 4, kSumsMixed = 16;
#else
constexpr int64_t kMixed = 16;
constexpr int kHeadsMixed = 4, kSumsMixed = 8;
#endif

// Add `kParts * 16` columns of the values of some tokens, each with its weight, to the sums of some
// heads. The rows have `left` columns from the first of these on.
template <class T, int kHeads, int kParts>
inline void mix_columns(const Side<T>& values, Span tokens, const float* weights, int64_t stride,
                        int64_t width, int64_t left, float* out) {
  constexpr int kHere = kParts * kRegisters;  // registers of a head
  Register total[kHeads * kHere];
#pragma GCC unroll 16
  for (int place = 0; place < kHeads * kHere; ++place)
    total[place] = load_register(out + place / kHere * width + place % kHere * kRegister);
  const int64_t before_last = tokens.last - rows_ahead(Plain<T>::bytes(values.stride));
  weights -= tokens.first;
  // Not `each`: compilers would store the sums of a lambda's closure for each token.
  for (int64_t token = tokens.first; token < tokens.last;) {
    const int64_t end = (token / values.block + 1) * values.block;
    const T* row = values.row(token);
    for (const int64_t stop = end < tokens.last ? end : tokens.last; token < stop;
         ++token, row += values.stride) {
      const char* ahead = reinterpret_cast<const char*>(row) + (token >= before_last ? 0 : kAhead);
      for (int64_t line = 0; line < Plain<T>::bytes(kParts * kLanes); line += 64)
        __builtin_prefetch(ahead + line);
      Register factors[kHeads];
#pragma GCC unroll 4
      for (int head = 0; head < kHeads; ++head)
        factors[head] = Register{} + weight_of(weights[head * stride + token], row, left);
#pragma GCC unroll 16
      for (int part = 0; part < kHere; ++part) {
        const Register value = load_register(row + part * kRegister);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head)
          total[head * kHere + part] =
              multiply_add(total[head * kHere + part], value, factors[head]);
      }
    }
  }
#pragma GCC unroll 16
  for (int place = 0; place < kHeads * kHere; ++place) {
    const Register sums = total[place];
    std::memcpy(out + place / kHere * width + place % kHere * kRegister, &sums, sizeof sums);
  }
}

// The same for the last columns, which do not fill a vector.
template <class T, int kHeads>
inline void mix_rest(const Side<T>& values, Span tokens, const float* weights, int64_t stride,
                     int64_t width, int64_t columns, float* out) {
  Registers total[kHeads];
  for (int head = 0; head < kHeads; ++head)
    total[head] = load_some_registers(out + head * width, columns);
  values.each(tokens, [&](int64_t place, const T* row, int64_t count) {
    for (int64_t token = 0; token < count; ++token, row += values.stride) {
      const Registers value = load_some_registers(row, columns);
      for (int head = 0; head < kHeads; ++head)
        total[head] = multiply_add(total[head], value,
                                   weight_of(weights[head * stride + place + token], row, columns));
    }
  });
  for (int head = 0; head < kHeads; ++head)
    store_some(out + head * width, lanes(total[head]), columns);
}

// Add the values of some tokens for up to `kHeadsMixed` heads.
template <class T, int kHeads>
inline void mix(Side<T> values, Span tokens, const float* weights, int64_t stride, int64_t width,
                float* out) {
  constexpr int kMost = kSumsMixed / kHeads / kRegisters;
  constexpr int kParts = kMost > 8 ? 8 : kMost < 1 ? 1 : kMost;
  int64_t left = width;
  const auto some = [&](auto parts) TPC_ALWAYS {
    constexpr int kHere = decltype(parts)::value;
    for (; left >= kHere * kLanes; left -= kHere * kLanes) {
      mix_columns<T, kHeads, kHere>(values, tokens, weights, stride, width, left, out);
      values.first += kHere * kLanes, out += kHere * kLanes;
    }
  };
  some(std::integral_constant<int, kParts>());
  if constexpr (kParts > 4) some(std::integral_constant<int, 4>());
  if constexpr (kParts > 1) some(std::integral_constant<int, 1>());
  if (left > 0) mix_rest<T, kHeads>(values, tokens, weights, stride, width, left, out);
}

// Fetch the values that are mixed next, of some tokens, to the second cache.
template <class T>
TPC_INLINE void fetch_rows(const Side<T>& values, Span tokens, int64_t width) {
  if (tokens.last - tokens.first > kMixed) tokens.last = tokens.first + kMixed;
  values.each(tokens, [&](int64_t, const T* row, int64_t count) {
    for (; count > 0; --count, row += values.stride)
      for (int64_t line = 0; line < Plain<T>::bytes(width); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + line, 0, 2);
  });
}

// The rows of a sequence that attend together to a span. Each sees all tokens of the row before it,
// from the same one on.
struct Rows {
  int64_t count, heads;  // of each row
  int64_t first;         // the token
  const int64_t* tokens;  // how many each row sees

  int64_t vectors() const { return count * heads; }
  int64_t most() const { return tokens[count - 1]; }

  // Call `use(tokens, vector)` for runs of tokens, and for the first head whose row sees them.
  template <class Use>
  TPC_INLINE void each(const Use& use) const {
    int64_t seen = 0;
    for (int64_t row = 0; row < count; ++row) {
      if (tokens[row] == seen) continue;
      use(Span{first + seen, first + tokens[row]}, row * heads);
      seen = tokens[row];
    }
  }
};

// Some adjacent keys that are fetched while others are multiplied.
template <int kKeys>
struct KeysAhead {
  const char* first;
  int64_t stride;

  TPC_INLINE void fetch(int64_t begin, int64_t bytes) const {
#pragma GCC unroll 4
    for (int key = 0; key < kKeys; ++key) RowAhead{first + key * stride}.fetch(begin, bytes);
  }
};

// Multiply adjacent keys by `kVectors` queries in chunks, while there are enough for a block. Return
// how many are done. `ahead(token)` is what is fetched meanwhile.
template <class F, int kVectors, class C, class Ahead>
TPC_INLINE int64_t block_scores(const C* key, int64_t key_stride, int64_t count,
                                const typename F::Value* q, int64_t width, const Ahead& ahead,
                                float* scores, int64_t stride) {
  constexpr int kKeys = kVectors > 4 ? 2 : 4;
  using Fetched = KeysAhead<kKeys / 2>;
  const int64_t bytes = Plain<C>::bytes(key_stride);
  const auto* q_odd = q + odd_chunks<F>(width, kVectors);
  int64_t token = 0;
  for (; token + kKeys <= count; token += kKeys, key += kKeys * key_stride) {
    const char* next = ahead(token);
    const Lanes sums = block_dots<F, kKeys, kVectors, Fetched>(
        Plain<C>(key, bytes), q, q_odd, width, {next, bytes}, {next + kKeys / 2 * bytes, bytes});
    for (int vector = 0; vector < kVectors; ++vector)
      std::memcpy(scores + vector * stride + token,
                  reinterpret_cast<const float*>(&sums) + vector * kKeys, sizeof(float) * kKeys);
  }
  return token;
}

// Attend the heads of some rows to a span in fp32. The results are as for `attend_in_integers`.
template <class C, class F>
inline void attend(Sequences<F> q, const Rows& rows, int64_t width, const Side<C>& keys,
                   const Side<C>& values, float scale, float* mixed, float* mass, float* logs,
                   Scratch& scratch) {
  const int64_t count = rows.most(), heads = rows.vectors();
  const int64_t stride = (count + kLanes - 1) / kLanes * kLanes;
  float* scores = scratch.take<float>(heads * stride);
  float* scales = kIsScaled<C> ? scratch.take<float>(stride) : nullptr;
  Sums sums;
  const int64_t far = kRegisters > 1 ? rows_within(kAheadOfFew, Plain<C>::bytes(width))
                                     : rows_ahead(Plain<C>::bytes(keys.stride));
  const C* first_value = values.row(rows.first);
  const void* const* packed =
      kInBlocks ? packed_runs(q.first, q.stride, heads, width, 1, kOfRow, scratch, in_chunks<F>)
                : nullptr;
  rows.each([&](Span tokens, int64_t vector) TPC_ALWAYS {
    keys.each(tokens, [&](int64_t place, const C* key, int64_t tokens_here) {
      place += tokens.first - rows.first;
      // The last keys fetch the first values.
      const auto ahead = [&](int64_t token) TPC_ALWAYS {
        const int64_t later = place + token + far;
        const C* row = later < count ? key + (token + far) * keys.stride
                                     : first_value + (later - count) * values.stride;
        return reinterpret_cast<const char*>(row);
      };
      if constexpr (kIsScaled<C>)
        for (int64_t token = 0; token < tokens_here; ++token)
          scales[place + token] = scale_of(key + token * keys.stride, width);
      in_runs<kOfRow>(heads - vector, [&](auto vectors, int64_t run) TPC_ALWAYS {
        constexpr int kVectors = decltype(vectors)::value;
        const auto* some = q.first + (vector + run) * q.stride;
        float* out = scores + (vector + run) * stride + place;
        int64_t token = 0;
        if constexpr (kInBlocks)
          if (vector == 0) {  // what is packed begins with the first one
            const auto* chunks = static_cast<const typename F::Value*>(packed[run / kOfRow]);
            token = block_scores<F, kVectors>(key, keys.stride, tokens_here, chunks, width, ahead,
                                              out, stride);
          }
        for (; token < tokens_here; ++token)
          row_dots<F, kVectors>(key + token * keys.stride, ahead(token), some, q.stride, width,
                                [&](int64_t b, Registers total)
                                    TPC_ALWAYS { sums.add(total, out + b * stride + token); });
      });
    });
  });
  sums.flush();
  for (int64_t head = 0; head < heads; ++head)
    logs[head] = softmax(scores + head * stride, rows.tokens[head / rows.heads], scales, scale,
                         mass + head);
  std::memset(mixed, 0, sizeof(float) * static_cast<size_t>(heads * width));
  rows.each([&](Span tokens, int64_t vector) {
    while (tokens.first < tokens.last) {
      const int64_t left = tokens.last - tokens.first;
      const Span some{tokens.first, tokens.first + (left < kMixed ? left : kMixed)};
      if constexpr (kRegisters > 1) fetch_rows(values, {some.last, tokens.last}, width);
      const float* weights = scores + (tokens.first - rows.first);
      in_runs<kHeadsMixed>(heads - vector, [&](auto heads_here, int64_t head) TPC_ALWAYS {
        head += vector;
        mix<C, decltype(heads_here)::value>(values, some, weights + head * stride, stride, width,
                                            mixed + head * width);
      });
      tokens.first = some.last;
    }
  });
}

TPC_INLINE Span span_of_row(const Memory& memory, const tpc_partial_attention& operands,
                            int64_t row, int64_t span) {
  const int64_t length = memory.at<int32_t>(operands.lengths)[row];
  return span_of(length, operands.block, span, operands.spans, operands.window);
}

// Return the number of rows, from `row` on and at most `left`, that can attend to a span together:
// rows of one sequence, with the same blocks, each of which sees all tokens of the row before it.
inline int64_t rows_together(const Memory& memory, const tpc_partial_attention& operands,
                             int64_t row, int64_t span, int64_t left) {
  constexpr int64_t kMostHeads = 16;
  const int64_t blocks = memory.extent(operands.tables, 1);
  const int32_t* table =
      memory.at<int32_t>(operands.tables) + row * blocks;  // of the last row so far
  const Span first = span_of_row(memory, operands, row, span);
  Span last = first;
  int64_t count = 1;
  for (const int64_t heads = operands.heads.stop - operands.heads.start;
       count < left && (count + 1) * heads <= kMostHeads; ++count, table += blocks) {
    const Span next = span_of_row(memory, operands, row + count, span);
    if (next.first != first.first || next.last < last.last) break;
    const int64_t begin = first.first / operands.block;
    const int64_t end = (last.last + operands.block - 1) / operands.block;
    if (std::memcmp(table + begin, table + blocks + begin,
                    sizeof(int32_t) * static_cast<size_t>(end - begin)))
      break;
    last = next;
  }
  return count;
}

// Attend the sequences from `row` on to a span. Return how many are done.
template <class Types>
int64_t attend_span(const Memory& memory, const tpc_partial_attention& operands, int64_t row,
                    int64_t span, Scratch& scratch) {
  using T = typename Types::Value;
  using C = typename Types::Cache;
  using F = typename Types::Score;
  const int64_t width = operands.width, heads = operands.heads.stop - operands.heads.start;
  const int64_t all_heads = memory.extent(operands.lse, 1);
  const Span tokens = span_of_row(memory, operands, row, span);
  const auto out_of = [&](int64_t vector) {
    const int64_t sequence = row + vector / heads, head = operands.heads.start + vector % heads;
    return (sequence * all_heads + head) * operands.spans + span;
  };
  float* values = memory.at<float>(operands.values);
  float* lse = memory.at<float>(operands.lse);
  if (tokens.last == tokens.first) {
    for (int64_t head = 0; head < heads; ++head) {
      std::memset(values + out_of(head) * width, 0, sizeof(float) * static_cast<size_t>(width));
      lse[out_of(head)] = -std::numeric_limits<float>::infinity();
    }
    return 1;
  }
  const C* base = memory.at<C>(operands.cache) + operands.layer * memory.stride(operands.cache, 0) +
                  operands.kv_head * memory.stride(operands.cache, 3);
  const int64_t left = operands.sequences.stop - row;
  const int64_t rows = kInIntegers<T, C> ? 1 : rows_together(memory, operands, row, span, left);
  const int32_t* table =
      memory.at<int32_t>(operands.tables) + (row + rows - 1) * memory.extent(operands.tables, 1);
  const Side<C> keys{base, memory.stride(operands.cache, 2), table, operands.block};
  const Side<C> cached_values{base + memory.stride(operands.cache, 1), keys.stride, table,
                              operands.block};
  const int64_t q_stride = memory.stride(operands.q, 0);
  const T* queries = memory.at<T>(operands.q) + row * q_stride + operands.heads.start * width;
  float* mixed = scratch.take<float>(rows * heads * width);
  float *mass = scratch.take<float>(rows * heads), *logs = scratch.take<float>(rows * heads);
  if constexpr (kInIntegers<T, C>) {
    attend_in_integers(queries, heads, width, keys, cached_values, tokens, operands.scale, mixed,
                       mass, logs, scratch);
  } else {
    auto* q = scratch.take<typename F::Value>(rows * heads * width);
    auto* seen = scratch.take<int64_t>(rows);
    for (int64_t index = 0; index < rows; ++index) {
      convert(queries + index * q_stride, heads * width, q + index * heads * width);
      seen[index] = span_of_row(memory, operands, row + index, span).last - tokens.first;
    }
    attend<C, F>({q, width}, {rows, heads, tokens.first, seen}, width, keys, cached_values,
                 operands.scale, mixed, mass, logs, scratch);
  }
  for (int64_t vector = 0; vector < rows * heads; ++vector) {
    lse[out_of(vector)] = logs[vector];
    for (int64_t column = 0; column < width; column += kLanes)
      store_some(values + out_of(vector) * width + column,
                 load_some(mixed + vector * width + column, width - column) / mass[vector],
                 width - column);
  }
  return rows;
}

template <class Types>
void partial_attention(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& operands = *reinterpret_cast<const tpc_partial_attention*>(words);
  for (int64_t span = operands.span.start; span < operands.span.stop; ++span)
    for (int64_t row = operands.sequences.start; row < operands.sequences.stop;) {
      scratch.reset();
      row += attend_span<Types>(memory, operands, row, span, scratch);
    }
}

// Merge the second span into the first. Merging with an empty span changes nothing.
inline void merge(float* a, float* a_lse, const float* b, float b_lse, int64_t width) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float most = *a_lse > b_lse || *a_lse != *a_lse ? *a_lse : b_lse;
  const bool empty = most == -infinity;
  const float level = empty ? 0.0f : most;
  const auto weight = [&](float lse) {
    return static_cast<float>(std::exp(static_cast<double>(lse - level)));
  };
  const float of_a = weight(*a_lse), of_b = weight(b_lse);
  const float total = empty ? 1.0f : of_a + of_b;
  for (int64_t column = 0; column < width; column += kLanes) {
    const Lanes merged = load_some(a + column, width - column) * (of_a / total) +
                         load_some(b + column, width - column) * (of_b / total);
    store_some(a + column, merged, width - column);
  }
  *a_lse = empty ? -infinity : level + std::log(total);
}

template <class Types>
void attention_reduce(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& operands = *reinterpret_cast<const tpc_attention_reduce*>(words);
  const int64_t width = operands.width, all_heads = memory.extent(operands.lse, 1);
  float* values = scratch.take<float>(operands.spans * width);
  float* lse = scratch.take<float>(operands.spans);
  for (int64_t head = operands.heads.start; head < operands.heads.stop; ++head) {
    const int64_t first = (operands.sequence * all_heads + head) * operands.spans;
    std::memcpy(values, memory.at<float>(operands.values) + first * width,
                sizeof(float) * static_cast<size_t>(operands.spans * width));
    std::memcpy(lse, memory.at<float>(operands.lse) + first,
                sizeof(float) * static_cast<size_t>(operands.spans));
    const auto move = [&](int64_t out, int64_t term) {
      if (out == term) return;
      std::memcpy(values + out * width, values + term * width,
                  sizeof(float) * static_cast<size_t>(width));
      lse[out] = lse[term];
    };
    const auto join = [&](int64_t out, int64_t term) {
      float* first = values + term * width;
      merge(first, lse + term, first + width, lse[term + 1], width);
      move(out, term);
    };
    fold(operands.spans, join, move);
    const int64_t place = operands.sequence * memory.stride(operands.out, 0) + head * width;
    T* out = memory.at<T>(operands.out) + place;
    if (operands.gate == TPC_NONE) {
      convert(values, width, out);
      continue;
    }
    const T* gate = memory.at<T>(operands.gate) + place;
    for (int64_t column = 0; column < width; column += kLanes) {
      const int64_t left = width - column;
      const Lanes open = rounded<T>(sigmoid(load_some(gate + column, left)));
      store_some(out + column, rounded<T>(load_some(values + column, left)) * open, left);
    }
  }
}

}  // namespace
