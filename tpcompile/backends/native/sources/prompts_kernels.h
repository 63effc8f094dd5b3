// Operations on many tokens, for every vector path that has them.
//
// A path includes this file after its own vectors (see prompts_avx2.cpp), which define
// - `Packed` and `kColumns`: an operand of products, and the values of a row that it holds;
// - `kPanel`: the tokens that are multiplied together;
// - `multiply`, for `kRows` rows and a multiple of `kSteps` steps, with `Tiles` if it has any;
// - `kStrip`: the rows, several times `kRows`, by which a panel is multiplied before the next one;
// - the functions that lay out its operands: `as_packed`, `hold`, `pack_rows`,
//   `interleave`, `load_transposed`;
// - `rounded`, `put_some`, `power_of_e`, `square_roots`, and the choice of lanes: `Chosen`,
//   `lanes_from`, `chosen`, `larger`, `greatest_of`.
#pragma once

#include "prompts.h"

#include "float8_numbers.h"
#include "kv.h"

namespace {

using tpc::AddNorm;
using tpc::Append;
using tpc::Attention;
using tpc::Gate;
using tpc::GatedNorm;
using tpc::Heads;
using tpc::Linear;
using tpc::Mix;
using tpc::Norm;
using tpc::Products;
using tpc::Rope;
using tpc::Scratch;
using tpc::Swiglu;

TPC_INLINE const bf16* at(const Heads& heads, int64_t token, int64_t head) {
  return reinterpret_cast<const bf16*>(heads.data + token * heads.token_stride +
                                       head * heads.head_stride);
}

// A row of the cache in int8.
TPC_INLINE const scaled8* rounded_at(const Heads& heads, int64_t slot, int64_t head) {
  return reinterpret_cast<const scaled8*>(heads.data) + slot * heads.token_stride +
         head * heads.head_stride;
}

TPC_INLINE bf16* to(uint16_t* out, int64_t place) { return reinterpret_cast<bf16*>(out + place); }

TPC_INLINE const bf16* from(const uint16_t* values) {
  return reinterpret_cast<const bf16*>(values);
}

// Call `f(place, count)` for 16 values at a time.
template <class F>
TPC_INLINE void by_lanes(int64_t width, F f) {
  int64_t place = 0;
  for (; place + kLanes <= width; place += kLanes) f(place, int64_t{kLanes});
  if (place < width) f(place, width - place);
}

template <class T>
TPC_INLINE float sum_of_squares(const T* x, int64_t width) {
  Lanes squares{};
  by_lanes(width, [&](int64_t place, int64_t count) TPC_ALWAYS {
    const Lanes values = load_some(x + place, count);
    squares += values * values;
  });
  return sum(squares);
}

// Return one over the root mean square of each of 16 rows.
TPC_INLINE Lanes inverse_rms(Lanes squares, int64_t width, double eps) {
  const Lanes mean = squares / static_cast<float>(width) + static_cast<float>(eps);
  return 1.0f / square_roots(mean);
}

// Scale, round, and multiply by the weight, or by 1 more without rounding first.
template <class T>
TPC_INLINE void normalize(const T* x, float factor, const bf16* weight, bool zero_centered,
                          bf16* out, int64_t width) {
  by_lanes(width, [&](int64_t place, int64_t count) TPC_ALWAYS {
    const Lanes normed = load_some(x + place, count) * factor;
    const Lanes scale = load_some(weight + place, count);
    put_some(out + place, zero_centered ? normed * (1.0f + scale) : scale * rounded(normed), count);
  });
}

// The roots of 16 rows are computed together, since one takes about as long as all.
void norm(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Norm*>(arguments);
  const int64_t end = last * a.heads;
  for (int64_t begin = first * a.heads; begin < end; begin += kLanes) {
    const int64_t rows = end - begin < kLanes ? end - begin : kLanes;
    const bf16* x[kLanes];
    Lanes squares{};
    for (int64_t row = 0; row < rows; ++row) {
      x[row] = at(a.x, (begin + row) / a.heads, (begin + row) % a.heads);
      squares[row] = sum_of_squares(x[row], a.width);
    }
    const Lanes factors = inverse_rms(squares, a.width, a.eps);
    for (int64_t row = 0; row < rows; ++row)
      normalize(x[row], factors[row], from(a.weight), a.zero_centered,
                to(a.out, (begin + row) * a.width), a.width);
  }
}

template <class T>
TPC_INLINE void add_norm_of(const AddNorm& a, int64_t token, Scratch& scratch) {
  const int64_t begin = token * a.width;
  const auto* residual = static_cast<const T*>(a.residual) + begin;
  float* whole = scratch.take<float>(a.width);
  by_lanes(a.width, [&](int64_t place, int64_t count) TPC_ALWAYS {
    const Lanes total =
        load_some(from(a.x) + begin + place, count) + load_some(residual + place, count);
    put_some(to(a.total, begin + place), total, count);
    // The sum of two values in bf16 is one in bf16.
    store_some(whole + place, sizeof(T) == sizeof(bf16) ? rounded(total) : total, count);
  });
  const float squares = sum_of_squares(whole, a.width);
  const float factor = inverse_rms(all(squares), a.width, a.eps)[0];
  normalize(whole, factor, from(a.weight), a.zero_centered, to(a.normed, begin), a.width);
  scratch.reset();
}

void add_norm(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const AddNorm*>(arguments);
  for (int64_t token = first; token < last; ++token) {
    if (a.residual_in_fp32)
      add_norm_of<float>(a, token, scratch);
    else
      add_norm_of<bf16>(a, token, scratch);
  }
}

TPC_INLINE Lanes silu(Lanes x) { return x / (1.0f + power_of_e(-x)); }

void swiglu(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Swiglu*>(arguments);
  for (int64_t token = first; token < last; ++token) {
    const bf16 *gate = at(a.gate, token, 0), *up = at(a.up, token, 0);
    by_lanes(a.width, [&](int64_t place, int64_t count) TPC_ALWAYS {
      const Lanes x = load_some(gate + place, count);
      put_some(to(a.out, token * a.width + place),
               rounded(silu(x)) * load_some(up + place, count), count);
    });
  }
}

void gate(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Gate*>(arguments);
  for (int64_t row = first * a.heads; row < last * a.heads; ++row) {
    const bf16 *x = at(a.x, row / a.heads, row % a.heads);
    const bf16 *gate = at(a.gate, row / a.heads, row % a.heads);
    by_lanes(a.width, [&](int64_t place, int64_t count) TPC_ALWAYS {
      const Lanes share = rounded(1.0f / (1.0f + power_of_e(-load_some(gate + place, count))));
      put_some(to(a.out, row * a.width + place), load_some(x + place, count) * share, count);
    });
  }
}

void gated_norm(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const GatedNorm*>(arguments);
  for (int64_t row = first * a.heads; row < last * a.heads; ++row) {
    const bf16 *x = at(a.x, row / a.heads, row % a.heads);
    const bf16 *gate = at(a.gate, row / a.heads, row % a.heads);
    const float factor = inverse_rms(all(sum_of_squares(x, a.width)), a.width, a.eps)[0];
    by_lanes(a.width, [&](int64_t place, int64_t count) TPC_ALWAYS {
      const Lanes normal = rounded(load_some(x + place, count) * factor);
      const Lanes normed = rounded(load_some(from(a.weight) + place, count) * normal);
      put_some(to(a.out, row * a.width + place), normed * silu(load_some(gate + place, count)),
               count);
    });
  }
}

void rope(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Rope*>(arguments);
  const int64_t half = a.rotated / 2, unrotated = a.width - a.rotated;
  for (int64_t token = first; token < last; ++token) {
    const bf16 *cos = from(a.cos) + token * a.rotated, *sin = from(a.sin) + token * a.rotated;
    for (int64_t head = 0; head < a.heads; ++head) {
      const bf16* x = at(a.x, token, head);
      bf16* out = to(a.out, (token * a.heads + head) * a.width);
      by_lanes(half, [&](int64_t place, int64_t count) TPC_ALWAYS {
        const Lanes low = load_some(x + place, count), high = load_some(x + half + place, count);
        const auto turn = [&](Lanes values, Lanes partner, int64_t column) TPC_ALWAYS {
          const Lanes scaled = rounded(values * load_some(cos + column, count));
          const Lanes turned = rounded(partner * load_some(sin + column, count));
          put_some(out + column, scaled + turned, count);
        };
        turn(low, -high, place);
        turn(high, low, half + place);
      });
      std::memcpy(out + a.rotated, x + a.rotated, sizeof(bf16) * static_cast<size_t>(unrotated));
    }
  }
}

// Round the head of a token and store it in a slot.
inline void append_rounded(const Heads& heads, const Heads& cached, int64_t token, int64_t slot,
                           int64_t head, int64_t width, Scratch& scratch) {
  float* values = scratch.take<float>(width);
  const bf16* x = at(heads, token, head);
  by_lanes(width, [&](int64_t place, int64_t count) TPC_ALWAYS {
    store_some(values + place, load_some(x + place, count), count);
  });
  store_row(values, width, const_cast<scaled8*>(rounded_at(cached, slot, head)), scratch);
  scratch.reset();
}

void append(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const Append*>(arguments);
  const auto bytes = sizeof(bf16) * static_cast<size_t>(a.width);
  for (int64_t token = first; token < last; ++token)
    for (int64_t head = 0; head < a.heads; ++head) {
      const int64_t slot = a.slots[token];
      if (a.rounds) {
        append_rounded(a.keys, a.cached_keys, token, slot, head, a.width, scratch);
        append_rounded(a.values, a.cached_values, token, slot, head, a.width, scratch);
        continue;
      }
      std::memcpy(const_cast<bf16*>(at(a.cached_keys, slot, head)), at(a.keys, token, head), bytes);
      std::memcpy(const_cast<bf16*>(at(a.cached_values, slot, head)), at(a.values, token, head),
                  bytes);
    }
}

}  // namespace

#include "prompts_delta.h"
#include "prompts_products.h"

#include "prompts_rounded.h"

namespace {

// Do items of several products.
template <tpc::ManyKernel run>
void of_each(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const Products*>(arguments);
  int64_t product = 0;
  while (a.ends[product] <= first) ++product;
  for (; first < last; ++product) {
    const int64_t begin = product ? a.ends[product - 1] : 0;
    const int64_t end = a.ends[product] < last ? a.ends[product] : last;
    run(a.each + product, first - begin, end - begin, scratch);
    scratch.reset();
    first = end;
  }
}

void mix(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Mix*>(arguments);
  for (int64_t token = first; token < last; ++token) {
    const int64_t* places = a.places + token * a.count;
    const float* scores = a.scores + token * a.count;
    by_lanes(a.width, [&](int64_t column, int64_t count) TPC_ALWAYS {
      Lanes total{};
      for (int64_t place = 0; place < a.count; ++place)
        if (places[place] >= 0)
          total +=
              load_some(from(a.rows) + places[place] * a.width + column, count) * scores[place];
      put_some(to(a.out, token * a.width + column), total, count);
    });
  }
}

// Attention, over 64 keys at a time. Scores and sums are fp32, probabilities are rounded to bf16.
// Keys and values in int8 are multiplied as integers, which are exact in bf16: scores are then
// multiplied by the scales of keys, and probabilities by those of values before they are rounded.

constexpr int64_t kKeys = 64, kKeySteps = kKeys / kColumns;

// Keys from `first` to `last` of a sequence; its other keys are not read.
struct Seen {
  const Attention& a;
  const int64_t* table;
  int64_t head, first, last;

  // Return a row, or null. One in int8 is widened to the row `place` of `rows`, and its scale is
  // stored.
  const bf16* row(const Heads& side, int64_t key, bf16* rows, int64_t place, float* scales) const {
    if (key < first || key >= last) return nullptr;
    const int64_t slot = table[key / a.block] * a.block + key % a.block;
    if (!a.rounds) return at(side, slot, head);
    const scaled8* integers = rounded_at(side, slot, head);
    bf16* held = rows + place * a.width;
    for (int64_t column = 0; column < a.width; column += kLanes)
      store(held + column, lanes(load_registers(integers + column)));
    scales[key % kKeys] = scale_of(integers, a.width);
    return held;
  }
};

// Rows in int8 that are widened, and the scales of 64 keys and values. They are null for rows in
// bf16.
struct Widened {
  bf16* rows = nullptr;
  float *keys = nullptr, *values = nullptr;

  Widened(const Attention& a, Scratch& scratch) {
    if (!a.rounds) return;
    rows = scratch.take<bf16>((kLanes > kColumns ? kLanes : kColumns) * a.width);
    keys = scratch.take<float>(kKeys), values = scratch.take<float>(kKeys);
  }

  void clear() const {
    if (rows == nullptr) return;
    std::memset(keys, 0, sizeof(float) * kKeys);
    std::memset(values, 0, sizeof(float) * kKeys);
  }
};

// Lay out keys as `pack_rows` does, 64 apart; those that are not seen are zero.
inline void pack_keys(const Seen& seen, int64_t begin, int64_t count, int64_t width,
                      const Widened& widened, Packed* packed) {
  for (int64_t key = 0; key < count; key += kLanes) {
    const bf16* rows[kLanes];
    for (int64_t row = 0; row < kLanes; ++row)
      rows[row] = seen.row(seen.a.keys, begin + key + row, widened.rows, row, widened.keys);
    pack_rows(rows, width, packed + key, kKeys);
  }
}

// Lay out values as `[keys of a step][column]`; those of keys that are not seen are zero.
inline void pack_values(const Seen& seen, int64_t begin, int64_t steps, int64_t width,
                        const Widened& widened, Packed* packed) {
  for (int64_t step = 0; step < steps; ++step) {
    const bf16* rows[kColumns];
    for (int64_t row = 0; row < kColumns; ++row)
      rows[row] = seen.row(seen.a.values, begin + kColumns * step + row, widened.rows, row,
                           widened.values);
    interleave(rows, width, packed + step * width);
  }
}

// Replace scores by probabilities times exp(most); return the factor for earlier ones.
TPC_INLINE float soften(const float* scores, int64_t first, int64_t last, float scale,
                        const Widened& widened, float& most, float& total, Packed* out) {
  constexpr int kVectors = kKeys / kLanes;
  const Lanes least = all(std::numeric_limits<float>::lowest());
  Lanes values[kVectors], greatest = least;
  Chosen seen[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    seen[v] = lanes_from(first - kLanes * v, last - kLanes * v);
    values[v] = load(scores + kLanes * v);
    if (widened.keys) values[v] = values[v] * load(widened.keys + kLanes * v);
    values[v] = values[v] * scale;
    greatest = larger(greatest, chosen(seen[v], values[v], least));
  }
  const float before = most, now = greatest_of(greatest);
  most = now > before ? now : before;
  Lanes sums{};
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Lanes chances = chosen(seen[v], power_of_e(values[v] - most), Lanes{});
    sums += chances;
    hold(widened.values ? chances * load(widened.values + kLanes * v) : chances,
         out + kLanes / kColumns * v);
  }
  const float factor = power_of_e(all(before - most))[0];
  total = total * factor + sum(sums);
  return factor;
}

// The parts of a sequence's new tokens.
TPC_INLINE int64_t parts_of(const Attention& a, int64_t sequence) {
  return (a.starts[sequence + 1] - a.starts[sequence] + a.part_tokens - 1) / a.part_tokens;
}

void attend(const Attention& a, int64_t part, int64_t run, Scratch& scratch) {
  constexpr decltype(&multiply<1, false>) kScores[] = {multiply<1, false>, multiply<2, false>,
                                                       multiply<3, false>, multiply<4, false>};
  int64_t sequence = 0, offset = part * a.part_tokens;
  for (int64_t parts; (parts = parts_of(a, sequence)) * a.part_tokens <= offset; ++sequence)
    offset -= parts * a.part_tokens;
  const int64_t start = a.starts[sequence], count = a.starts[sequence + 1] - start;
  const int64_t tokens = count - offset < a.part_tokens ? count - offset : a.part_tokens;
  const int64_t position = a.lengths[sequence] - count + offset, last = position + tokens;
  const int64_t oldest = position + 1 - a.window;
  const int64_t first = a.window > 0 && oldest > 0 ? oldest : 0;
  const int64_t kv_head = a.runs[3 * run], head = a.runs[3 * run + 1];
  const int64_t rows = tokens * a.runs[3 * run + 2];
  const int64_t held = (rows + kRows - 1) / kRows * kRows, steps = a.width / kColumns;
  const Seen seen{a, a.tables + sequence * a.table_stride, kv_head, first, last};

  Packed* q = scratch.take<Packed>(held * steps);
  Packed* keys = scratch.take<Packed>(steps * kKeys);
  Packed* values = scratch.take<Packed>(kKeys / kColumns * a.width);
  float* scores = scratch.take<float>(held * kKeys);
  Packed* chances = scratch.take<Packed>(held * kKeySteps);
  float* mixed = scratch.take<float>(held * a.width);
  float *most = scratch.take<float>(rows), *total = scratch.take<float>(rows);
  const Widened widened(a, scratch);
  [[maybe_unused]] const Tiles tiles;
  std::memset(q, 0, sizeof(Packed) * static_cast<size_t>(held * steps));
  std::memset(chances, 0, sizeof(Packed) * static_cast<size_t>(held * kKeySteps));
  std::memset(mixed, 0, sizeof(float) * static_cast<size_t>(held * a.width));
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* query = at(a.q, start + offset + row % tokens, head + row / tokens);
    hold(query, a.width, q + row * steps);
    most[row] = std::numeric_limits<float>::lowest() / 2, total[row] = 0;
  }
  for (int64_t begin = first / kKeys * kKeys; begin < last; begin += kKeys) {
    const int64_t block_keys = last - begin < kKeys ? last - begin : kKeys;
    const int64_t vectors = (block_keys + kLanes - 1) / kLanes;
    const int64_t used = (block_keys + kColumns * kSteps - 1) / (kColumns * kSteps) * kSteps;
    widened.clear();
    pack_keys(seen, begin, vectors * kLanes, a.width, widened, keys);
    pack_values(seen, begin, used, a.width, widened, values);
    for (int64_t row = 0; row < held; row += kRows)
      kScores[vectors - 1](q + row * steps, steps, keys, kKeys, kLanes, steps,
                            scores + row * kKeys, kKeys);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own_key = position + row % tokens - begin;  // the place of its own key
      const int64_t oldest_key = a.window > 0 ? own_key + 1 - a.window : 0;
      const float factor =
          soften(scores + row * kKeys, oldest_key, own_key + 1, static_cast<float>(a.scale),
                 widened, most[row], total[row], chances + row * kKeySteps);
      if (factor == 1.0f) continue;
      float* sums = mixed + row * a.width;
      for (int64_t column = 0; column < a.width; column += kLanes)
        store(sums + column, load(sums + column) * factor);
    }
    for (int64_t row = 0; row < held; row += kRows) {
      const Packed* row_chances = chances + row * kKeySteps;
      float* sums = mixed + row * a.width;
      int64_t column = 0;
      for (; column + 4 * kLanes <= a.width; column += 4 * kLanes)
        multiply<4, true>(row_chances, kKeySteps, values + column, a.width, kLanes, used,
                          sums + column, a.width);
      if (column < a.width)
        multiply<2, true>(row_chances, kKeySteps, values + column, a.width, kLanes, used,
                          sums + column, a.width);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = start + offset + row % tokens;
    bf16* out = to(a.out, (token * a.heads + head + row / tokens) * a.width);
    for (int64_t column = 0; column < a.width; column += kLanes)
      put_some(out + column, load(mixed + row * a.width + column) / total[row], kLanes);
  }
}

void attention(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  const auto& a = *static_cast<const Attention*>(arguments);
  for (int64_t item = first; item < last; ++item) {
    attend(a, item / a.run_count, item % a.run_count, scratch);
    scratch.reset();
  }
}

}  // namespace

// The table of a path, in the order of `Operation` in many.py.
#define TPC_MANY_KERNELS                                                                    \
  norm, add_norm, swiglu, rope, append, attention, pack_panels, linear, pack_rounded,       \
      linear_rounded, gate, gated_norm, convolution, delta_rule, of_each<pack_panels>,      \
      of_each<linear>, of_each<pack_rounded>, of_each<linear_rounded>, mix
