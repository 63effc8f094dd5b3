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
  const auto& operands = *reinterpret_cast<const tpc_top_experts*>(words);
  const int64_t count = operands.experts, row = operands.sequence;
  float* shares = scratch.take<float>(count);
  auto* order = scratch.take<int32_t>(count);
  convert(memory.at<T>(operands.logits) + row * count, count, shares);
  for (int64_t expert = 0; expert < count; ++expert) order[expert] = order_of(shares[expert]);
  int32_t* ids = memory.at<int32_t>(operands.ids) + row * operands.chosen;
  float* scores = scratch.take<float>(operands.chosen);
  for (int64_t place = 0; place < operands.chosen; ++place) {
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
    const Lanes powers = by_register(load_some(shares + expert, left) - highest,
                                     [](Register x) { return exponential(x); });
    store_some(shares + expert, powers, left);
    total = total + load_some(shares + expert, left);
  }
  const float all = sum(total);
  float chosen = 0.0f;
  for (int64_t place = 0; place < operands.chosen; ++place) {
    scores[place] = shares[ids[place]] / all;
    chosen += scores[place];
  }
  if (operands.normalized)
    for (int64_t place = 0; place < operands.chosen; ++place) scores[place] /= chosen;
  convert(scores, operands.chosen, memory.at<T>(operands.scores) + row * operands.chosen);
  if (memory.at<int32_t>(operands.lengths)[row] == 0)
    for (int64_t place = 0; place < operands.chosen; ++place) ids[place] = TPC_NONE;
}

// An expert of a rank, and the places of it among the choices of all sequences, in order.
struct Chosen {
  int64_t expert, count;
  const int64_t* places;

  // Return the sequences, or their numbers in runs of `choices` places.
  const int64_t* sequences(int64_t choices, Scratch& scratch) const {
    auto* numbers = scratch.take<int64_t>(count);
    for (int64_t n = 0; n < count; ++n) numbers[n] = places[n] / choices;
    return numbers;
  }
};

// Return the experts of a rank that sequences have chosen, in the order of their numbers, and then
// one with a count of 0. `Words` have choices.
template <class Words>
inline const Chosen* chosen_of(const Memory& memory, const Words& operands, int64_t batch,
                               Scratch& scratch) {
  const int32_t* ids = memory.at<int32_t>(operands.ids);
  const int64_t choices = batch * operands.chosen, held = operands.held;
  const auto expert_of = [&](int64_t place) { return ids[place] - int64_t{operands.first}; };
  auto* ends = scratch.take<int64_t>(held + 1);
  std::fill(ends, ends + held + 1, 0);
  for (int64_t place = 0; place < choices; ++place)
    if (expert_of(place) >= 0 && expert_of(place) < held) ++ends[expert_of(place) + 1];
  auto* experts = scratch.take<Chosen>((choices < held ? choices : held) + 1);
  auto* places = scratch.take<int64_t>(choices);
  Chosen* next = experts;
  for (int64_t expert = 0; expert < held; ++expert) {
    if (const int64_t count = ends[expert + 1]) *next++ = {expert, count, places + ends[expert]};
    ends[expert + 1] += ends[expert];
  }
  *next = {0, 0, places};
  for (int64_t place = 0; place < choices; ++place)
    if (expert_of(place) >= 0 && expert_of(place) < held) places[ends[expert_of(place)]++] = place;
  return experts;
}

// Return some rows side by side.
template <class F, class T>
inline Sequences<F> gathered(const T* values, const int64_t* rows, int64_t count, int64_t width,
                             Scratch& scratch) {
  auto* out = scratch.take<typename F::Value>(count * width);
  for (int64_t n = 0; n < count; ++n) convert(values + rows[n] * width, width, out + n * width);
  return {out, width};
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
  const auto& operands = *reinterpret_cast<const tpc_norm_experts*>(words);
  const int64_t batch = operands.normed_batch, rows = operands.rows.stop - operands.rows.start;
  const int64_t width = operands.normed_width, extent = operands.extent;
  const typename Types::Weight weight(memory, operands.weight);
  const BatchValues<F, typename Types::Weight> x(normed_rows<Types>(memory, operands, scratch),
                                                 batch, width, weight, scratch);
  float* gate = scratch.take<float>(batch * rows);
  float* up = scratch.take<float>(batch * rows);
  const char* const next_weights = scratch.next_weights;
  for (const Chosen* chosen = chosen_of(memory, operands, batch, scratch); chosen->count;
       ++chosen) {
    const int64_t first = 2 * chosen->expert * extent + operands.rows.start;
    const auto values = x.of(chosen->sequences(operands.chosen, scratch), chosen->count, scratch);
    read_next(weight, first + extent, scratch);
    dots(weight.from(first, 0), rows, values, gate, rows, scratch);
    if (chosen[1].count)
      read_next(weight, 2 * chosen[1].expert * extent + operands.rows.start, scratch);
    else
      scratch.next_weights = next_weights, scratch.next_scales = nullptr;
    dots(weight.from(first + extent, 0), rows, values, up, rows, scratch);
    round_all<T>(gate, chosen->count * rows);
    round_all<T>(up, chosen->count * rows);
    for (int64_t n = 0; n < chosen->count; ++n)
      for (int64_t row = 0; row < rows; row += kLanes)
        store_some(
            memory.at<T>(operands.out) + chosen->places[n] * extent + operands.rows.start + row,
            rounded<T>(silu(load_some(gate + n * rows + row, rows - row))) *
                load_some(up + n * rows + row, rows - row),
            rows - row);
  }
}

// Increase sums by values times a factor.
TPC_INLINE void add_scaled(const float* values, int64_t count, float factor, float* sums) {
  for (int64_t place = 0; place < count; place += kLanes)
    store_some(
        sums + place,
        load_some(sums + place, count - place) + load_some(values + place, count - place) * factor,
        count - place);
}

inline float* zeros(int64_t count, Scratch& scratch) {
  float* values = scratch.take<float>(count);
  std::fill(values, values + count, 0.0f);
  return values;
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
      const Sequences<F> sequence{values.first + n * values.stride, values.stride};
      x_ = operand(sequence, 1, width_, leaves_, weight, scratch);
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
inline void add_experts(const Memory& memory, const tpc_expert_terms& operands, Sums sums,
                        Scratch& scratch) {
  using T = typename Types::Value;
  const typename Types::Weight weight(memory, operands.weight);
  float* scores = scratch.take<float>(operands.batch * operands.chosen);
  const char* const next_weights = scratch.next_weights;
  for (const Chosen* chosen = chosen_of(memory, operands, operands.batch, scratch); chosen->count;
       ++chosen) {
    if (chosen[1].count)
      read_next(weight, chosen[1].expert * operands.extent + operands.rows.start, scratch);
    else
      scratch.next_weights = next_weights, scratch.next_scales = nullptr;
    for (int64_t n = 0; n < chosen->count; ++n)
      scores[n] = number(memory.at<T>(operands.scores) + chosen->places[n]);
    const auto values = gathered<typename Types::Product>(memory.at<T>(operands.x), chosen->places,
                                                          chosen->count, operands.width, scratch);
    sums.add(weight.from(chosen->expert * operands.extent + operands.rows.start, 0), values,
             chosen->count, chosen->sequences(operands.chosen, scratch), scores, scratch);
  }
  sums.store(memory.at<float>(operands.out) + operands.rows.start, operands.extent, scratch);
}

// The sums over each leaf are those of all experts, so that they do not depend on the number of
// ranks.
template <class Types>
void expert_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using F = typename Types::Product;
  const auto& operands = *reinterpret_cast<const tpc_expert_terms*>(words);
  const int64_t rows = operands.rows.stop - operands.rows.start;
#if defined(__AVX2__)
  if constexpr (std::is_base_of_v<Grouped, typename Types::Weight>)
    if (BlockSums<F>::fits({memory, operands.weight}, operands.width, operands.leaves))
      return add_experts<Types>(
          memory, operands,
          BlockSums<F>(operands.batch, rows, operands.width, operands.leaves, scratch), scratch);
#endif
  add_experts<Types>(memory, operands,
                     ScaledSums<F>(operands.batch, rows, operands.width, operands.leaves, scratch),
                     scratch);
}

// Results of the shared expert, times the gates of all sequences.
template <class Types>
void shared_terms(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using F = typename Types::Product;
  const auto& operands = *reinterpret_cast<const tpc_shared_terms*>(words);
  const int64_t batch = operands.batch, rows = operands.rows.stop - operands.rows.start;
  const typename Types::Weight weight(memory, operands.weight);
  auto* all = scratch.take<int64_t>(batch);
  float* gates = scratch.take<float>(batch);
  for (int64_t b = 0; b < batch; ++b) {
    all[b] = b;
    gates[b] = rounded<T>(sigmoid(Lanes{} + number(memory.at<T>(operands.gate) + b)))[0];
  }
  ScaledSums<F> sums(batch, rows, operands.width, operands.leaves, scratch);
  sums.add(weight.from(operands.rows.start, 0),
           sequences<F>(memory.at<T>(operands.x), batch, operands.width, scratch), batch, all,
           gates, scratch);
  sums.store(memory.at<float>(operands.out) + operands.slot * batch * int64_t{operands.extent} +
                 operands.rows.start,
             operands.extent, scratch);
}

}  // namespace
