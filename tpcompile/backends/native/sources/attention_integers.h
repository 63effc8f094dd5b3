// Attention of 16-bit queries to a KV cache in int8, in integers.
//
// The queries of a head, and the weights of a chunk of tokens, are rounded to 16-bit integers with
// a common scale. Their error is at most 2^-16 of the largest one, which is small beside that of
// values in 16 bits. Sums of products of integers are exact. Chunks are added in order, in fp32.
#pragma once

#include "spans.h"

namespace {

constexpr float kShortSteps = 32767.0f;
constexpr int64_t kShorts = 2 * kRegister;  // the columns of a register
constexpr int64_t kChunkTokens = 64;
constexpr int64_t kChunkPairs = kChunkTokens / 2;

// Whether attention of values of type T to a cache of type C uses integers.
template <class T, class C>
constexpr bool kInIntegers = kIsScaled<C> && sizeof(T) == 2;

TPC_INLINE int64_t whole_shorts(int64_t width) { return (width + kShorts - 1) / kShorts * kShorts; }

TPC_INLINE ShortRegister widen(const scaled8* integers) {
#if defined(__AVX512F__)
  return (ShortRegister)_mm512_cvtepi8_epi16(load_bytes<__m256i>(integers));
#elif defined(__AVX2__)
  return (ShortRegister)_mm256_cvtepi8_epi16(load_bytes<__m128i>(integers));
#else
  ShortRegister wide;
  for (int lane = 0; lane < kShorts; ++lane) wide[lane] = integers[lane].value;
  return wide;
#endif
}

// Load up to a register of integers; the others are 0.
TPC_INLINE ShortRegister widen_some(const scaled8* integers, int64_t count) {
  if (count >= kShorts) return widen(integers);
  scaled8 held[kShorts] = {};
  std::memcpy(held, integers, static_cast<size_t>(count));
  return widen(held);
}

// Interleave the first, or the second, four columns of each eight of two rows.
TPC_INLINE ShortRegister first_pairs(ShortRegister a, ShortRegister b) {
#if defined(__AVX512F__)
  return (ShortRegister)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (ShortRegister)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
#else
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}

TPC_INLINE ShortRegister second_pairs(ShortRegister a, ShortRegister b) {
#if defined(__AVX512F__)
  return (ShortRegister)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (ShortRegister)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b);
#else
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

// The column of a sum among those of a register of columns, which `first_pairs` are before
// `second_pairs`.
TPC_INLINE int64_t column_of(int64_t place) {
  const int64_t second = place / kRegister, lane = place % kRegister;
  return lane / 4 * 8 + second * 4 + lane % 4;
}

// Fetch adjacent rows to the second cache.
TPC_INLINE void fetch(const scaled8* rows, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(rows + offset, 0, 2);
}

// The queries of some heads as integers, `stride` apart, and their scales.
struct ShortQueries {
  const int16_t* first;
  int64_t stride;
  const float* scales;
};

template <class T>
inline ShortQueries short_queries(const T* queries, int64_t heads, int64_t width,
                                  Scratch& scratch) {
  const int64_t stride = whole_shorts(width);
  int16_t* integers = scratch.take<int16_t>(heads * stride);
  float* scales = scratch.take<float>(heads);
  float* values = scratch.take<float>(stride);
  int32_t* whole = scratch.take<int32_t>(stride);
  std::memset(values, 0, sizeof(float) * static_cast<size_t>(stride));
  for (int64_t head = 0; head < heads; ++head) {
    convert(queries + head * width, width, values);
    int32_t sum;
    scales[head] = rounded_to_integers(values, stride, kShortSteps, whole, sum);
    for (int64_t column = 0; column < stride; ++column)
      integers[head * stride + column] = static_cast<int16_t>(whole[column]);
  }
  return {integers, stride, scales};
}

// The keys that are multiplied together.
#if defined(__AVX512F__)
constexpr int kKeysAtOnce = 4;
#else
constexpr int kKeysAtOnce = 2;
#endif

// Multiply `kKeys` keys by the queries of `kHeads` heads: `sums[head * kLanes + key]`, whose lanes
// are to be added.
template <int kHeads, int kKeys>
TPC_INLINE void short_dots(const scaled8* keys, int64_t key_stride, const int16_t* q,
                           int64_t stride, int64_t width, Lanes* sums) {
  IntRegister total[kHeads][kKeys] = {};
  const auto multiply = [&](int64_t column, const auto& load) TPC_ALWAYS {
    ShortRegister loaded[kKeys];
#pragma GCC unroll 4
    for (int key = 0; key < kKeys; ++key) loaded[key] = load(keys + key * key_stride + column);
#pragma GCC unroll 4
    for (int head = 0; head < kHeads; ++head) {
      const ShortRegister query = load_shorts(q + head * stride + column);
#pragma GCC unroll 4
      for (int key = 0; key < kKeys; ++key)
        total[head][key] = multiply_add(total[head][key], loaded[key], query);
    }
  };
  int64_t column = 0;
  for (; column + kShorts <= width; column += kShorts)
    multiply(column, [](const scaled8* key) TPC_ALWAYS { return widen(key); });
  if (column < width)
    multiply(column,
             [&](const scaled8* key) TPC_ALWAYS { return widen_some(key, width - column); });
#pragma GCC unroll 4
  for (int head = 0; head < kHeads; ++head)
#pragma GCC unroll 4
    for (int key = 0; key < kKeys; ++key) {
      Registers values{};
      values.each[0] = __builtin_convertvector(total[head][key], Register);
      sums[head * kLanes + key] = lanes(values);
    }
}

// The scores of some heads, 16 keys at a time.
class Scores {
 public:
  Scores(const ShortQueries& q, int64_t heads, int64_t width, float* scores, int64_t stride,
         Scratch& scratch)
      : q_(q), heads_(heads), width_(width), scores_(scores), stride_(stride),
        sums_(scratch.take<Lanes>(heads * kLanes)) {}

  // Add the first of some adjacent keys; return how many.
  TPC_INLINE int64_t add(const scaled8* keys, int64_t key_stride, int64_t left) {
    const bool several = left >= kKeysAtOnce && held_ + kKeysAtOnce <= kLanes;
    if (several) add_some<kKeysAtOnce>(keys, key_stride);
    else add_some<1>(keys, key_stride);
    if (held_ == kLanes) flush();
    return several ? kKeysAtOnce : 1;
  }

  TPC_INLINE void flush() {
    if (held_ == 0) return;
    for (int64_t head = 0; head < heads_; ++head)
      store_some(scores_ + head * stride_, sums_of_all(sums_ + head * kLanes), held_);
    scores_ += held_, held_ = 0;
  }

 private:
  template <int kKeys>
  TPC_INLINE void add_some(const scaled8* keys, int64_t key_stride) {
    const int16_t* q = q_.first;
    Lanes* sums = sums_ + held_;
    int64_t left = heads_;
    const auto run = [&](auto count) TPC_ALWAYS {
      short_dots<decltype(count)::value, kKeys>(keys, key_stride, q, q_.stride, width_, sums);
      q += count * q_.stride, sums += count * kLanes, left -= count;
    };
    while (left >= 4) run(std::integral_constant<int, 4>());
    if (left >= 2) run(std::integral_constant<int, 2>());
    if (left % 2) run(std::integral_constant<int, 1>());
    held_ += kKeys;
  }

  ShortQueries q_;
  int64_t heads_, width_;
  float* scores_;
  int64_t stride_;
  Lanes* sums_;
  int64_t held_ = 0;
};

// A chunk of tokens: their rows, in pairs, and for each head the weights of pairs and their scale.
struct Chunk {
  const scaled8* rows[kChunkTokens];
  int64_t pairs;
  int64_t row_stride;
  bool fetches;  // the rows of the chunk after the next one
  const int32_t* weights;  // [head][kChunkPairs]
  const float* scales;     // [head]
};

// Add `kBlocks` registers of columns of a chunk's values for `kHeads` heads. Sums are in the order
// of `column_of`.
template <int kHeads, int kBlocks>
inline void mix_block(const Chunk& chunk, int64_t head, int64_t column, int64_t left,
                          int64_t stride, float* mixed) {
  IntRegister total[kHeads][2 * kBlocks] = {};
  const int32_t* weights = chunk.weights + head * kChunkPairs;
  const bool whole = left >= kBlocks * kShorts;
  const bool fetches = chunk.fetches && head == 0 && column == 0;
  const int64_t ahead = 2 * kChunkTokens * chunk.row_stride;
  for (int64_t pair = 0; pair < chunk.pairs; ++pair) {
    const scaled8* a = chunk.rows[2 * pair] + column;
    const scaled8* b = chunk.rows[2 * pair + 1] + column;
    if (fetches) fetch(a + ahead, 2 * chunk.row_stride);
    ShortRegister factors[kHeads];
#pragma GCC unroll 4
    for (int index = 0; index < kHeads; ++index)
      factors[index] = everywhere<1>(weights + index * kChunkPairs + pair);
#pragma GCC unroll 4
    for (int block = 0; block < kBlocks; ++block) {
      const int64_t offset = block * kShorts;
      const ShortRegister x = whole ? widen(a + offset) : widen_some(a + offset, left - offset);
      const ShortRegister y = whole ? widen(b + offset) : widen_some(b + offset, left - offset);
      const ShortRegister first = first_pairs(x, y), second = second_pairs(x, y);
#pragma GCC unroll 4
      for (int index = 0; index < kHeads; ++index) {
        total[index][2 * block] = multiply_add(total[index][2 * block], first, factors[index]);
        total[index][2 * block + 1] =
            multiply_add(total[index][2 * block + 1], second, factors[index]);
      }
    }
  }
#pragma GCC unroll 4
  for (int index = 0; index < kHeads; ++index)
#pragma GCC unroll 8
    for (int place = 0; place < 2 * kBlocks; ++place) {
      float* out = mixed + (head + index) * stride + column + place * kRegister;
      const Register sums = __builtin_convertvector(total[index][place], Register);
      const Register scale = Register{} + chunk.scales[head + index];
      const Register values = multiply_add(load_bytes<Register>(out), sums, scale);
      std::memcpy(out, &values, sizeof values);
    }
}

// Add the values of a chunk for `kHeads` heads.
template <int kHeads>
TPC_INLINE void mix_heads(const Chunk& chunk, int64_t head, int64_t width, int64_t stride,
                          float* mixed) {
  constexpr int kBlocks = kHeads > 2 ? 2 : 4;
  int64_t column = 0;
  for (; column + kBlocks * kShorts <= width; column += kBlocks * kShorts)
    mix_block<kHeads, kBlocks>(chunk, head, column, width - column, stride, mixed);
  for (; column < width; column += kShorts)
    mix_block<kHeads, 1>(chunk, head, column, width - column, stride, mixed);
}

// The chunks of a span's values, which are mixed as soon as they are full.
class Chunks {
 public:
  Chunks(const float* weights, int64_t stride, int64_t tokens, int64_t heads, int64_t width,
         int64_t row_stride, float* mixed, Scratch& scratch)
      : weights_(weights), stride_(stride), left_(tokens), heads_(heads), width_(width),
        mixed_(mixed), shorts_(scratch.take<int16_t>(heads * kChunkTokens)),
        head_scales_(scratch.take<float>(heads)) {
    chunk_.row_stride = row_stride;
  }

  TPC_INLINE void add(const scaled8* row) {
    chunk_.rows[held_] = row;
    scales_[held_] = scale_of(row, width_);
    if (++held_ == kChunkTokens) flush();
  }

  void flush() {
    if (held_ == 0) return;
    for (int64_t token = held_; token < kChunkTokens; ++token)
      chunk_.rows[token] = chunk_.rows[0], scales_[token] = 0;
    float scaled[kChunkTokens];
    alignas(64) int32_t whole[kChunkTokens];
    for (int64_t head = 0; head < heads_; ++head) {
      for (int64_t token = 0; token < kChunkTokens; token += kLanes)
        store(scaled + token, load(weights_ + head * stride_ + token) * load(scales_ + token));
      int32_t sum;
      head_scales_[head] = rounded_to_integers(scaled, kChunkTokens, kShortSteps, whole, sum);
      for (int64_t token = 0; token < kChunkTokens; token += kLanes)
        narrow(load_ints(whole + token), shorts_ + head * kChunkTokens + token);
    }
    left_ -= held_;
    chunk_.fetches = left_ > kChunkTokens;
    chunk_.pairs = (held_ + 1) / 2;
    chunk_.weights = reinterpret_cast<const int32_t*>(shorts_);
    chunk_.scales = head_scales_;
    mix();
    weights_ += held_, held_ = 0;
  }

 private:
  void mix() {
    const int64_t stride = whole_shorts(width_);
    int64_t head = 0;
    for (; head + 4 <= heads_; head += 4) mix_heads<4>(chunk_, head, width_, stride, mixed_);
    for (; head + 2 <= heads_; head += 2) mix_heads<2>(chunk_, head, width_, stride, mixed_);
    for (; head < heads_; ++head) mix_heads<1>(chunk_, head, width_, stride, mixed_);
  }

  const float* weights_;
  int64_t stride_, left_, heads_, width_;
  float* mixed_;
  int16_t* shorts_;
  float* head_scales_;
  Chunk chunk_{};
  alignas(64) float scales_[kChunkTokens];
  int64_t held_ = 0;
};

// Attend some heads to a span. `mixed` becomes the weighted sums of values, `mass` the sums of the
// weights, and `logs` their log-sum-exp.
template <class T>
inline void attend_in_integers(const T* queries, int64_t heads, int64_t width,
                               const Side<scaled8>& keys, const Side<scaled8>& values, Span tokens,
                               float scale, float* mixed, float* mass, float* logs,
                               Scratch& scratch) {
  const int64_t count = tokens.last - tokens.first;
  const int64_t stride = (count + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
  const ShortQueries q = short_queries(queries, heads, width, scratch);
  float* scores = scratch.take<float>(heads * stride);
  float* scales = scratch.take<float>(stride);
  Scores dots(q, heads, width, scores, stride, scratch);
  const int64_t rows = 2 * rows_ahead(keys.stride);
  const scaled8* first_value = values.row(tokens.first);
  keys.each(tokens, [&](int64_t place, const scaled8* first_key, int64_t length) {
    for (int64_t token = 0, added; token < length; token += added) {
      const scaled8* key = first_key + token * keys.stride;
      added = dots.add(key, keys.stride, length - token);
      const int64_t next = place + token + rows;
      // The last keys fetch the first values.
      fetch(next < count ? key + rows * keys.stride : first_value + (next - count) * keys.stride,
            added * keys.stride);
      for (int64_t index = 0; index < added; ++index)
        scales[place + token + index] = scale_of(key + index * keys.stride, width);
    }
  });
  dots.flush();
  for (int64_t head = 0; head < heads; ++head) {
    float* head_scores = scores + head * stride;
    logs[head] = softmax(head_scores, count, scales, scale * q.scales[head], mass + head);
    std::memset(head_scores + count, 0, sizeof(float) * static_cast<size_t>(stride - count));
  }
  const int64_t padded = whole_shorts(width);
  float* sums = scratch.take<float>(heads * padded);
  std::memset(sums, 0, sizeof(float) * static_cast<size_t>(heads * padded));
  Chunks chunks(scores, stride, count, heads, width, values.stride, sums, scratch);
  values.each(tokens, [&](int64_t, const scaled8* row, int64_t length) {
    for (int64_t token = 0; token < length; ++token, row += values.stride) chunks.add(row);
  });
  chunks.flush();
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t first = 0; first < width; first += kShorts)
      for (int64_t place = 0; place < kShorts; ++place)
        if (const int64_t column = first + column_of(place); column < width)
          mixed[head * width + column] = sums[head * padded + first + place];
}

}  // namespace
