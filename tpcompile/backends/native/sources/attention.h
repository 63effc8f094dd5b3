// Attention of one sequence's new token in spans of the cache, and the merge of the spans.
#pragma once

#include "attention_integers.h"
#include "normed.h"
#include "spans.h"

namespace {

// Add `kParts * 16` columns of the values of all tokens, each with its weight, for some heads. The
// rows have `left` columns from the first of these on.
template <class T, int kHeads, int kParts>
inline void mix_columns(const Side<T>& values, Span tokens, const float* weights, int64_t stride,
                        int64_t width, int64_t left, float* out) {
  Registers total[kHeads][kParts] = {};
  const int64_t in_span = tokens.last - tokens.first;
  values.each(tokens, [&](int64_t place, const T* row, int64_t count) {
    for (int64_t token = 0; token < count; ++token, row += values.stride) {
      const bool last = place + token + rows_ahead(Plain<T>::bytes(values.stride)) >= in_span;
      const char* ahead = reinterpret_cast<const char*>(row) + (last ? 0 : kAhead);
      for (int64_t line = 0; line < Plain<T>::bytes(kParts * kLanes); line += 64)
        __builtin_prefetch(ahead + line);
      float own[kHeads];
#pragma GCC unroll 2
      for (int head = 0; head < kHeads; ++head)
        own[head] = weight_of(weights[head * stride + place + token], row, left);
#pragma GCC unroll 8
      for (int part = 0; part < kParts; ++part) {
        const Registers value = load_registers(row + part * kLanes);
#pragma GCC unroll 2
        for (int head = 0; head < kHeads; ++head)
          total[head][part] = multiply_add(total[head][part], value, own[head]);
      }
    }
  });
  for (int head = 0; head < kHeads; ++head)
    for (int part = 0; part < kParts; ++part)
      store(out + head * width + part * kLanes, lanes(total[head][part]));
}

// The same for the last columns, which fill no vector.
template <class T, int kHeads>
inline void mix_rest(const Side<T>& values, Span tokens, const float* weights, int64_t stride,
                     int64_t width, int64_t columns, float* out) {
  Lanes total[kHeads] = {};
  values.each(tokens, [&](int64_t place, const T* row, int64_t count) {
    for (int64_t token = 0; token < count; ++token, row += values.stride) {
      const Lanes value = load_some(row, columns);
      for (int head = 0; head < kHeads; ++head)
        total[head] += value * weight_of(weights[head * stride + place + token], row, columns);
    }
  });
  for (int head = 0; head < kHeads; ++head) store_some(out + head * width, total[head], columns);
}

// Mix the values of all tokens for one or two heads.
template <class T, int kHeads>
inline void mix(Side<T> values, Span tokens, const float* weights, int64_t stride, int64_t width,
                float* out) {
  int64_t left = width;
  const auto past = [&](int64_t columns) {
    left -= columns;
    values.first += columns;
    out += columns;
  };
  for (; left >= 8 * kLanes; past(8 * kLanes))
    mix_columns<T, kHeads, 8>(values, tokens, weights, stride, width, left, out);
  for (; left >= 4 * kLanes; past(4 * kLanes))
    mix_columns<T, kHeads, 4>(values, tokens, weights, stride, width, left, out);
  for (; left >= kLanes; past(kLanes))
    mix_columns<T, kHeads, 1>(values, tokens, weights, stride, width, left, out);
  if (left > 0) mix_rest<T, kHeads>(values, tokens, weights, stride, width, left, out);
}

// Attend some heads to a span in fp32. The results are as for `attend_in_integers`.
template <class T, class C, class F>
inline void attend(const T* queries, int64_t heads, int64_t width, const Side<C>& keys,
                   const Side<C>& values, Span tokens, float scale, float* mixed, float* mass,
                   float* logs, Scratch& scratch) {
  const int64_t count = tokens.last - tokens.first;
  const Sequences<F> q = sequences<F>(queries, heads, width, scratch);
  const int64_t stride = (count + kLanes - 1) / kLanes * kLanes;
  float* scores = scratch.take<float>(heads * stride);
  float* scales = kIsScaled<C> ? scratch.take<float>(stride) : nullptr;
  Sums sums;
  const int64_t rows = rows_ahead(Plain<C>::bytes(keys.stride));
  const C* first_value = values.row(tokens.first);
  keys.each(tokens, [&](int64_t place, const C* own, int64_t tokens_here) {
    for (int64_t token = place; token < place + tokens_here; ++token, own += keys.stride) {
      // The last keys prefetch the first values.
      const C* ahead = token + rows < count ? own + rows * keys.stride
                                            : first_value + (token + rows - count) * keys.stride;
      row_dots<8>(own, reinterpret_cast<const char*>(ahead), q, heads, width, scores + token,
                  stride, sums);
      if constexpr (kIsScaled<C>) scales[token] = scale_of(own, width);
    }
  });
  sums.flush();
  for (int64_t head = 0; head < heads; ++head)
    logs[head] = softmax(scores + head * stride, count, scales, scale, mass + head);
  int64_t head = 0;
  for (; head + 2 <= heads; head += 2)
    mix<C, 2>(values, tokens, scores + head * stride, stride, width, mixed + head * width);
  for (; head < heads; ++head)
    mix<C, 1>(values, tokens, scores + head * stride, stride, width, mixed + head * width);
}

template <class Types>
void attend_span(const Memory& memory, const tpc_partial_attention& at, int64_t span,
                 Scratch& scratch) {
  using T = typename Types::Value;
  using C = typename Types::Cache;
  const int64_t width = at.width, heads = at.heads.stop - at.heads.start;
  const int64_t all_heads = memory.extent(at.lse, 1), row = at.sequence;
  const int64_t length = memory.at<int32_t>(at.lengths)[row];
  const Span tokens = span_of(length, at.block, span, at.spans, at.window);
  const auto out_of = [&](int64_t head) {
    return (row * all_heads + at.heads.start + head) * at.spans + span;
  };
  float* values = memory.at<float>(at.values);
  float* lse = memory.at<float>(at.lse);
  if (tokens.last == tokens.first) {
    for (int64_t head = 0; head < heads; ++head) {
      std::memset(values + out_of(head) * width, 0, sizeof(float) * static_cast<size_t>(width));
      lse[out_of(head)] = -std::numeric_limits<float>::infinity();
    }
    return;
  }
  const C* base = memory.at<C>(at.cache) + at.layer * memory.stride(at.cache, 0) +
                  at.kv_head * memory.stride(at.cache, 3);
  const int32_t* table = memory.at<int32_t>(at.tables) + row * memory.extent(at.tables, 1);
  const Side<C> keys{base, memory.stride(at.cache, 2), table, at.block};
  const Side<C> kept{base + memory.stride(at.cache, 1), keys.stride, table, at.block};
  const T* queries = memory.at<T>(at.q) + row * memory.stride(at.q, 0) + at.heads.start * width;
  float* mixed = scratch.take<float>(heads * width);
  float *mass = scratch.take<float>(heads), *logs = scratch.take<float>(heads);
  if constexpr (kInIntegers<T, C>)
    attend_in_integers(queries, heads, width, keys, kept, tokens, at.scale, mixed, mass, logs,
                       scratch);
  else
    attend<T, C, typename Types::Score>(queries, heads, width, keys, kept, tokens, at.scale, mixed,
                                        mass, logs, scratch);
  for (int64_t head = 0; head < heads; ++head) {
    lse[out_of(head)] = logs[head];
    for (int64_t column = 0; column < width; column += kLanes)
      store_some(values + out_of(head) * width + column,
                 load_some(mixed + head * width + column, width - column) / mass[head],
                 width - column);
  }
}

template <class Types>
void partial_attention(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& at = *reinterpret_cast<const tpc_partial_attention*>(words);
  for (int64_t span = at.span.start; span < at.span.stop; ++span) {
    scratch.reset();
    attend_span<Types>(memory, at, span, scratch);
  }
}

// Merge the second span into the first. Merging with an empty span changes nothing.
inline void merge(float* a, float* a_lse, const float* b, float b_lse, int64_t width) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float most = *a_lse > b_lse || *a_lse != *a_lse ? *a_lse : b_lse;
  const bool empty = most == -infinity;
  const float level = empty ? 0.0f : most;
  const auto weight = [&](float own) {
    return static_cast<float>(std::exp(static_cast<double>(own - level)));
  };
  const float of_a = weight(*a_lse), of_b = weight(b_lse);
  const float total = empty ? 1.0f : of_a + of_b;
  for (int64_t at = 0; at < width; at += kLanes) {
    const Lanes found = load_some(a + at, width - at) * (of_a / total) +
                        load_some(b + at, width - at) * (of_b / total);
    store_some(a + at, found, width - at);
  }
  *a_lse = empty ? -infinity : level + std::log(total);
}

template <class Types>
void attention_reduce(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& at = *reinterpret_cast<const tpc_attention_reduce*>(words);
  const int64_t width = at.width, all_heads = memory.extent(at.lse, 1);
  float* values = scratch.take<float>(at.spans * width);
  float* lse = scratch.take<float>(at.spans);
  for (int64_t head = at.heads.start; head < at.heads.stop; ++head) {
    const int64_t first = (at.sequence * all_heads + head) * at.spans;
    std::memcpy(values, memory.at<float>(at.values) + first * width,
                sizeof(float) * static_cast<size_t>(at.spans * width));
    std::memcpy(lse, memory.at<float>(at.lse) + first,
                sizeof(float) * static_cast<size_t>(at.spans));
    const auto move = [&](int64_t to, int64_t one) {
      if (to == one) return;
      std::memcpy(values + to * width, values + one * width,
                  sizeof(float) * static_cast<size_t>(width));
      lse[to] = lse[one];
    };
    const auto join = [&](int64_t to, int64_t one) {
      float* first = values + one * width;
      merge(first, lse + one, first + width, lse[one + 1], width);
      move(to, one);
    };
    fold(at.spans, join, move);
    const int64_t place = at.sequence * memory.stride(at.out, 0) + head * width;
    T* to = memory.at<T>(at.out) + place;
    if (at.gate == TPC_NONE) {
      convert(values, width, to);
      continue;
    }
    const T* gate = memory.at<T>(at.gate) + place;
    for (int64_t column = 0; column < width; column += kLanes) {
      const int64_t left = width - column;
      const Lanes open = rounded<T>(sigmoid(load_some(gate + column, left)));
      store_some(to + column, rounded<T>(load_some(values + column, left)) * open, left);
    }
  }
}

}  // namespace
