// A step of linear attention: the convolution, the state and the gated results of a key head.
#pragma once

#include "normed.h"

namespace {

// The tails and states of a sequence in a layer: those that it resumes from, and the new ones.
struct Kept {
  int64_t from, to;
  bool is_new;  // there are none to resume from, so they are zero
};

inline Kept kept_of(const Memory& memory, const tpc_delta_step& at) {
  const bool later = memory.at<int32_t>(at.clock)[0] != 0;
  const int32_t to = memory.at<int32_t>(at.write)[at.sequence];
  const int32_t from = later ? to : memory.at<int32_t>(at.read)[at.sequence];
  return {from, to, memory.at<int32_t>(at.lengths)[at.sequence] == 1};
}

// Convolve `count` channels from `first`, apply SiLU, round, and store the channels' new tail. Taps
// are added in their order.
template <class T>
inline void convolve(const Memory& memory, const tpc_delta_step& at, const Kept& kept,
                     int64_t first, int64_t count, float* out) {
  const T* inputs = memory.at<T>(at.projected) + at.sequence * memory.stride(at.projected, 0);
  const T* weight = memory.at<T>(at.weight) + first * at.taps;
  T* tails = memory.at<T>(at.tails) + at.layer * memory.stride(at.tails, 0) + first;
  const int64_t each = memory.stride(at.tails, 1), row = memory.stride(at.tails, 2);
  const T* from = tails + kept.from * each;
  T* to = tails + kept.to * each;
  for (int64_t channel = 0; channel < count; channel += kLanes) {
    const int64_t left = count - channel, lanes = left < kLanes ? left : kLanes;
    Lanes total{};
    for (int64_t tap = 0; tap < at.taps; ++tap) {
      const bool is_last = tap == at.kept;
      Lanes value{}, factor{};
      if (is_last)
        value = load_some(inputs + first + channel, left);
      else if (!kept.is_new)
        value = load_some(from + tap * row + channel, left);
      for (int64_t lane = 0; lane < lanes; ++lane)
        factor[lane] = number(weight + (channel + lane) * at.taps + tap);
      total = total + value * factor;
      if (tap > 0) store_some(to + (tap - 1) * row + channel, value, left);
    }
    if (at.bias != TPC_NONE)
      total = total + load_some(memory.at<T>(at.bias) + first + channel, left);
    store_some(out + channel, rounded<T>(total * sigmoid(total)), left);
  }
}

// Divide a head by its length, and multiply it by a factor.
inline void normalize(float* head, int64_t width, float factor) {
  Lanes total{};
  for (int64_t at = 0; at < width; at += kLanes) {
    const Lanes own = load_some(head + at, width - at);
    total = total + own * own;
  }
  const float root = std::sqrt(sum(total) + 1e-6f);
  for (int64_t at = 0; at < width; at += kLanes)
    store_some(head + at, load_some(head + at, width - at) / root * factor, width - at);
}

// The columns of a state from some column on, in registers. A sum over the rows adds them in order.
template <int kCount>
struct Columns {
  Register each[kCount];

  template <class F>
  TPC_INLINE void add(float factor, const F& load) {
    for (int own = 0; own < kCount; ++own)
      each[own] = multiply_add(each[own], load(own), Register{} + factor);
  }
};

// What a head does to its state: the key, the query, the decay and the share of a token.
struct Token {
  const float *key, *query, *value;
  float decay, share;
  int64_t keys, values;
};

// Update some columns of a state, and compute the same columns of the result.
template <int kCount>
TPC_INLINE void update_columns(const Token& token, const float* from, float* to, int64_t column,
                               float* out) {
  constexpr int kWide = kRegister;
  const auto at = [&](const float* state, int64_t row, int own) TPC_ALWAYS {
    return state + row * token.values + column + own * kWide;
  };
  Columns<kCount> known{}, result{}, delta;
  if (from)
    for (int64_t row = 0; row < token.keys; ++row)
      known.add(token.key[row], [&](int own) TPC_ALWAYS { return load_register(at(from, row, own)); });
  for (int own = 0; own < kCount; ++own) {
    const Register value = load_register(token.value + column + own * kWide);
    delta.each[own] = (value - known.each[own] * token.decay) * token.share;
  }
  for (int64_t row = 0; row < token.keys; ++row) {
    for (int own = 0; own < kCount; ++own) {
      const Register old = from ? load_register(at(from, row, own)) * token.decay : Register{};
      const Register found = multiply_add(old, delta.each[own], Register{} + token.key[row]);
      std::memcpy(to + row * token.values + column + own * kWide, &found, sizeof found);
      result.each[own] = multiply_add(result.each[own], found, Register{} + token.query[row]);
    }
  }
  std::memcpy(out + column, result.each, sizeof result.each);
}

// The same for one column.
inline void update_column(const Token& token, const float* from, float* to, int64_t column,
                          float* out) {
  float known = 0, result = 0;
  for (int64_t row = 0; from && row < token.keys; ++row)
    known += from[row * token.values + column] * token.key[row];
  const float delta = (token.value[column] - known * token.decay) * token.share;
  for (int64_t row = 0; row < token.keys; ++row) {
    const float old = from ? from[row * token.values + column] * token.decay : 0.0f;
    const float found = old + delta * token.key[row];
    to[row * token.values + column] = found;
    result += found * token.query[row];
  }
  out[column] = result;
}

// Update the state of a head, which may be written where it is read, and compute its result.
inline void update(const Token& token, const float* from, float* to, float* out) {
  constexpr int kCount = 8;
  int64_t column = 0;
  for (; column + kCount * kRegister <= token.values; column += kCount * kRegister)
    update_columns<kCount>(token, from, to, column, out);
  for (; column + kRegister <= token.values; column += kRegister)
    update_columns<1>(token, from, to, column, out);
  for (; column < token.values; ++column) update_column(token, from, to, column, out);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

template <class Types>
void delta_step(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  using V = typename Types::Vector;
  const auto& at = *reinterpret_cast<const tpc_delta_step*>(words);
  if (memory.at<int32_t>(at.lengths)[at.sequence] == 0) return;
  const Kept kept = kept_of(memory, at);
  const int64_t first = at.heads.start, heads = at.heads.stop - first, width = at.value;
  float* query = scratch.take<float>(at.key);
  float* key = scratch.take<float>(at.key);
  float* value = scratch.take<float>(heads * width);
  float* mixed = scratch.take<float>(width);
  const int64_t own_key = int64_t{at.k_head} * at.key;
  convolve<T>(memory, at, kept, own_key, at.key, query);
  convolve<T>(memory, at, kept, at.first_k + own_key, at.key, key);
  convolve<T>(memory, at, kept, at.first_v + first * width, heads * width, value);
  normalize(query, at.key, 1 / std::sqrt(static_cast<float>(at.key)));
  normalize(key, at.key, 1);
  const int64_t layer = at.layer * memory.stride(at.states, 0);
  const int64_t each = memory.stride(at.states, 1), state = memory.stride(at.states, 2);
  float* states = memory.at<float>(at.states) + layer;
  const T* z_row = memory.at<T>(at.z) + at.sequence * memory.stride(at.z, 0) + at.first_z;
  const T* gates = memory.at<T>(at.gates) + at.sequence * memory.stride(at.gates, 0);
  T* out = memory.at<T>(at.out) + at.sequence * memory.stride(at.out, 0);
  for (int64_t head = first; head < at.heads.stop; ++head) {
    const float rate = std::exp(number(memory.at<V>(at.rate) + head));
    const float step = softplus(number(gates + at.v_heads + head) +
                                number(memory.at<V>(at.offset) + head));
    const float share = 1 / (1 + std::exp(-number(gates + head)));
    const Token token{key,  query, value + (head - first) * width, std::exp(-rate * step),
                      share, at.key, width};
    float* to = states + kept.to * each + head * state;
    const float* from = kept.is_new ? nullptr : states + kept.from * each + head * state;
    update(token, from, to, mixed);
    round_all<T>(mixed, width);
    rms_norm<T>(mixed, memory.at<V>(at.norm), width, at.eps, false, mixed);
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
