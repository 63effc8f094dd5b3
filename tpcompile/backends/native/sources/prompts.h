// Operations on many tokens in bf16, which torch modules call for prompts.
//
// The result for a token depends on no other token of the call, except for the keys and values that
// its attention reads. So it has the same bits however a prompt is cut.
#pragma once

#include "machine.h"

namespace tpc {

// Values in bf16 of tokens and heads; the values of a head are adjacent.
struct Heads {
  const uint16_t* data;
  int64_t token_stride, head_stride;
};

// x / rms(x), rounded, times the weight, for each head. If the weight is zero-centred, 1 is added
// to it, and only the product is rounded.
struct Norm {
  Heads x;
  const uint16_t* weight;
  uint16_t* out;
  int64_t heads, width, zero_centered;
  double eps;
};

// The sum of x and the residual, and its norm. If the residual is in fp32, the norm takes the sum
// before it is rounded.
struct AddNorm {
  const uint16_t* x;
  const void* residual;
  int64_t residual_in_fp32;
  const uint16_t* weight;
  uint16_t *normed, *total;
  int64_t width, zero_centered;
  double eps;
};

// silu(gate), rounded, times up.
struct Swiglu {
  Heads gate, up;
  uint16_t* out;
  int64_t width;
};

// x times sigmoid(gate), which is rounded first.
struct Gate {
  Heads x, gate;
  uint16_t* out;
  int64_t heads, width;
};

// The norm of each head times silu(gate), which is not rounded.
struct GatedNorm {
  Heads x, gate;
  const uint16_t* weight;
  uint16_t* out;
  int64_t heads, width;
  double eps;
};

// The first `rotated` values of heads, rotated in pairs half of them apart. Both products are
// rounded before they are added.
struct Rope {
  Heads x;
  const uint16_t *cos, *sin;
  uint16_t* out;
  int64_t heads, width, rotated;
};

// Keys and values of tokens, written to their slots of the cache. If the cache rounds its rows, the
// heads in it are rows in int8, whose strides are bytes: see kv.h.
struct Append {
  Heads keys, values, cached_keys, cached_values;
  const int64_t* slots;
  int64_t heads, width, rounds;
};

// Attention to tokens in the cache. An item is a part of a sequence's new tokens, and a run of
// query heads that read the same KV head.
struct Attention {
  Heads q, keys, values;
  uint16_t* out;
  int64_t heads, width;
  const int64_t *starts, *lengths, *tables;
  int64_t sequences, columns, table_stride, slots, block;
  int64_t part_tokens;
  const int64_t* runs;  // of each run the KV head, the first query head and their number
  int64_t run_count;
  int64_t window;  // 0 for none
  int64_t rounds;  // whether keys and values are in int8
  double scale;
};

// Products of tokens and the rows of a weight. First the tokens are packed, 16 side by side;
// an item is 64 tokens. Then an item is some rows of the result and some tokens. The numbers of a
// weight of few bits are rounded to bf16.
//
// The weight may have rows of gates, followed by as many of the values that they multiply. Both
// products are rounded, and the result is their SwiGLU.
struct Linear {
  Heads x;
  const void* weight;
  const void* high;       // null for none, as those after the scales
  const void* scales;     // null for weights in bf16
  const int8_t* offsets;
  const void *minima, *super_scales, *super_minima;
  int64_t format, row_bytes, high_bytes, groups, supers, first;  // the parts of a row, but `first`
  const uint16_t* bias;  // null for none
  uint16_t* out;
  void* packed;  // in bf16 or fp32, as the path's products take them, or rounded to int8
  float* factors;  // of tokens that are rounded, for each block of columns
  int32_t* sums;   // of their integers
  int64_t tokens, columns, rows;
  int64_t part_rows, part_tokens;
  int64_t swiglu;
  int64_t threads;
};

// Several products. The items of a product follow those of the product before it, and end before
// `ends`.
struct Products {
  const Linear* each;
  const int64_t* ends;
};

// Sums of some rows for each token, each times a score. A place of -1 is no row.
struct Mix {
  const uint16_t* rows;
  const int64_t* places;  // of each token, in the order of the sum
  const float* scores;
  uint16_t* out;
  int64_t count, width;
};

// The tokens of each sequence, its length including them, and the numbers of its states. A sequence
// whose tokens are all new resumes from no state.
struct Sequences {
  const int64_t *starts, *lengths, *read, *write;
  int64_t count;
};

// SiLU of the convolution of each channel over the tokens of a sequence. An item is a sequence and
// 256 channels.
struct Convolution {
  Heads x;
  const uint16_t *weight, *bias;  // the bias is null for none
  uint16_t *tails, *out;
  int64_t channels, taps, tail_stride;
  Sequences sequences;
};

// The gated delta rule, token by token. An item is a sequence, a value head and 32 columns of its
// state.
struct DeltaRule {
  Heads q, k, v;
  const float *decay, *share;  // for each token and head; the decay is a factor
  float* states;
  uint16_t* out;
  const int64_t* k_heads;
  int64_t heads, key_width, width, state_stride;
  Sequences sequences;
};

}  // namespace tpc
