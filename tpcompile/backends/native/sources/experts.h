// A mixture of experts: the choice of each sequence, and rows of the experts that were chosen.
#pragma once

#include <algorithm>

#include "mlp.h"

namespace {

// A number in the order of logits, in which NaN is above all others.
TPC_INLINE int32_t order_of(float logit) {
  if (logit != logit) return INT32_MAX;
  int32_t bits;
  logit += 0.0f;  // so that -0 is 0
  std::memcpy(&bits, &logit, sizeof bits);
  return bits < 0 ? INT32_MIN - bits : bits;
}

// Of equal logits, that of the lower number comes first.
template <class Types>
void top_experts(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& at = *reinterpret_cast<const tpc_top_experts*>(words);
  const int64_t count = at.experts, row = at.sequence;
  float* shares = scratch.take<float>(count);
  auto* order = scratch.take<int32_t>(count);
  convert(memory.at<T>(at.logits) + row * count, count, shares);
  for (int64_t expert = 0; expert < count; ++expert) order[expert] = order_of(shares[expert]);
  int32_t* ids = memory.at<int32_t>(at.ids) + row * at.chosen;
  float* scores = scratch.take<float>(at.chosen);
  for (int64_t place = 0; place < at.chosen; ++place) {
    int32_t best = INT32_MIN;  // below all logits
    for (int64_t expert = 0; expert < count; ++expert)
      best = order[expert] > best ? order[expert] : best;
    int64_t expert = 0;
    while (order[expert] != best) ++expert;
    order[expert] = INT32_MIN;
    ids[place] = static_cast<int32_t>(expert);
  }
  const float highest = shares[ids[0]];
  Lanes total{};
  for (int64_t expert = 0; expert < count; expert += kLanes) {
    const int64_t left = count - expert;
    const Lanes own = by_register(load_some(shares + expert, left) - highest,
                                  [](Register x) { return exponential(x); });
    store_some(shares + expert, own, left);
    total = total + load_some(shares + expert, left);
  }
  const float all = sum(total);
  float chosen = 0.0f;
  for (int64_t place = 0; place < at.chosen; ++place) {
    scores[place] = shares[ids[place]] / all;
    chosen += scores[place];
  }
  if (at.normalized)
    for (int64_t place = 0; place < at.chosen; ++place) scores[place] /= chosen;
  convert(scores, at.chosen, memory.at<T>(at.scores) + row * at.chosen);
  if (memory.at<int32_t>(at.lengths)[row] == 0)
    for (int64_t place = 0; place < at.chosen; ++place) ids[place] = TPC_NONE;
}

// An expert of a rank, and the places of it among the choices of all sequences, in order.
struct Chosen {
  int64_t expert, count;
  const int64_t* places;
};

// Return the experts of a rank that sequences have chosen, in the order of their numbers, and then
// one with a count of 0. `Words` have choices.
template <class Words>
inline const Chosen* chosen_of(const Memory& memory, const Words& at, int64_t batch,
                               Scratch& scratch) {
  const int32_t* ids = memory.at<int32_t>(at.ids);
  const int64_t choices = batch * at.chosen, held = at.held;
  const auto own = [&](int64_t place) { return ids[place] - int64_t{at.first}; };
  auto* ends = scratch.take<int64_t>(held + 1);
  std::fill(ends, ends + held + 1, 0);
  for (int64_t place = 0; place < choices; ++place)
    if (own(place) >= 0 && own(place) < held) ++ends[own(place) + 1];
  auto* found = scratch.take<Chosen>((choices < held ? choices : held) + 1);
  auto* places = scratch.take<int64_t>(choices);
  Chosen* next = found;
  for (int64_t expert = 0; expert < held; ++expert) {
    if (const int64_t count = ends[expert + 1]) *next++ = {expert, count, places + ends[expert]};
    ends[expert + 1] += ends[expert];
  }
  *next = {0, 0, places};
  for (int64_t place = 0; place < choices; ++place)
    if (own(place) >= 0 && own(place) < held) places[ends[own(place)]++] = place;
  return found;
}

// Return the rows at some places, side by side.
template <class F, class T>
inline Sequences<F> gathered(const T* from, const Chosen& own, int64_t each, int64_t width,
                             Scratch& scratch) {
  auto* found = scratch.take<typename F::Value>(own.count * width);
  for (int64_t n = 0; n < own.count; ++n)
    convert(from + own.places[n] / each * width, width, found + n * width);
  return {found, width};
}

// Gate and up of each expert for some rows, of the sequences that have chosen it.
template <class Types>
void norm_experts(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_norm_experts*>(words);
  const int64_t batch = at.normed_batch, rows = at.rows.stop - at.rows.start;
  const int64_t width = at.normed_width, extent = at.extent;
  const typename Types::Weight weight(memory, at.weight);
  const auto x = normed_rows<Types>(memory, at, scratch);
  const auto alone = operand(x, 1, width, 1, weight, scratch);
  float* gate = scratch.take<float>(batch * rows);
  float* up = scratch.take<float>(batch * rows);
  const char* const next_weights = scratch.next_weights;
  for (const Chosen* own = chosen_of(memory, at, batch, scratch); own->count; ++own) {
    const int64_t first = 2 * own->expert * extent + at.rows.start;
    const auto values =
        batch == 1 ? alone
                   : operand(gathered<F>(x.first, *own, at.chosen, width, scratch), own->count,
                             width, 1, weight, scratch);
    scratch.next_weights = weight.address(first + extent);
    dots(weight.from(first, 0), rows, values, gate, rows, scratch);
    const int64_t next = 2 * own[1].expert * extent + at.rows.start;
    scratch.next_weights = own[1].count ? weight.address(next) : next_weights;
    dots(weight.from(first + extent, 0), rows, values, up, rows, scratch);
    round_all<T>(gate, own->count * rows);
    round_all<T>(up, own->count * rows);
    for (int64_t n = 0; n < own->count; ++n)
      for (int64_t row = 0; row < rows; row += kLanes)
        store_some(memory.at<T>(at.out) + own->places[n] * extent + at.rows.start + row,
                   rounded<T>(silu(load_some(gate + n * rows + row, rows - row))) *
                       load_some(up + n * rows + row, rows - row),
                   rows - row);
  }
}

// Increase sums by values times a factor.
TPC_INLINE void add_scaled(const float* values, int64_t count, float factor, float* sums) {
  for (int64_t at = 0; at < count; at += kLanes)
    store_some(sums + at,
               load_some(sums + at, count - at) + load_some(values + at, count - at) * factor,
               count - at);
}

// Store the sums over leaves, `[leaves][batch][rows]`, as terms.
inline void store_terms(float* sums, int64_t leaves, int64_t batch, int64_t rows, float* out,
                        int64_t out_stride) {
  fold_sums(sums, leaves, batch * rows);
  for (int64_t b = 0; b < batch; ++b)
    std::memcpy(out + b * out_stride, sums + b * rows, sizeof(float) * static_cast<size_t>(rows));
}

// Results of each expert, times the scores of the sequences that have chosen it. The sums over each
// leaf are those of all experts, so that they do not depend on the number of ranks.
template <class Types>
void expert_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_expert_terms*>(words);
  const int64_t batch = at.batch, rows = at.rows.stop - at.rows.start;
  const typename Types::Weight weight(memory, at.weight);
  float* sums = scratch.take<float>(at.leaves * batch * rows);
  std::fill(sums, sums + at.leaves * batch * rows, 0.0f);
  float* found = scratch.take<float>(at.leaves * batch * rows);
  const char* const next_weights = scratch.next_weights;
  for (const Chosen* own = chosen_of(memory, at, batch, scratch); own->count; ++own) {
    const int64_t next = own[1].expert * at.extent + at.rows.start;
    scratch.next_weights = own[1].count ? weight.address(next) : next_weights;
    auto values = operand(gathered<F>(memory.at<T>(at.x), *own, 1, at.width, scratch), own->count,
                          at.width, at.leaves, weight, scratch);
    values.apart = own->count * rows;
    dots(weight.from(own->expert * at.extent + at.rows.start, 0), rows, values, found, rows,
         scratch);
    for (int64_t leaf = 0; leaf < at.leaves; ++leaf)
      for (int64_t n = 0; n < own->count; ++n)
        add_scaled(found + (leaf * own->count + n) * rows, rows,
                   number(memory.at<T>(at.scores) + own->places[n]),
                   sums + (leaf * batch + own->places[n] / at.chosen) * rows);
  }
  store_terms(sums, at.leaves, batch, rows, memory.at<float>(at.out) + at.rows.start, at.extent);
}

// Results of the shared expert, times the gates of all sequences.
template <class Types>
void shared_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_shared_terms*>(words);
  const int64_t batch = at.batch, rows = at.rows.stop - at.rows.start;
  const typename Types::Weight weight(memory, at.weight);
  auto values = operand(sequences<F>(memory.at<T>(at.x), batch, at.width, scratch), batch,
                        at.width, at.leaves, weight, scratch);
  values.apart = batch * rows;
  float* found = scratch.take<float>(at.leaves * batch * rows);
  dots(weight.from(at.rows.start, 0), rows, values, found, rows, scratch);
  float* sums = scratch.take<float>(at.leaves * batch * rows);
  std::fill(sums, sums + at.leaves * batch * rows, 0.0f);
  for (int64_t b = 0; b < batch; ++b) {
    const Lanes gate = Lanes{} + number(memory.at<T>(at.gate) + b);
    const float share = rounded<T>(sigmoid(gate))[0];
    for (int64_t leaf = 0; leaf < at.leaves; ++leaf)
      add_scaled(found + (leaf * batch + b) * rows, rows, share, sums + (leaf * batch + b) * rows);
  }
  store_terms(sums, at.leaves, batch, rows,
              memory.at<float>(at.out) + at.slot * batch * int64_t{at.extent} + at.rows.start,
              at.extent);
}

}  // namespace
