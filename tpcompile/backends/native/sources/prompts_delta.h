// Linear attention of many tokens: the convolution, and the gated delta rule as a recurrence.
//
// A state stays in the first-level cache of a core while all tokens of a sequence pass: an item
// holds 32 of its columns, which no other column depends on.
#pragma once

#include "prompts.h"

namespace {

using tpc::Convolution;
using tpc::DeltaRule;
using tpc::Sequences;

constexpr int64_t kChannels = 256, kStateColumns = 32;
constexpr int64_t kAhead = 4;  // the tokens after which heads that are prefetched are used

// The tokens of a sequence, and its states. A new sequence resumes from no state: `from` is -1.
struct Own {
  int64_t start, count, from, to;

  Own(const Sequences& of, int64_t sequence)
      : start(of.starts[sequence]),
        count(of.starts[sequence + 1] - start),
        from(of.lengths[sequence] > count ? of.read[sequence] : -1),
        to(of.write[sequence]) {}
};

// Convolve channels of a sequence from `first` on, and store their new tail. Taps are added in
// order, each rounded to fp32.
inline void convolve(const Convolution& a, const Own& sequence, int64_t first, Scratch& scratch) {
  const int64_t tail_rows = a.taps - 1;
  const int64_t width = a.channels - first < kChannels ? a.channels - first : kChannels;
  const auto bytes = sizeof(bf16) * static_cast<size_t>(width);
  bf16* tail = scratch.take<bf16>(tail_rows * width);
  float *factors = scratch.take<float>(a.taps * width), *bias = scratch.take<float>(width);
  const auto tail_at = [&](int64_t state, int64_t row) {
    return to(a.tails, state * a.tail_stride + row * a.channels + first);
  };
  for (int64_t row = 0; row < tail_rows; ++row) {
    if (sequence.from < 0)
      std::memset(tail + row * width, 0, bytes);
    else
      std::memcpy(tail + row * width, tail_at(sequence.from, row), bytes);
  }
  for (int64_t channel = 0; channel < width; ++channel) {
    bias[channel] = a.bias ? number(from(a.bias) + first + channel) : 0.0f;
    for (int64_t tap = 0; tap < a.taps; ++tap)
      factors[tap * width + channel] = number(from(a.weight) + (first + channel) * a.taps + tap);
  }
  const auto input = [&](int64_t token) TPC_ALWAYS {
    return token < 0 ? tail + (token + tail_rows) * width
                     : at(a.x, sequence.start + token, 0) + first;
  };
  for (int64_t token = 0; token < sequence.count; ++token) {
    bf16* out = to(a.out, (sequence.start + token) * a.channels + first);
    by_lanes(width, [&](int64_t place, int64_t count) TPC_ALWAYS {
      Lanes total{};
      for (int64_t tap = 0; tap < a.taps; ++tap)
        total = total + load_some(input(token - tail_rows + tap) + place, count) *
                            load_some(factors + tap * width + place, count);
      put_some(out + place, silu(total + load_some(bias + place, count)), count);
    });
  }
  for (int64_t row = 0; row < tail_rows; ++row)
    std::memcpy(tail_at(sequence.to, row), input(sequence.count - tail_rows + row), bytes);
}

void convolution(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const Convolution*>(arguments);
  const int64_t parts = (a.channels + kChannels - 1) / kChannels;
  for (int64_t item = first; item < last; ++item) {
    const Own sequence(a.sequences, item / parts);
    if (sequence.count > 0) convolve(a, sequence, item % parts * kChannels, scratch);
    scratch.reset();
  }
}

// Divide a head by its length, and multiply it by a factor.
TPC_INLINE void to_unit(const bf16* x, float factor, float* out, int64_t width) {
  const float scale = 1 / std::sqrt(sum_of_squares(x, width) + 1e-6f);
  by_lanes(width, [&](int64_t place, int64_t count) TPC_ALWAYS {
    store_some(out + place, load_some(x + place, count) * scale * factor, count);
  });
}

TPC_INLINE void prefetch_head(const bf16* x, int64_t width) {
  for (int64_t place = 0; place < width; place += 32) __builtin_prefetch(x + place);
}

// Apply the rule to some columns of a head of a sequence. One pass over the state updates it for a
// token, computes the result, and what the state returns for the key of the next token.
template <int kCount>
void apply_rule(const DeltaRule& a, const Own& sequence, int64_t head, int64_t column,
                Scratch& scratch) {
  constexpr int64_t kWide = kCount * kRegister;
  const int64_t k_head = a.k_heads[head], offset = head * a.key_width * a.width + column;
  const auto bytes = sizeof(float) * static_cast<size_t>(kWide);
  const float root = 1 / std::sqrt(static_cast<float>(a.key_width));
  float* state = scratch.take<float>(a.key_width * kWide);
  float *query = scratch.take<float>(a.key_width), *key = scratch.take<float>(a.key_width);
  float* next = scratch.take<float>(a.key_width);
  float* result = scratch.take<float>(kWide > kLanes ? kWide : kLanes);
  for (int64_t row = 0; row < a.key_width; ++row) {
    if (sequence.from < 0)
      std::memset(state + row * kWide, 0, bytes);
    else
      std::memcpy(state + row * kWide,
                  a.states + sequence.from * a.state_stride + offset + row * a.width, bytes);
  }
  Register known[kCount] = {}, delta[kCount], sums[kCount];
  to_unit(at(a.k, sequence.start, k_head), 1, next, a.key_width);
  for (int64_t row = 0; row < a.key_width; ++row)
    for (int part = 0; part < kCount; ++part)
      known[part] = multiply_add(known[part], load_register(state + row * kWide + part * kRegister),
                                 Register{} + next[row]);
  for (int64_t token = sequence.start; token < sequence.start + sequence.count; ++token) {
    const float decay = a.decay[token * a.heads + head], share = a.share[token * a.heads + head];
    for (int part = 0; part < kCount; ++part) {
      const Register value = load_register(at(a.v, token, head) + column + part * kRegister);
      delta[part] = (value - known[part] * decay) * share;
      known[part] = sums[part] = Register{};
    }
    std::swap(key, next);
    to_unit(at(a.q, token, k_head), root, query, a.key_width);
    if (token + 1 < sequence.start + sequence.count)
      to_unit(at(a.k, token + 1, k_head), 1, next, a.key_width);
    if (token + kAhead < sequence.start + sequence.count) {
      prefetch_head(at(a.q, token + kAhead, k_head), a.key_width);
      prefetch_head(at(a.k, token + kAhead, k_head), a.key_width);
      prefetch_head(at(a.v, token + kAhead, head) + column, kWide);
    }
    for (int64_t row = 0; row < a.key_width; ++row) {
      const Register own_key = Register{} + key[row], own_query = Register{} + query[row];
      const Register next_key = Register{} + next[row];
#pragma GCC unroll 2
      for (int part = 0; part < kCount; ++part) {
        float* held = state + row * kWide + part * kRegister;
        const Register updated = multiply_add(load_register(held) * decay, delta[part], own_key);
        std::memcpy(held, &updated, sizeof updated);
        sums[part] = multiply_add(sums[part], updated, own_query);
        known[part] = multiply_add(known[part], updated, next_key);
      }
    }
    std::memcpy(result, sums, sizeof sums);
    bf16* out = to(a.out, (token * a.heads + head) * a.width + column);
    by_lanes(kWide, [&](int64_t place, int64_t count) TPC_ALWAYS {
      put_some(out + place, load_some(result + place, count), count);
    });
  }
  for (int64_t row = 0; row < a.key_width; ++row)
    std::memcpy(a.states + sequence.to * a.state_stride + offset + row * a.width,
                state + row * kWide, bytes);
}

void delta_rule(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  constexpr int kBoth = 2, kSome = kLanes / kRegister;  // the columns are a multiple of 16
  const auto& a = *static_cast<const DeltaRule*>(arguments);
  const int64_t parts = (a.width + kStateColumns - 1) / kStateColumns;
  for (int64_t item = first; item < last; ++item) {
    const Own sequence(a.sequences, item / parts / a.heads);
    const int64_t head = item / parts % a.heads, begin = item % parts * kStateColumns;
    const int64_t end = begin + kStateColumns < a.width ? begin + kStateColumns : a.width;
    for (int64_t column = begin; sequence.count > 0 && column < end;) {
      const bool wide = column + kBoth * kRegister <= end;
      if (wide)
        apply_rule<kBoth>(a, sequence, head, column, scratch);
      else
        apply_rule<kSome>(a, sequence, head, column, scratch);
      column += wide ? kBoth * kRegister : kLanes;
      scratch.reset();
    }
  }
}

}  // namespace
