// The board of the workers of all ranks: what each is doing, and a place to sleep until a signal.
// If ranks are processes, they share its memory, which is zero at first.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace tpc {

// Make signals visible to sleepers: a signaller first signals and then looks for sleepers, and a
// sleeper first counts itself and then looks for signals, so one of the two sees the other.
class alignas(64) Bell {
 public:
  // Sleep for `ns`, or for any time if negative, unless `met` or until the bell rings.
  template <class Met>
  void sleep(int64_t ns, const Met& met) {
    sleepers_.fetch_add(1);
    const uint32_t seen = rings_.load();
    if (!met()) {
      const timespec most{ns / 1000000000, ns % 1000000000};
      syscall(SYS_futex, &rings_, FUTEX_WAIT, seen, ns < 0 ? nullptr : &most, nullptr, 0);
    }
    sleepers_.fetch_sub(1);
  }

  bool has_sleepers() const { return sleepers_.load() != 0; }

  void ring() {
    rings_.fetch_add(1);
    syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Whether this thread may move workers to other cores. If so, call `end_move` afterwards.
  bool begin_move() { return moving_.exchange(1, std::memory_order_acquire) == 0; }

  void end_move() { moving_.store(0, std::memory_order_release); }

 private:
  std::atomic<uint32_t> rings_, sleepers_, moving_;
};

// The state of a worker that other workers can read.
struct alignas(64) Seat {
  enum : int32_t { kSleeps = 0, kWaits = 1, kRuns = 2 };

  std::atomic<int64_t> claim;  // 1 + the ticket of the instruction that it runs next, or 0
  std::atomic<int32_t> thread;
  std::atomic<int32_t> clock;  // the CPU time of its thread, for this process
  std::atomic<int32_t> lost;  // of its time, the per cent in which it wanted a core and had none
  std::atomic<int32_t> core;  // the core that it is pinned to, or -1
  std::atomic<int32_t> state;  // before it has started, the worker sleeps
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Bell) == 64, "processes share");
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(Seat) == 64, "processes share");

}  // namespace tpc
