// Queries, keys and values: projection, norm and rotation of whole heads.
#pragma once

#include "kv.h"
#include "normed.h"

namespace {

// Rotate a head with the arithmetic of torch in dtype T: each product and the sum are rounded.
template <class T>
inline void rotate(float* x, const T* cos, const T* sin, int64_t width, bool interleaved,
                   float* held) {
  const int64_t half = width / 2;
  const auto place = [&](int64_t pair, int64_t side) {
    return interleaved ? 2 * pair + side : pair + side * half;
  };
  for (int64_t pair = 0; pair < half; ++pair)
    for (int64_t side = 0; side < 2; ++side) held[side * half + pair] = x[place(pair, side)];
  for (int64_t at = 0; at < half; at += kLanes) {
    const int64_t left = half - at;
    const Lanes low = load_some(held + at, left), high = load_some(held + half + at, left);
    const auto turned = [&](Lanes own, Lanes other, int64_t column) {
      return rounded<T>(rounded<T>(own * load_some(cos + column, left)) +
                        rounded<T>(other * load_some(sin + column, left)));
    };
    store_some(held + at, turned(low, -high, at), left);
    store_some(held + half + at, turned(high, low, half + at), left);
  }
  for (int64_t pair = 0; pair < half; ++pair)
    for (int64_t side = 0; side < 2; ++side) x[place(pair, side)] = held[side * half + pair];
}

// Norm, rotate and store the heads from `first`, whose projections are in `rows`.
template <class Types, class Words>
inline void finish(const Memory& memory, const Words& at, int64_t first, int64_t heads,
                   float* rows, int64_t stride, Scratch& scratch) {
  using T = typename Types::Value;
  const int64_t width = at.width;
  float* held = scratch.take<float>(width);
  for (int64_t b = 0; b < at.normed_batch; ++b) {
    const int64_t length = at.part == TPC_PART_Q ? 0 : memory.at<int32_t>(at.lengths)[b];
    if (at.part != TPC_PART_Q && length == 0) continue;
    for (int64_t head = 0; head < heads; ++head) {
      float* x = rows + b * stride + head * width;
      if (at.head_norm != TPC_NONE)
        rms_norm<T>(x, memory.at<typename Types::Vector>(at.head_norm), width, at.head_eps,
                    at.normed_zero_centered, x);
      if (at.part != TPC_PART_V) {
        const int64_t place = memory.at<int32_t>(at.positions)[b] * int64_t{at.rotated};
        rotate(x, memory.at<T>(at.cos) + place, memory.at<T>(at.sin) + place, at.rotated,
               at.interleaved, held);
      }
      if (at.part == TPC_PART_Q) {
        const int64_t place = b * memory.stride(at.out, 0) + (first + head) * width;
        convert(x, width, memory.at<T>(at.out) + place);
      } else {
        const int64_t blocks = memory.extent(at.tables, 1), newest = length - 1;
        const int64_t block = memory.at<int32_t>(at.tables)[b * blocks + newest / at.block];
        const int64_t slot = block * at.block + newest % at.block;
        const int64_t place =
            at.layer * memory.stride(at.out, 0) + at.part * memory.stride(at.out, 1) +
            slot * memory.stride(at.out, 2) + (first + head) * memory.stride(at.out, 3);
        if (memory.buffers[at.out].format == kDType<scaled8>)
          store_row(x, width, memory.at<scaled8>(at.out) + place, scratch);
        else
          convert(x, width, memory.at<typename Types::Cache>(at.out) + place);
      }
    }
  }
}

template <class Types>
void norm_qkv_rope_append(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& at = *reinterpret_cast<const tpc_norm_qkv_rope_append*>(words);
  const int64_t heads = at.heads.stop - at.heads.start, rows = heads * at.width;
  const auto& x = normed<Types>(memory, at, scratch);
  float* found = scratch.take<float>(at.normed_batch * rows);
  const int64_t first = at.first_row + int64_t{at.heads.start} * at.width;
  linear_rows<Types>(memory, at, x, first, rows, found, rows, scratch);
  finish<Types>(memory, at, at.heads.start, heads, found, rows, scratch);
}

// The last block of a head to arrive finishes the head.
template <class Types>
void norm_qkv_rows(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& at = *reinterpret_cast<const tpc_norm_qkv_rows*>(words);
  const int64_t rows = at.rows.stop - at.rows.start, whole = memory.extent(at.raw, 1);
  const int64_t place = at.first_row / at.width + at.head, first = place * at.width;
  const auto& x = normed<Types>(memory, at, scratch);
  float* found = scratch.take<float>(at.normed_batch * rows);
  linear_rows<Types>(memory, at, x, first + at.rows.start, rows, found, rows, scratch);
  for (int64_t b = 0; b < at.normed_batch; ++b)
    convert(found + b * rows, rows, memory.at<T>(at.raw) + b * whole + first + at.rows.start);
  int32_t* arrivals = memory.at<int32_t>(at.arrivals) + place;
  const int32_t arrived = __atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL);
  if (arrived % at.blocks) return;
  float* head = scratch.take<float>(at.normed_batch * at.width);
  for (int64_t b = 0; b < at.normed_batch; ++b)
    convert(memory.at<T>(at.raw) + b * whole + first, at.width, head + b * at.width);
  finish<Types>(memory, at, at.head, 1, head, at.width, scratch);
}

}  // namespace
