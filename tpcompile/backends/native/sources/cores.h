// Which core each worker runs on.
#pragma once

#include <sched.h>
#include <time.h>

#include "board.h"
#include "clocks.h"

namespace tpc {

// Whether the system runs the thread of a clock of CPU time at this moment.
inline bool runs(clockid_t clock) {
  constexpr int64_t kLookNs = 3000;
  const int64_t before = read_clock(clock);
  for (const int64_t end = now_ns() + kLookNs; now_ns() < end;) {
  }
  return before < 0 || read_clock(clock) != before;
}

// Ask the system for short slices of time, which let this thread start soon after it wakes up
// beside a busy program, and give it no larger share. Systems before Linux 6.12 ignore this.
inline void prefer_short_slices() {
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{};
  constexpr uint64_t kSliceNs = 500000;
  attributes.size = sizeof attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.runtime = kSliceNs;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// The share of time in which this thread wants a core and has none.
class CoreTime {
 public:
  // Note that the thread has slept, and so wanted no core.
  void slept(int64_t ns) { slept_ns_ += ns; }

  // The share in the last full window, in per cent.
  int lost(int64_t now) {
    constexpr int64_t kWindowNs = 10000000;
    if (now - begin_ < kWindowNs) return lost_;
    const int64_t ran = read_clock(CLOCK_THREAD_CPUTIME_ID), wall = now - begin_;
    lost_ = static_cast<int>(100 * (wall - slept_ns_ - (ran - ran_)) / wall);
    begin_ = now, ran_ = ran, slept_ns_ = 0;
    return lost_;
  }

 private:
  int64_t begin_ = now_ns(), ran_ = read_clock(CLOCK_THREAD_CPUTIME_ID), slept_ns_ = 0;
  int lost_ = 0;
};

// The cores of workers that are pinned, one each.
//
// If the core of a worker is busy with other programs, the worker that waits for it exchanges cores
// with it: it has nothing to do itself. So the program never waits for a slice of another program.
class Cores {
 public:
  // Count the cores that this process may use.
  Cores() {
    CPU_ZERO(&allowed_);
    if (sched_getaffinity(0, sizeof allowed_, &allowed_) == 0) count_ = CPU_COUNT(&allowed_);
  }

  int count() const { return count_; }

  // Pin a worker to the core of this place among the allowed ones.
  void pin(Seat& seat, int place) const {
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &allowed_) && place-- == 0 && place_on(seat.thread.load(), core))
        seat.core.store(core);
  }

  // Pin a worker to its core again if somebody moved it and then allowed it all cores.
  void pin_again(const Seat& seat) const {
    const int core = seat.core.load();
    cpu_set_t allowed;
    if (core < 0 || sched_getaffinity(seat.thread.load(), sizeof allowed, &allowed) != 0) return;
    if (count_ > 1 && CPU_EQUAL(&allowed, &allowed_)) place_on(seat.thread.load(), core);
  }

  // Exchange the cores of two workers; return false if this is not possible, for example because
  // somebody else has moved one of them.
  static bool exchange(Bell& bell, Seat& seat, Seat& other) {
    if (!bell.begin_move()) return false;
    const int core = seat.core.load(), other_core = other.core.load();
    bool moved = false;
    if (core >= 0 && other_core >= 0 && core != other_core && is_on(seat, core) &&
        is_on(other, other_core) && place_on(other.thread.load(), core)) {
      moved = true;
      seat.core.store(other_core), other.core.store(core);
      place_on(seat.thread.load(), other_core);
    }
    bell.end_move();
    return moved;
  }

 private:
  static bool place_on(int thread, int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return sched_setaffinity(thread, sizeof cores, &cores) == 0;
  }

  static bool is_on(const Seat& seat, int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    return sched_getaffinity(seat.thread.load(), sizeof cores, &cores) == 0 &&
           CPU_COUNT(&cores) == 1 && CPU_ISSET(core, &cores);
  }

  cpu_set_t allowed_;
  int count_ = 1;
};

}  // namespace tpc
