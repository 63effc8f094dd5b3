// A loop that only reads: the yardstick for kernels that are bound by memory.
#pragma once

#include "numbers.h"

namespace {

// Read memory, 64 bytes a load. The result depends on all of it, so that no load is left out.
inline uint64_t read_all(const char* data, int64_t bytes) {
  constexpr int64_t kLine = 64, kLines = 8;
  BitLanes bits[kLines] = {};
  for (int64_t offset = 0; offset + kLine * kLines <= bytes; offset += kLine * kLines)
#pragma GCC unroll 8
    for (int64_t line = 0; line < kLines; ++line)
      bits[line] ^= load_bytes<BitLanes>(data + offset + line * kLine);
  uint64_t all = 0;
  for (const BitLanes& lanes : bits)
    for (int lane = 0; lane < kLanes; ++lane) all += lanes[lane];
  return all;
}

}  // namespace
