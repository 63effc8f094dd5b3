// Operations on many tokens, with AVX-512 and its dot products of bf16.
#include "prompts.h"

#include "numbers.h"
#include "transpose.h"

#define TPC_ALWAYS __attribute__((always_inline))

namespace {

using tpc::AddNorm;
using tpc::Append;
using tpc::Attention;
using tpc::Heads;
using tpc::Linear;
using tpc::Norm;
using tpc::Rope;
using tpc::Scratch;
using tpc::Swiglu;

TPC_INLINE const bf16* at(const Heads& from, int64_t token, int64_t head) {
  return reinterpret_cast<const bf16*>(from.data + token * from.token_stride +
                                       head * from.head_stride);
}

TPC_INLINE bf16* to(uint16_t* out, int64_t place) { return reinterpret_cast<bf16*>(out + place); }

TPC_INLINE const bf16* from(const uint16_t* values) {
  return reinterpret_cast<const bf16*>(values);
}

// Round to the nearest bf16, by the CPU's conversion; values below the normal ones become 0.
TPC_INLINE __m256i narrow(Lanes values) { return (__m256i)_mm512_cvtneps_pbh((__m512)values); }

TPC_INLINE Lanes rounded(Lanes values) {
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(values)), 16);
}

// exp(x) within 2 units in the last place, for all x, in half the instructions of `exponential`.
TPC_INLINE Lanes power_of_e(Lanes x) {
  // The second operand is the result if one is NaN.
  const __m512 within = _mm512_min_ps(all(89.0f), _mm512_max_ps(all(-104.0f), (__m512)x));
  const __m512 whole = _mm512_roundscale_ps(within * 1.44269504f, _MM_FROUND_TO_NEAREST_INT);
  const __m512 rest = (within - whole * 0.693359375f) + whole * 2.12194440e-4f;
  __m512 poly = all(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f})
    poly = poly * rest + factor;
  return (Lanes)_mm512_scalef_ps(poly * (rest * rest) + rest + 1.0f, whole);
}

TPC_INLINE void put_some(bf16* to, Lanes values, int64_t count) {
  const __m256i found = narrow(values);
  std::memcpy(to, &found, sizeof(bf16) * static_cast<size_t>(count < kLanes ? count : kLanes));
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
    const Lanes own = load_some(x + place, count);
    squares += own * own;
  });
  return sum(squares);
}

// Return one over the root mean square of each of 16 rows.
TPC_INLINE Lanes inverse_rms(Lanes squares, int64_t width, double eps) {
  const Lanes mean = squares / static_cast<float>(width) + static_cast<float>(eps);
  return 1.0f / (Lanes)_mm512_sqrt_ps((__m512)mean);
}

// Scale, round, and multiply by the weight.
template <class T>
TPC_INLINE void normalize(const T* x, float factor, const bf16* weight, bf16* out, int64_t width) {
  by_lanes(width, [&](int64_t place, int64_t count) TPC_ALWAYS {
    const Lanes own = rounded(load_some(x + place, count) * factor);
    put_some(out + place, load_some(weight + place, count) * own, count);
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
      normalize(x[row], factors[row], from(a.weight), to(a.out, (begin + row) * a.width), a.width);
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
  normalize(whole, factor, from(a.weight), to(a.normed, begin), a.width);
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

void swiglu(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Swiglu*>(arguments);
  for (int64_t token = first; token < last; ++token) {
    const bf16 *gate = at(a.gate, token, 0), *up = at(a.up, token, 0);
    by_lanes(a.width, [&](int64_t place, int64_t count) TPC_ALWAYS {
      const Lanes x = load_some(gate + place, count);
      const Lanes silu = rounded(x / (1.0f + power_of_e(-x)));
      put_some(to(a.out, token * a.width + place), silu * load_some(up + place, count), count);
    });
  }
}

void rope(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Rope*>(arguments);
  const int64_t half = a.width / 2;
  for (int64_t token = first; token < last; ++token) {
    const bf16 *cos = from(a.cos) + token * a.width, *sin = from(a.sin) + token * a.width;
    for (int64_t head = 0; head < a.heads; ++head) {
      const bf16* x = at(a.x, token, head);
      bf16* out = to(a.out, (token * a.heads + head) * a.width);
      by_lanes(half, [&](int64_t place, int64_t count) TPC_ALWAYS {
        const Lanes one = load_some(x + place, count), two = load_some(x + half + place, count);
        const auto turn = [&](Lanes own, Lanes other, int64_t at) TPC_ALWAYS {
          const Lanes kept = rounded(own * load_some(cos + at, count));
          const Lanes turned = rounded(other * load_some(sin + at, count));
          put_some(out + at, kept + turned, count);
        };
        turn(one, -two, place);
        turn(two, one, half + place);
      });
    }
  }
}

void append(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Append*>(arguments);
  const auto bytes = sizeof(bf16) * static_cast<size_t>(a.width);
  for (int64_t token = first; token < last; ++token)
    for (int64_t head = 0; head < a.heads; ++head) {
      const int64_t slot = a.slots[token];
      std::memcpy(const_cast<bf16*>(at(a.cached_keys, slot, head)), at(a.keys, token, head), bytes);
      std::memcpy(const_cast<bf16*>(at(a.cached_values, slot, head)), at(a.values, token, head),
                  bytes);
    }
}

// Products, in fp32. Each is a sum over pairs of columns in order, so its bits depend on nothing but
// its operands.

constexpr int64_t kPanel = 64, kRows = 6;

// Two adjacent values in bf16.
using Pair = uint32_t;

// Set or increase `out` by products of 6 rows of `a` with 16·kVectors columns of `b`.
template <int kVectors, bool kAdd>
TPC_INLINE void multiply(const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride,
                         int64_t pairs, float* out, int64_t out_stride) {
  __m512 sums[kRows][kVectors];
#pragma GCC unroll 6
  for (int64_t row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sums[row][v] =
          kAdd ? _mm512_loadu_ps(out + row * out_stride + kLanes * v) : _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512bh columns[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      columns[v] = (__m512bh)_mm512_loadu_si512(b + pair * b_stride + kLanes * v);
#pragma GCC unroll 6
    for (int64_t row = 0; row < kRows; ++row) {
      const auto own =
          (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(a[row * a_stride + pair]));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        sums[row][v] = _mm512_dpbf16_ps(sums[row][v], own, columns[v]);
    }
  }
#pragma GCC unroll 6
  for (int64_t row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      _mm512_storeu_ps(out + row * out_stride + kLanes * v, sums[row][v]);
}

// Lay out 16 rows as `[pair of columns][row]`, with `stride` between pairs; null stands for zeros.
TPC_INLINE void pack_rows(const bf16* const* rows, int64_t columns, Pair* packed, int64_t stride) {
  for (int64_t column = 0; column < columns; column += 2 * kLanes) {
    Lanes block[kLanes];
#pragma GCC unroll 16
    for (int64_t own = 0; own < kLanes; ++own)
      block[own] = rows[own] ? load_bytes<Lanes>(rows[own] + column) : Lanes{};
    transpose(block);
#pragma GCC unroll 16
    for (int64_t own = 0; own < kLanes; ++own)
      std::memcpy(packed + (column / 2 + own) * stride, block + own, sizeof(Lanes));
  }
}

// The tokens of a panel, in whole vectors.
TPC_INLINE int64_t panel_width(int64_t left) {
  return left < kPanel ? (left + kLanes - 1) / kLanes * kLanes : kPanel;
}

void pack_panels(const void* arguments, int64_t first, int64_t last, Scratch&) {
  const auto& a = *static_cast<const Linear*>(arguments);
  for (int64_t begin = first * kPanel; begin < last * kPanel && begin < a.tokens; begin += kPanel) {
    const int64_t width = panel_width(a.tokens - begin);
    for (int64_t token = 0; token < width; token += kLanes) {
      const bf16* rows[kLanes];
      for (int64_t own = 0; own < kLanes; ++own) {
        const int64_t place = begin + token + own;
        rows[own] = place < a.tokens ? at(a.x, place, 0) : nullptr;
      }
      pack_rows(rows, a.columns, a.packed + begin * (a.columns / 2) + token, width);
    }
  }
}

// Multiply some rows of a weight with a panel: `out[row][token]`, 64 tokens apart.
template <int kVectors>
void multiply_panel(const Pair* weight, int64_t rows, const Pair* panel, int64_t pairs,
                    float* out) {
  for (int64_t row = 0; row < rows; row += kRows)
    multiply<kVectors, false>(weight + row * pairs, pairs, panel, kLanes * kVectors, pairs,
                              out + row * kPanel, kPanel);
}

void linear(const void* arguments, int64_t first, int64_t last, Scratch& scratch) {
  constexpr void (*kWidths[])(const Pair*, int64_t, const Pair*, int64_t, float*) = {
      multiply_panel<1>, multiply_panel<2>, multiply_panel<3>, multiply_panel<4>};
  constexpr int64_t kBlock = 48;
  const auto& a = *static_cast<const Linear*>(arguments);
  const int64_t pairs = a.columns / 2, parts = (a.tokens + a.part_tokens - 1) / a.part_tokens;
  float* sums = scratch.take<float>(kBlock * kPanel);
  Pair* rest = nullptr;
  for (int64_t item = first; item < last; ++item) {
    const int64_t row = item / parts * kBlock, token = item % parts * a.part_tokens;
    const int64_t end = a.tokens - token < a.part_tokens ? a.tokens : token + a.part_tokens;
    const int64_t rows = a.rows - row < kBlock ? a.rows - row : kBlock;
    const Pair* weight = reinterpret_cast<const Pair*>(a.weight) + row * pairs;
    if (rows % kRows) {  // the last rows, followed by zeros
      if (!rest) rest = scratch.take<Pair>(kBlock * pairs);
      std::memset(rest, 0, sizeof(Pair) * static_cast<size_t>(kBlock * pairs));
      std::memcpy(rest, weight, sizeof(Pair) * static_cast<size_t>(rows * pairs));
      weight = rest;
    }
    for (int64_t begin = token; begin < end; begin += kPanel) {
      const int64_t width = panel_width(end - begin);
      kWidths[width / kLanes - 1](weight, rows, a.packed + begin * pairs, pairs, sums);
      for (int64_t lane = 0; lane < width; lane += kLanes) {
        const int64_t left = end - begin - lane;
        for (int64_t own = 0; own < rows; own += kLanes) {
          const int64_t count = rows - own < kLanes ? rows - own : kLanes;
          const Lanes bias = a.bias ? load_some(from(a.bias) + row + own, count) : Lanes{};
          Lanes block[kLanes];
#pragma GCC unroll 16
          for (int64_t line = 0; line < kLanes; ++line)
            block[line] = load(sums + (own + line) * kPanel + lane);
          transpose(block);
          for (int64_t line = 0; line < kLanes && line < left; ++line)
            put_some(to(a.out, (begin + lane + line) * a.rows + row + own), block[line] + bias,
                     count);
        }
      }
    }
  }
}

// Attention, over 64 keys at a time. Scores and sums are fp32, probabilities are rounded to bf16.

constexpr int64_t kKeys = 64;

// Keys from `first` to `last` of a sequence; its other keys are not read.
struct Seen {
  const Attention& a;
  const int64_t* table;
  int64_t head, first, last;

  const bf16* row(const Heads& side, int64_t key) const {
    if (key < first || key >= last) return nullptr;
    return at(side, table[key / a.block] * a.block + key % a.block, head);
  }
};

// Lay out keys as `[pair of columns][key]`, 64 apart; those that are not seen are zero.
inline void pack_keys(const Seen& seen, int64_t begin, int64_t count, int64_t width, Pair* packed) {
  for (int64_t key = 0; key < count; key += kLanes) {
    const bf16* rows[kLanes];
    for (int64_t own = 0; own < kLanes; ++own)
      rows[own] = seen.row(seen.a.keys, begin + key + own);
    pack_rows(rows, width, packed + key, kKeys);
  }
}

// Lay out values as `[pair of keys][column]`; those of keys that are not seen are zero.
inline void pack_values(const Seen& seen, int64_t begin, int64_t pairs, int64_t width,
                        Pair* packed) {
  alignas(64) uint16_t low[2 * kLanes], high[2 * kLanes];
  for (int own = 0; own < 2 * kLanes; ++own) {
    low[own] = static_cast<uint16_t>(own / 2 + (own % 2) * 2 * kLanes);
    high[own] = static_cast<uint16_t>(low[own] + kLanes);
  }
  const __m512i first = _mm512_load_si512(low), second = _mm512_load_si512(high);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const bf16* even = seen.row(seen.a.values, begin + 2 * pair);
    const bf16* odd = seen.row(seen.a.values, begin + 2 * pair + 1);
    for (int64_t column = 0; column < width; column += 2 * kLanes) {
      const __m512i none = _mm512_setzero_si512();
      const __m512i a = even ? _mm512_loadu_si512(even + column) : none;
      const __m512i b = odd ? _mm512_loadu_si512(odd + column) : none;
      Pair* found = packed + pair * width + column;
      _mm512_storeu_si512(found, _mm512_permutex2var_epi16(a, first, b));
      _mm512_storeu_si512(found + kLanes, _mm512_permutex2var_epi16(a, second, b));
    }
  }
}

// The lanes from `first` to `last` of 16.
TPC_INLINE __mmask16 lanes_from(int64_t first, int64_t last) {
  const auto below = [](int64_t lane) {
    const int64_t held = lane < 0 ? 0 : (lane > kLanes ? kLanes : lane);
    return (1u << held) - 1u;
  };
  return static_cast<__mmask16>(below(last) & ~below(first));
}

// Replace scores by probabilities times exp(most); return the factor for earlier ones.
TPC_INLINE float soften(const float* scores, int64_t first, int64_t last, float scale, float& most,
                        float& total, bf16* out) {
  constexpr int kVectors = kKeys / kLanes;
  const __m512 least = _mm512_set1_ps(std::numeric_limits<float>::lowest());
  __m512 own[kVectors], largest = least;
  __mmask16 seen[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    seen[v] = lanes_from(first - kLanes * v, last - kLanes * v);
    own[v] = _mm512_mul_ps(_mm512_loadu_ps(scores + kLanes * v), _mm512_set1_ps(scale));
    largest = _mm512_max_ps(largest, _mm512_mask_blend_ps(seen[v], least, own[v]));
  }
  const float before = most, now = _mm512_reduce_max_ps(largest);
  most = now > before ? now : before;
  Lanes sums{};
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Lanes found = power_of_e((Lanes)own[v] - most);
    const __m512 kept = _mm512_maskz_mov_ps(seen[v], (__m512)found);
    sums += (Lanes)kept;
    put_some(out + kLanes * v, (Lanes)kept, kLanes);
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
  const int64_t held = (rows + kRows - 1) / kRows * kRows, pairs = a.width / 2;
  const Seen seen{a, a.tables + sequence * a.table_stride, kv_head, first, last};

  Pair* q = scratch.take<Pair>(held * pairs);
  Pair* keys = scratch.take<Pair>(pairs * kKeys);
  Pair* values = scratch.take<Pair>(kKeys / 2 * a.width);
  float* scores = scratch.take<float>(held * kKeys);
  Pair* chances = scratch.take<Pair>(held * kKeys / 2);
  float* mixed = scratch.take<float>(held * a.width);
  float *most = scratch.take<float>(rows), *total = scratch.take<float>(rows);
  std::memset(q, 0, sizeof(Pair) * static_cast<size_t>(held * pairs));
  std::memset(chances, 0, sizeof(Pair) * static_cast<size_t>(held * kKeys / 2));
  std::memset(mixed, 0, sizeof(float) * static_cast<size_t>(held * a.width));
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* own = at(a.q, start + offset + row % tokens, head + row / tokens);
    std::memcpy(q + row * pairs, own, sizeof(bf16) * static_cast<size_t>(a.width));
    most[row] = std::numeric_limits<float>::lowest() / 2, total[row] = 0;
  }
  for (int64_t begin = first / kKeys * kKeys; begin < last; begin += kKeys) {
    const int64_t here = last - begin < kKeys ? last - begin : kKeys;
    const int64_t vectors = (here + kLanes - 1) / kLanes;
    pack_keys(seen, begin, vectors * kLanes, a.width, keys);
    pack_values(seen, begin, (here + 1) / 2, a.width, values);
    for (int64_t row = 0; row < held; row += kRows)
      kScores[vectors - 1](q + row * pairs, pairs, keys, kKeys, pairs, scores + row * kKeys, kKeys);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t own = position + row % tokens - begin;  // the place of its own key
      const int64_t from = a.window > 0 ? own + 1 - a.window : 0;
      const float factor =
          soften(scores + row * kKeys, from, own + 1, static_cast<float>(a.scale), most[row],
                 total[row], reinterpret_cast<bf16*>(chances + row * kKeys / 2));
      if (factor == 1.0f) continue;
      float* sums = mixed + row * a.width;
      for (int64_t column = 0; column < a.width; column += kLanes)
        store(sums + column, load(sums + column) * factor);
    }
    for (int64_t row = 0; row < held; row += kRows) {
      const Pair* own = chances + row * kKeys / 2;
      float* sums = mixed + row * a.width;
      int64_t column = 0;
      for (; column + 4 * kLanes <= a.width; column += 4 * kLanes)
        multiply<4, true>(own, kKeys / 2, values + column, a.width, (here + 1) / 2, sums + column,
                          a.width);
      if (column < a.width)
        multiply<2, true>(own, kKeys / 2, values + column, a.width, (here + 1) / 2, sums + column,
                          a.width);
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

namespace tpc {

const ManyKernel many_kernels[] = {norm,   add_norm,  swiglu,      rope,
                                   append, attention, pack_panels, linear};

}  // namespace tpc
