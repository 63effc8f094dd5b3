// The logits, the best logit of each instruction, and the next tokens.
#pragma once

#include "normed.h"

namespace {

// Whether a logit takes the place of the best one so far. As in torch, NaN is above all numbers.
TPC_INLINE bool above(float logit, float best) {
  return best == best && (logit > best || logit != logit);
}

template <class T>
void norm_lm_head(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& at = *reinterpret_cast<const tpc_norm_lm_head*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, batch = at.normed_batch;
  const Sequences<T> x = normed<T>(memory, at, scratch);
  float* found = scratch.take<float>(batch * rows);
  linear_rows(memory, at, x, at.rows.start, rows, found, rows);
  const int64_t slots = memory.extent(at.best, 1);
  for (int64_t b = 0; b < batch; ++b) {
    const float* own = found + b * rows;
    narrow<T>(own, rows,
              memory.at<T>(at.logits) + b * memory.extent(at.logits, 1) + at.rows.start);
    int64_t best = 0;
    for (int64_t row = 1; row < rows; ++row)
      if (above(own[row], own[best])) best = row;
    memory.at<float>(at.best)[b * slots + at.slot] = own[best];
    memory.at<int32_t>(at.ids)[b * slots + at.slot] =
        static_cast<int32_t>(at.first + at.rows.start + best);
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
