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

  // Return the sequences, or their numbers in runs of `each` places.
  const int64_t* sequences(int64_t each, Scratch& scratch) const {
    auto* found = scratch.take<int64_t>(count);
    for (int64_t n = 0; n < count; ++n) found[n] = places[n] / each;
    return found;
  }
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

// Return some rows side by side.
template <class F, class T>
inline Sequences<F> gathered(const T* from, const int64_t* rows, int64_t count, int64_t width,
                             Scratch& scratch) {
  auto* found = scratch.take<typename F::Value>(count * width);
  for (int64_t n = 0; n < count; ++n) convert(from + rows[n] * width, width, found + n * width);
  return {found, width};
}

// The values of a batch, of which experts take those of some sequences.
template <class F, class W>
class BatchValues {
 public:
  BatchValues(Sequences<F> values, int64_t batch, int64_t width, const W& weight, Scratch& scratch)
      : values_(values), weight_(weight), width_(width), batch_(batch) {
    if constexpr (kLaidOnce) all_ = laid_operand(values, batch, width, 1, weight, scratch);
    else if (batch == 1) all_ = operand(values, batch, width, 1, weight, scratch);
  }

  Operand<F> of(const int64_t* sequences, int64_t count, Scratch& scratch) const {
    if (batch_ == 1) return all_;
    if constexpr (kLaidOnce) return selected<F>(all_, sequences, count, weight_, scratch);
    else return operand(gathered<F>(values_.first, sequences, count, width_, scratch), count, width_,
                        1, weight_, scratch);
  }

 private:
  static constexpr bool kLaidOnce = std::is_base_of_v<Grouped, W>;

  Sequences<F> values_;
  const W& weight_;
  int64_t width_, batch_;
  Operand<F> all_{};
};

// Gate and up of each expert for some rows, of the sequences that have chosen it.
template <class Types>
void norm_experts(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_norm_experts*>(words);
  const int64_t batch = at.normed_batch, rows = at.rows.stop - at.rows.start;
  const int64_t width = at.normed_width, extent = at.extent;
  const typename Types::Weight weight(memory, at.weight);
  const BatchValues<F, typename Types::Weight> x(normed_rows<Types>(memory, at, scratch), batch,
                                                 width, weight, scratch);
  float* gate = scratch.take<float>(batch * rows);
  float* up = scratch.take<float>(batch * rows);
  const char* const next_weights = scratch.next_weights;
  for (const Chosen* own = chosen_of(memory, at, batch, scratch); own->count; ++own) {
    const int64_t first = 2 * own->expert * extent + at.rows.start;
    const auto values = x.of(own->sequences(at.chosen, scratch), own->count, scratch);
    read_next(weight, first + extent, scratch);
    dots(weight.from(first, 0), rows, values, gate, rows, scratch);
    if (own[1].count) read_next(weight, 2 * own[1].expert * extent + at.rows.start, scratch);
    else scratch.next_weights = next_weights, scratch.next_scales = nullptr;
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

inline float* zeros(int64_t count, Scratch& scratch) {
  float* found = scratch.take<float>(count);
  std::fill(found, found + count, 0.0f);
  return found;
}

// The sums over leaves of products with several weights, each times a factor of its sequence.
template <class F>
class ScaledSums {
 public:
  ScaledSums(int64_t batch, int64_t rows, int64_t width, int64_t leaves, Scratch& scratch)
      : batch_(batch),
        rows_(rows),
        width_(width),
        leaves_(leaves),
        sums_(zeros(leaves * batch * rows, scratch)),
        found_(scratch.take<float>(leaves * batch * rows)) {}

  // Add the products of a weight with the values of some sequences.
  template <class Weight>
  void add(const Weight& weight, Sequences<F> values, int64_t count, const int64_t* sequences,
           const float* factors, Scratch& scratch) {
    auto x = operand(values, count, width_, leaves_, weight, scratch);
    x.apart = count * rows_;
    dots(weight, rows_, x, found_, rows_, scratch);
    for (int64_t leaf = 0; leaf < leaves_; ++leaf)
      for (int64_t n = 0; n < count; ++n)
        add_scaled(found_ + (leaf * count + n) * rows_, rows_, factors[n],
                   sums_ + (leaf * batch_ + sequences[n]) * rows_);
  }

  void store(float* out, int64_t out_stride, Scratch&) const {
    fold_sums(sums_, leaves_, batch_ * rows_);
    for (int64_t b = 0; b < batch_; ++b)
      std::memcpy(out + b * out_stride, sums_ + b * rows_,
                  sizeof(float) * static_cast<size_t>(rows_));
  }

 private:
  int64_t batch_, rows_, width_, leaves_;
  float *sums_, *found_;
};

#if defined(__AVX2__)
// The same of weights of few bits. Sums are those of blocks of columns until all weights are added,
// and a factor is one of values, as those of blocks are.
template <class F>
class BlockSums {
 public:
  BlockSums(int64_t batch, int64_t rows, int64_t width, int64_t leaves, Scratch&)
      : batch_(batch), rows_(rows), width_(width), leaves_(leaves) {}

  // Whether a leaf has at most one block in each lane.
  static bool fits(const Grouped& weight, int64_t width, int64_t leaves) {
    return (width + leaves - 1) / leaves <= kLanes * weight.block();
  }

  void add(const Grouped& weight, Sequences<F> values, int64_t count, const int64_t* sequences,
           const float* factors, Scratch& scratch) {
    for (int64_t n = 0; n < count; ++n) {
      const Sequences<F> own{values.first + n * values.stride, values.stride};
      x_ = operand(own, 1, width_, leaves_, weight, scratch);
      if (!sums_) sums_ = zeros(batch_ * size(), scratch);
      scale(x_, 0, factors[n]);
      add_block_products(weight, rows_, x_, sums_ + sequences[n] * size(), scratch);
    }
  }

  void store(float* out, int64_t out_stride, Scratch& scratch) const {
    for (int64_t b = 0; b < batch_; ++b, out += out_stride)
      if (sums_) store_leaf_sums(x_, sums_ + b * size(), rows_, out, scratch);
      else std::fill(out, out + rows_, 0.0f);
  }

 private:
  // The sums of a sequence, of whole registers of rows.
  int64_t size() const { return (rows_ + kLanes - 1) / kLanes * kLanes * x_.blocks(); }

  int64_t batch_, rows_, width_, leaves_;
  float* sums_ = nullptr;
  Operand<F> x_{};  // all have the same blocks
};
#endif

// Results of each expert, times the scores of the sequences that have chosen it.
template <class Types, class Sums>
inline void add_experts(const Memory& memory, const tpc_expert_terms& at, Sums sums,
                        Scratch& scratch) {
  using T = typename Types::Value;
  const typename Types::Weight weight(memory, at.weight);
  float* scores = scratch.take<float>(at.batch * at.chosen);
  const char* const next_weights = scratch.next_weights;
  for (const Chosen* own = chosen_of(memory, at, at.batch, scratch); own->count; ++own) {
    if (own[1].count) read_next(weight, own[1].expert * at.extent + at.rows.start, scratch);
    else scratch.next_weights = next_weights, scratch.next_scales = nullptr;
    for (int64_t n = 0; n < own->count; ++n)
      scores[n] = number(memory.at<T>(at.scores) + own->places[n]);
    const auto values = gathered<typename Types::Product>(memory.at<T>(at.x), own->places,
                                                          own->count, at.width, scratch);
    sums.add(weight.from(own->expert * at.extent + at.rows.start, 0), values, own->count,
             own->sequences(at.chosen, scratch), scores, scratch);
  }
  sums.store(memory.at<float>(at.out) + at.rows.start, at.extent, scratch);
}

// The sums over each leaf are those of all experts, so that they do not depend on the number of ranks.
template <class Types>
void expert_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_expert_terms*>(words);
  const int64_t rows = at.rows.stop - at.rows.start;
#if defined(__AVX2__)
  if constexpr (std::is_base_of_v<Grouped, typename Types::Weight>)
    if (BlockSums<F>::fits({memory, at.weight}, at.width, at.leaves))
      return add_experts<Types>(
          memory, at, BlockSums<F>(at.batch, rows, at.width, at.leaves, scratch), scratch);
#endif
  add_experts<Types>(memory, at, ScaledSums<F>(at.batch, rows, at.width, at.leaves, scratch),
                     scratch);
}

// Results of the shared expert, times the gates of all sequences.
template <class Types>
void shared_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& at = *reinterpret_cast<const tpc_shared_terms*>(words);
  const int64_t batch = at.batch, rows = at.rows.stop - at.rows.start;
  const typename Types::Weight weight(memory, at.weight);
  auto* all = scratch.take<int64_t>(batch);
  float* gates = scratch.take<float>(batch);
  for (int64_t b = 0; b < batch; ++b) {
    all[b] = b;
    gates[b] = rounded<T>(sigmoid(Lanes{} + number(memory.at<T>(at.gate) + b)))[0];
  }
  ScaledSums<F> sums(batch, rows, at.width, at.leaves, scratch);
  sums.add(weight.from(at.rows.start, 0),
           sequences<F>(memory.at<T>(at.x), batch, at.width, scratch), batch, all, gates, scratch);
  sums.store(memory.at<float>(at.out) + at.slot * batch * int64_t{at.extent} + at.rows.start,
             at.extent, scratch);
}

}  // namespace
