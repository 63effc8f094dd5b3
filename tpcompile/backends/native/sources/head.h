// The logits, the best logit of each instruction, and the next tokens.
#pragma once

#include "normed.h"

namespace {

// Whether a logit takes the place of the best one so far. As in torch, NaN is above all numbers.
TPC_INLINE bool above(float logit, float best) {
  return best == best && (logit > best || logit != logit);
}

// Whether a logit may be above the best one.
inline bool any_above(const float* logits, int64_t count, float best) {
  IntLanes larger{};
  for (int64_t place = 0; place < count; place += kLanes) {
    const Lanes values = load_some(logits + place, count - place);
    larger |= (values > best) | (values != values);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (larger[lane]) return true;
  return false;
}

constexpr int64_t kChunk = 512;

template <class Types>
void norm_lm_head(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& operands = *reinterpret_cast<const tpc_norm_lm_head*>(words);
  const int64_t rows = operands.rows.stop - operands.rows.start, batch = operands.normed_batch;
  const int64_t slots = memory.extent(operands.best, 1);
  const auto& x = normed<Types>(memory, operands, scratch);
  // The logits of a chunk stay in the nearest caches until the best one is found.
  float* logits = scratch.take<float>(batch * kChunk);
  for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
    const int64_t first = operands.rows.start + chunk;
    const int64_t count = kChunk < rows - chunk ? kChunk : rows - chunk;
    linear_rows<Types>(memory, operands, x, first, count, logits, kChunk, scratch);
    for (int64_t b = 0; b < batch; ++b) {
      const float* values = logits + b * kChunk;
      convert(values, count,
              memory.at<T>(operands.logits) + b * memory.extent(operands.logits, 1) + first);
      float* best = memory.at<float>(operands.best) + b * slots + operands.slot;
      if (chunk > 0 && !any_above(values, count, *best)) continue;
      int32_t* id = memory.at<int32_t>(operands.ids) + b * slots + operands.slot;
      for (int64_t row = 0; row < count; ++row) {
        if (chunk + row > 0 && !above(values[row], *best)) continue;
        *best = values[row];
        *id = static_cast<int32_t>(operands.first + first + row);
      }
    }
  }
}

inline void argmax(const Memory& memory, const int32_t* words, Scratch&) {
  const auto& operands = *reinterpret_cast<const tpc_argmax*>(words);
  const int32_t step = memory.at<int32_t>(operands.clock)[0];
  const int32_t* stops = memory.at<int32_t>(operands.stops);
  for (int64_t b = 0; b < operands.batch; ++b) {
    float best = 0;
    int32_t token = TPC_NONE;
    for (int64_t rank = 0; rank < operands.ranks; ++rank)
      for (int64_t slot = 0; slot < operands.slots; ++slot) {
        const float value = memory.at<float>(operands.best + rank)[b * operands.slots + slot];
        if (token != TPC_NONE && !above(value, best)) continue;
        best = value;
        token = memory.at<int32_t>(operands.ids + rank)[b * operands.slots + slot];
      }
    const bool ended = memory.at<int32_t>(operands.finished)[b] != 0 ||
                       memory.at<int32_t>(operands.lengths)[b] == 0;
    memory.at<int32_t>(operands.history)[int64_t{step} * operands.batch + b] =
        ended ? TPC_NONE : token;
    if (ended) continue;
    bool stop = false;
    for (int64_t place = 0; place < operands.most_stops; ++place) stop |= stops[place] == token;
    if (stop) {
      memory.at<int32_t>(operands.finished)[b] = 1;
    } else {
      memory.at<int32_t>(operands.tokens)[b] = token;
      ++memory.at<int32_t>(operands.positions)[b];
      ++memory.at<int32_t>(operands.lengths)[b];
    }
  }
  memory.at<int32_t>(operands.clock)[0] = step + 1;
}

}  // namespace
