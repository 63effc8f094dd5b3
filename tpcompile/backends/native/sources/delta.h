// A step of linear attention: the convolution, the state and the gated results of a key head.
#pragma once

#include "normed.h"

namespace {

// The tails and states of a sequence in a layer: those that it resumes from, and the new ones.
struct Kept {
  int64_t from, to;
  bool is_new;  // there are none to resume from, so they are zero
};

inline Kept kept_of(const Memory& memory, const tpc_delta_step& operands) {
  const bool later = memory.at<int32_t>(operands.clock)[0] != 0;
  const int32_t target = memory.at<int32_t>(operands.write)[operands.sequence];
  const int32_t source = later ? target : memory.at<int32_t>(operands.read)[operands.sequence];
  return {source, target, memory.at<int32_t>(operands.lengths)[operands.sequence] == 1};
}

// Convolve `count` channels from `first`, apply SiLU, round, and store the channels' new tail. Taps
// are added in their order.
template <class T>
inline void convolve(const Memory& memory, const tpc_delta_step& operands, const Kept& slots,
                     int64_t first, int64_t count, float* out) {
  const T* inputs =
      memory.at<T>(operands.projected) + operands.sequence * memory.stride(operands.projected, 0);
  const T* weight = memory.at<T>(operands.weight) + first * operands.taps;
  T* tails =
      memory.at<T>(operands.tails) + operands.layer * memory.stride(operands.tails, 0) + first;
  const int64_t stride = memory.stride(operands.tails, 1), row = memory.stride(operands.tails, 2);
  const T* old_tail = tails + slots.from * stride;
  T* new_tail = tails + slots.to * stride;
  for (int64_t channel = 0; channel < count; channel += kLanes) {
    const int64_t left = count - channel, lanes = left < kLanes ? left : kLanes;
    Lanes total{};
    for (int64_t tap = 0; tap < operands.taps; ++tap) {
      const bool is_last = tap == operands.kept;
      Lanes value{}, factor{};
      if (is_last)
        value = load_some(inputs + first + channel, left);
      else if (!slots.is_new)
        value = load_some(old_tail + tap * row + channel, left);
      for (int64_t lane = 0; lane < lanes; ++lane)
        factor[lane] = number(weight + (channel + lane) * operands.taps + tap);
      total = total + value * factor;
      if (tap > 0) store_some(new_tail + (tap - 1) * row + channel, value, left);
    }
    if (operands.bias != TPC_NONE)
      total = total + load_some(memory.at<T>(operands.bias) + first + channel, left);
    store_some(out + channel, rounded<T>(total * sigmoid(total)), left);
  }
}

// Divide a head by its length, and multiply it by a factor.
inline void normalize(float* head, int64_t width, float factor) {
  Lanes total{};
  for (int64_t column = 0; column < width; column += kLanes) {
    const Lanes values = load_some(head + column, width - column);
    total = total + values * values;
  }
  const float root = std::sqrt(sum(total) + 1e-6f);
  for (int64_t column = 0; column < width; column += kLanes)
    store_some(head + column, load_some(head + column, width - column) / root * factor,
               width - column);
}

// The columns of a state from some column on, in registers. A sum over the rows adds them in order.
template <int kCount>
struct Columns {
  Register each[kCount];

  template <class F>
  TPC_INLINE void add(float factor, const F& load) {
    for (int part = 0; part < kCount; ++part)
      each[part] = multiply_add(each[part], load(part), Register{} + factor);
  }
};

// The operands of a state update: a token's key, query, value, decay and share.
struct Token {
  const float *key, *query, *value;
  float decay, share;
  int64_t keys, values;
};

// Update some columns of a state, and compute the same columns of the result.
template <int kCount>
TPC_INLINE void update_columns(const Token& token, const float* old_state, float* new_state,
                               int64_t column, float* out) {
  constexpr int kWide = kRegister;
  const auto address = [&](const float* state, int64_t row, int part) TPC_ALWAYS {
    return state + row * token.values + column + part * kWide;
  };
  Columns<kCount> known{}, result{}, delta;
  if (old_state)
    for (int64_t row = 0; row < token.keys; ++row)
      known.add(token.key[row], [&](int part) TPC_ALWAYS {
        return load_register(address(old_state, row, part));
      });
  for (int part = 0; part < kCount; ++part) {
    const Register value = load_register(token.value + column + part * kWide);
    delta.each[part] = (value - known.each[part] * token.decay) * token.share;
  }
  for (int64_t row = 0; row < token.keys; ++row) {
    for (int part = 0; part < kCount; ++part) {
      const Register old =
          old_state ? load_register(address(old_state, row, part)) * token.decay : Register{};
      const Register updated = multiply_add(old, delta.each[part], Register{} + token.key[row]);
      std::memcpy(new_state + row * token.values + column + part * kWide, &updated, sizeof updated);
      result.each[part] = multiply_add(result.each[part], updated, Register{} + token.query[row]);
    }
  }
  std::memcpy(out + column, result.each, sizeof result.each);
}

// The same for one column.
inline void update_column(const Token& token, const float* old_state, float* new_state,
                          int64_t column, float* out) {
  float known = 0, result = 0;
  for (int64_t row = 0; old_state && row < token.keys; ++row)
    known += old_state[row * token.values + column] * token.key[row];
  const float delta = (token.value[column] - known * token.decay) * token.share;
  for (int64_t row = 0; row < token.keys; ++row) {
    const float old = old_state ? old_state[row * token.values + column] * token.decay : 0.0f;
    const float updated = old + delta * token.key[row];
    new_state[row * token.values + column] = updated;
    result += updated * token.query[row];
  }
  out[column] = result;
}

// Update the state of a head, which may be written where it is read, and compute its result.
inline void update(const Token& token, const float* old_state, float* new_state, float* out) {
  constexpr int kCount = 8;
  int64_t column = 0;
  for (; column + kCount * kRegister <= token.values; column += kCount * kRegister)
    update_columns<kCount>(token, old_state, new_state, column, out);
  for (; column + kRegister <= token.values; column += kRegister)
    update_columns<1>(token, old_state, new_state, column, out);
  for (; column < token.values; ++column) update_column(token, old_state, new_state, column, out);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

template <class Types>
void delta_step(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using V = typename Types::Vector;
  const auto& operands = *reinterpret_cast<const tpc_delta_step*>(words);
  if (memory.at<int32_t>(operands.lengths)[operands.sequence] == 0) return;
  const Kept slots = kept_of(memory, operands);
  const int64_t first = operands.heads.start, heads = operands.heads.stop - first;
  const int64_t width = operands.value;
  float* query = scratch.take<float>(operands.key);
  float* key = scratch.take<float>(operands.key);
  float* value = scratch.take<float>(heads * width);
  float* mixed = scratch.take<float>(width);
  const int64_t own_key = int64_t{operands.k_head} * operands.key;
  convolve<T>(memory, operands, slots, own_key, operands.key, query);
  convolve<T>(memory, operands, slots, operands.first_k + own_key, operands.key, key);
  convolve<T>(memory, operands, slots, operands.first_v + first * width, heads * width, value);
  normalize(query, operands.key, 1 / std::sqrt(static_cast<float>(operands.key)));
  normalize(key, operands.key, 1);
  const int64_t layer = operands.layer * memory.stride(operands.states, 0);
  const int64_t stride = memory.stride(operands.states, 1);
  const int64_t state = memory.stride(operands.states, 2);
  float* states = memory.at<float>(operands.states) + layer;
  const T* z_row = memory.at<T>(operands.z) + operands.sequence * memory.stride(operands.z, 0) +
                   operands.first_z;
  const T* gates =
      memory.at<T>(operands.gates) + operands.sequence * memory.stride(operands.gates, 0);
  T* out = memory.at<T>(operands.out) + operands.sequence * memory.stride(operands.out, 0);
  for (int64_t head = first; head < operands.heads.stop; ++head) {
    const float rate = std::exp(number(memory.at<V>(operands.rate) + head));
    const float step = softplus(number(gates + operands.v_heads + head) +
                                number(memory.at<V>(operands.offset) + head));
    const float share = 1 / (1 + std::exp(-number(gates + head)));
    const Token token{key,  query, value + (head - first) * width, std::exp(-rate * step),
                      share, operands.key, width};
    float* new_state = states + slots.to * stride + head * state;
    const float* old_state = slots.is_new ? nullptr : states + slots.from * stride + head * state;
    update(token, old_state, new_state, mixed);
    round_all<T>(mixed, width);
    rms_norm<T>(mixed, memory.at<V>(operands.norm), width, operands.eps, false, mixed);
    const T* gate = z_row + head * width;
    for (int64_t column = 0; column < width; column += kLanes) {
      const int64_t left = width - column;
      const Lanes z = load_some(gate + column, left);
      store_some(out + head * width + column,
                 load_some(mixed + column, left) * (z * sigmoid(z)), left);
    }
  }
}

}  // namespace
