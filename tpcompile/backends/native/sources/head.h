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
  IntLanes found{};
  for (int64_t at = 0; at < count; at += kLanes) {
    const Lanes own = load_some(logits + at, count - at);
    found |= (own > best) | (own != own);
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if (found[lane]) return true;
  return false;
}

constexpr int64_t kChunk = 512;

template <class Types>
void norm_lm_head(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& at = *reinterpret_cast<const tpc_norm_lm_head*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, batch = at.normed_batch;
  const int64_t slots = memory.extent(at.best, 1);
  const auto& x = normed<Types>(memory, at, scratch);
  // The logits of a chunk stay in the nearest caches until the best one is found.
  float* found = scratch.take<float>(batch * kChunk);
  for (int64_t chunk = 0; chunk < rows; chunk += kChunk) {
    const int64_t first = at.rows.start + chunk;
    const int64_t count = kChunk < rows - chunk ? kChunk : rows - chunk;
    linear_rows<Types>(memory, at, x, first, count, found, kChunk, scratch);
    for (int64_t b = 0; b < batch; ++b) {
      const float* own = found + b * kChunk;
      convert(own, count, memory.at<T>(at.logits) + b * memory.extent(at.logits, 1) + first);
      float* best = memory.at<float>(at.best) + b * slots + at.slot;
      if (chunk > 0 && !any_above(own, count, *best)) continue;
      int32_t* id = memory.at<int32_t>(at.ids) + b * slots + at.slot;
      for (int64_t row = 0; row < count; ++row) {
        if (chunk + row > 0 && !above(own[row], *best)) continue;
        *best = own[row];
        *id = static_cast<int32_t>(at.first + first + row);
      }
    }
  }
}

inline void argmax(const Memory& memory, const int32_t* words, Scratch&) {
  const auto& at = *reinterpret_cast<const tpc_argmax*>(words);
  const int32_t step = memory.at<int32_t>(at.clock)[0];
  const int32_t* stops = memory.at<int32_t>(at.stops);
  for (int64_t b = 0; b < at.batch; ++b) {
    float best = 0;
    int32_t token = TPC_NONE;
    for (int64_t rank = 0; rank < at.ranks; ++rank)
      for (int64_t slot = 0; slot < at.slots; ++slot) {
        const float own = memory.at<float>(at.best + rank)[b * at.slots + slot];
        if (token != TPC_NONE && !above(own, best)) continue;
        best = own;
        token = memory.at<int32_t>(at.ids + rank)[b * at.slots + slot];
      }
    const bool ended =
        memory.at<int32_t>(at.finished)[b] != 0 || memory.at<int32_t>(at.lengths)[b] == 0;
    memory.at<int32_t>(at.history)[int64_t{step} * at.batch + b] = ended ? TPC_NONE : token;
    if (ended) continue;
    bool stop = false;
    for (int64_t place = 0; place < at.most_stops; ++place) stop |= stops[place] == token;
    if (stop) {
      memory.at<int32_t>(at.finished)[b] = 1;
    } else {
      memory.at<int32_t>(at.tokens)[b] = token;
      ++memory.at<int32_t>(at.positions)[b];
      ++memory.at<int32_t>(at.lengths)[b];
    }
  }
  memory.at<int32_t>(at.clock)[0] = step + 1;
}

}  // namespace
