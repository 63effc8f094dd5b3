// Clocks in nanoseconds.
#pragma once

#include <time.h>

#include <cstdint>

namespace tpc {

// Return the time of a clock, or -1 if it cannot be read.
inline int64_t read_clock(clockid_t clock) {
  timespec time;
  if (clock_gettime(clock, &time) != 0) return -1;
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

inline int64_t now_ns() { return read_clock(CLOCK_MONOTONIC); }

}  // namespace tpc
