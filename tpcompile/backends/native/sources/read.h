// A loop that only reads: the yardstick for kernels that are bound by memory.
#pragma once

#include "numbers.h"

namespace {

// Read memory, 64 bytes a load. The result depends on all of it, so that no load is left out.
inline uint64_t read_all(const char* from, int64_t bytes) {
  constexpr int64_t kLine = 64, kLines = 8;
  BitLanes found[kLines] = {};
  for (int64_t at = 0; at + kLine * kLines <= bytes; at += kLine * kLines)
#pragma GCC unroll 8
    for (int64_t line = 0; line < kLines; ++line)
      found[line] ^= load_bytes<BitLanes>(from + at + line * kLine);
  uint64_t all = 0;
  for (const BitLanes& lanes : found)
    for (int lane = 0; lane < kLanes; ++lane) all += lanes[lane];
  return all;
}

}  // namespace
