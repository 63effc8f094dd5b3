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
  for (int64_t pair = 0; pair < half; pair += kLanes) {
    const int64_t left = half - pair;
    const Lanes low = load_some(held + pair, left), high = load_some(held + half + pair, left);
    const auto turned = [&](Lanes values, Lanes partner, int64_t column) {
      return rounded<T>(rounded<T>(values * load_some(cos + column, left)) +
                        rounded<T>(partner * load_some(sin + column, left)));
    };
    store_some(held + pair, turned(low, -high, pair), left);
    store_some(held + half + pair, turned(high, low, half + pair), left);
  }
  for (int64_t pair = 0; pair < half; ++pair)
    for (int64_t side = 0; side < 2; ++side) x[place(pair, side)] = held[side * half + pair];
}

// Norm, rotate and store the heads from `first`, whose projections are in `rows`.
template <class Types, class Words>
inline void finish(const Memory& memory, const Words& operands, int64_t first, int64_t heads,
                   float* rows, int64_t stride, Scratch& scratch) {
  using T = typename Types::Value;
  const int64_t width = operands.width;
  float* held = scratch.take<float>(width);
  for (int64_t b = 0; b < operands.normed_batch; ++b) {
    const int64_t length =
        operands.part == TPC_PART_Q ? 0 : memory.at<int32_t>(operands.lengths)[b];
    if (operands.part != TPC_PART_Q && length == 0) continue;
    for (int64_t head = 0; head < heads; ++head) {
      float* x = rows + b * stride + head * width;
      if (operands.head_norm != TPC_NONE)
        rms_norm<T>(x, memory.at<typename Types::Vector>(operands.head_norm), width,
                    operands.head_eps, operands.normed_zero_centered, x);
      if (operands.part != TPC_PART_V) {
        const int64_t place = memory.at<int32_t>(operands.positions)[b] * int64_t{operands.rotated};
        rotate(x, memory.at<T>(operands.cos) + place, memory.at<T>(operands.sin) + place,
               operands.rotated, operands.interleaved, held);
      }
      if (operands.part == TPC_PART_Q) {
        const int64_t place = b * memory.stride(operands.out, 0) + (first + head) * width;
        convert(x, width, memory.at<T>(operands.out) + place);
      } else {
        const int64_t blocks = memory.extent(operands.tables, 1), newest = length - 1;
        const int64_t block =
            memory.at<int32_t>(operands.tables)[b * blocks + newest / operands.block];
        const int64_t slot = block * operands.block + newest % operands.block;
        const int64_t place =
            operands.layer * memory.stride(operands.out, 0) +
            operands.part * memory.stride(operands.out, 1) + slot * memory.stride(operands.out, 2) +
            (first + head) * memory.stride(operands.out, 3);
        if (memory.buffers[operands.out].format == kDType<scaled8>)
          store_row(x, width, memory.at<scaled8>(operands.out) + place, scratch);
        else
          convert(x, width, memory.at<typename Types::Cache>(operands.out) + place);
      }
    }
  }
}

template <class Types>
void norm_qkv_rope_append(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const auto& operands = *reinterpret_cast<const tpc_norm_qkv_rope_append*>(words);
  const int64_t heads = operands.heads.stop - operands.heads.start, rows = heads * operands.width;
  const auto& x = normed<Types>(memory, operands, scratch);
  float* projections = scratch.take<float>(operands.normed_batch * rows);
  const int64_t first = operands.first_row + int64_t{operands.heads.start} * operands.width;
  linear_rows<Types>(memory, operands, x, first, rows, projections, rows, scratch);
  finish<Types>(memory, operands, operands.heads.start, heads, projections, rows, scratch);
}

// The last block of a head to arrive finishes the head.
template <class Types>
void norm_qkv_rows(const Memory& memory, const int32_t* words, Scratch& scratch) {
  using T = typename Types::Value;
  const auto& operands = *reinterpret_cast<const tpc_norm_qkv_rows*>(words);
  const int64_t rows = operands.rows.stop - operands.rows.start;
  const int64_t whole = memory.extent(operands.raw, 1);
  const int64_t place = operands.first_row / operands.width + operands.head;
  const int64_t first = place * operands.width;
  const auto& x = normed<Types>(memory, operands, scratch);
  float* projections = scratch.take<float>(operands.normed_batch * rows);
  linear_rows<Types>(memory, operands, x, first + operands.rows.start, rows, projections, rows,
                     scratch);
  for (int64_t b = 0; b < operands.normed_batch; ++b)
    convert(projections + b * rows, rows,
            memory.at<T>(operands.raw) + b * whole + first + operands.rows.start);
  int32_t* arrivals = memory.at<int32_t>(operands.arrivals) + place;
  const int32_t arrived = __atomic_add_fetch(arrivals, 1, __ATOMIC_ACQ_REL);
  if (arrived % operands.blocks) return;
  float* head = scratch.take<float>(operands.normed_batch * operands.width);
  for (int64_t b = 0; b < operands.normed_batch; ++b)
    convert(memory.at<T>(operands.raw) + b * whole + first, operands.width,
            head + b * operands.width);
  finish<Types>(memory, operands, operands.head, 1, head, operands.width, scratch);
}

}  // namespace
