// Spans of a sequence in the cache, their rows, and the weights of their tokens.
#pragma once

#include "dots.h"
#include "kv.h"

namespace {

struct Span {
  int64_t first, last;
};

// The tokens of a span: whole blocks, as evenly as possible, within the window.
TPC_INLINE Span span_of(int64_t length, int64_t block, int64_t span, int64_t spans,
                        int64_t window) {
  const int64_t blocks = (length + block - 1) / block;
  int64_t first = blocks * span / spans * block, last = blocks * (span + 1) / spans * block;
  last = last < length ? last : length;
  if (window != TPC_NONE && first < length - window) first = length - window;
  return {first, last < first ? first : last};
}

// The keys or values of one KV head of a sequence.
template <class T>
struct Side {
  const T* first;
  int64_t stride;
  const int32_t* table;
  int64_t block;

  const T* row(int64_t token) const {
    return first + (table[token / block] * block + token % block) * stride;
  }

  // Call `use(place, row, count)` for the runs of tokens in one block each; `place` counts from 0.
  template <class Use>
  TPC_INLINE void each(Span tokens, const Use& use) const {
    for (int64_t token = tokens.first; token < tokens.last;) {
      const int64_t held = token / block, left = (held + 1) * block - token;
      const int64_t count = left < tokens.last - token ? left : tokens.last - token;
      use(token - tokens.first, row(token), count);
      token += count;
    }
  }
};

// Scale the scores of one head, and turn them into weights. Return the log of their sum. Keys may
// have scales of their own.
inline float softmax(float* scores, int64_t count, const float* scales, float scale, float* mass) {
  Lanes most = all(-std::numeric_limits<float>::infinity());
  for (int64_t token = 0; token < count; token += kLanes) {
    const int64_t left = count - token;
    Lanes values = load_some(scores + token, left);
    if (scales) values = values * load_some(scales + token, left);
    values = values * scale;
    store_some(scores + token, values, left);
    for (int64_t lane = left; lane < kLanes; ++lane) values[lane] = values[0];
    most = values > most ? values : most;
  }
  const float top = largest(most);
  Lanes total{};
  for (int64_t token = 0; token < count; token += kLanes) {
    const int64_t left = count - token;
    Lanes weights = by_register(load_some(scores + token, left) - top, exponential<Register>);
    for (int64_t lane = left; lane < kLanes; ++lane) weights[lane] = 0;
    store_some(scores + token, weights, left);
    total = total + weights;
  }
  *mass = sum(total);
  return top + std::log(*mass);
}

}  // namespace
