// Sums and gathers over memory that all ranks of a host share.
//
// Each rank has a mark and two slots, used in turn. A rank posts: it copies its term to its slot of
// this round and then writes the number of the round to its mark. When all marks have this number,
// all terms of the round can be read. A rank posts to the same slot two rounds later, so after all
// ranks have posted to the other one, and thus have read this one.
#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>

extern "C" {

// A rank's view of the memory, which is zero at first.
typedef struct {
  char* memory;
  int64_t slots;  // the offset of the slots
  int64_t slot;   // the bytes of a slot
  int32_t rank;
  int32_t ranks;
  uint32_t round;
  int32_t pauses;    // polls without a system call
  int32_t yield_us;  // the time to poll and yield before sleeping
  int32_t crowded;   // the waits left in which not to yield, since other threads use this core
} tpc_exchange;

enum tpc_sums { TPC_F32 = 0, TPC_BF16_TO_F32 = 1, TPC_BF16 = 2 };
}

namespace {

constexpr int64_t kMarkBytes = 128;  // two cache lines, which some CPUs fetch together
constexpr int64_t kSliceNs = 50000000;
constexpr int64_t kBlock = 512;
constexpr int64_t kSwitchNs = 20000;  // longer than a yield takes if no other thread runs
constexpr int32_t kCrowdedWaits = 200;

struct Mark {
  std::atomic<uint32_t> round;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share these");

Mark& mark_of(const tpc_exchange& exchange, int32_t rank) {
  return *reinterpret_cast<Mark*>(exchange.memory + rank * kMarkBytes);
}

char* slot_of(const tpc_exchange& exchange, int32_t rank) {
  const int64_t turn = exchange.round % 2;
  return exchange.memory + exchange.slots + (turn * exchange.ranks + rank) * exchange.slot;
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool has_posted(const tpc_exchange& exchange, const Mark& mark) {
  return static_cast<int32_t>(mark.round.load(std::memory_order_acquire) - exchange.round) >= 0;
}

// Sleep until the rank posts, at most for a slice of time. The order of the two atomics is the
// reverse of `tpc_post`, so that one of the two sees the other.
void sleep_for(const tpc_exchange& exchange, Mark& mark) {
#if defined(__linux__)
  mark.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = mark.round.load(std::memory_order_seq_cst);
  const timespec slice{0, kSliceNs};
  if (static_cast<int32_t>(seen - exchange.round) < 0)
    syscall(SYS_futex, &mark.round, FUTEX_WAIT, seen, &slice, nullptr, 0);
  mark.sleepers.fetch_sub(1, std::memory_order_seq_cst);
#else
  const timespec nap{0, 50000};
  nanosleep(&nap, nullptr);
#endif
}

void wake(Mark& mark) {
#if defined(__linux__)
  if (mark.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &mark.round, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Poll, and let other threads of this core run; return whether the rank has posted. If other
// threads do run, it is better to sleep, in the next waits too: a thread that yields goes behind
// all others, and one that wakes up goes before them.
bool yields(tpc_exchange& exchange, const Mark& mark) {
  const int64_t begin = now_ns();
  const int64_t limit = exchange.yield_us * int64_t{1000};
  for (int64_t last = begin, now = begin; now - begin < limit; last = now) {
    sched_yield();
    now = now_ns();
    if (now - last > kSwitchNs) exchange.crowded = kCrowdedWaits;
    if (has_posted(exchange, mark)) return true;
    if (exchange.crowded > 0) break;
  }
  return false;
}

// Wait until a rank has posted; return false if it has not after a slice of time.
bool comes(tpc_exchange& exchange, Mark& mark) {
  if (has_posted(exchange, mark)) return true;
  for (int looks = 0; looks < exchange.pauses; ++looks) {
    pause();
    if (has_posted(exchange, mark)) return true;
  }
  if (exchange.crowded > 0)
    --exchange.crowded;
  else if (yields(exchange, mark))
    return true;
  sleep_for(exchange, mark);
  return has_posted(exchange, mark);
}

bool all_come(tpc_exchange& exchange) {
  for (int32_t rank = 0; rank < exchange.ranks; ++rank)
    if (!comes(exchange, mark_of(exchange, rank))) return false;
  return true;
}

struct F32 {
  using Stored = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};

struct BF16 {
  using Stored = uint16_t;

  static float load(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  // Round to the nearest, ties to even; NaN stays NaN.
  static uint16_t store(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
  }
};

// Add terms in the tree of `fold_tree`; each sum is rounded to `Out`.
template <class In, class Out>
void fold(const tpc_exchange& exchange, int32_t first, int32_t ranks, int64_t start, int64_t count,
          float* sums) {
  if (ranks == 1) {
    const char* slot = slot_of(exchange, first);
    const auto* terms = reinterpret_cast<const typename In::Stored*>(slot) + start;
    for (int64_t i = 0; i < count; ++i) sums[i] = In::load(terms[i]);
    return;
  }
  int32_t left = 1;
  while (2 * left < ranks) left *= 2;
  float right[kBlock];
  fold<In, Out>(exchange, first, left, start, count, sums);
  fold<In, Out>(exchange, first + left, ranks - left, start, count, right);
  for (int64_t i = 0; i < count; ++i) sums[i] = Out::load(Out::store(sums[i] + right[i]));
}

template <class In, class Out>
void sum(const tpc_exchange& exchange, int64_t first, int64_t last, void* to) {
  auto* totals = static_cast<typename Out::Stored*>(to);
  for (int64_t start = first; start < last; start += kBlock) {
    float sums[kBlock];
    const int64_t count = std::min(kBlock, last - start);
    fold<In, Out>(exchange, 0, exchange.ranks, start, count, sums);
    for (int64_t i = 0; i < count; ++i) totals[start - first + i] = Out::store(sums[i]);
  }
}

}  // namespace

extern "C" {

// Begin a round with this rank's term. The previous round must have been read.
void tpc_post(tpc_exchange* exchange, const void* from, int64_t bytes) {
  ++exchange->round;
  std::memcpy(slot_of(*exchange, exchange->rank), from, static_cast<size_t>(bytes));
  Mark& mark = mark_of(*exchange, exchange->rank);
  mark.round.store(exchange->round, std::memory_order_seq_cst);
  wake(mark);
}

// Sum values `first` to `last` of all terms of this round; return 0 to be called again.
int32_t tpc_sum(tpc_exchange* exchange, int32_t kind, int64_t first, int64_t last, void* to) {
  if (!all_come(*exchange)) return 0;
  if (kind == TPC_F32) sum<F32, F32>(*exchange, first, last, to);
  if (kind == TPC_BF16_TO_F32) sum<BF16, F32>(*exchange, first, last, to);
  if (kind == TPC_BF16) sum<BF16, BF16>(*exchange, first, last, to);
  return 1;
}

// Post a term of `count` values and sum all terms, if they have come; if this returns 0, call
// `tpc_sum`.
int32_t tpc_post_and_sum(tpc_exchange* exchange, const void* from, int64_t bytes, int32_t kind,
                         int64_t count, void* to) {
  tpc_post(exchange, from, bytes);
  return tpc_sum(exchange, kind, 0, count, to);
}

// Copy the terms of this round, up to `bytes` of each, to `to` with a distance of `stride` bytes,
// and no further than `total`; return 0 to be called again.
int32_t tpc_gather(tpc_exchange* exchange, int64_t bytes, char* to, int64_t stride,
                   int64_t total) {
  if (!all_come(*exchange)) return 0;
  for (int32_t rank = 0; rank < exchange->ranks; ++rank) {
    const int64_t count = std::min(bytes, total - rank * stride);
    const char* slot = slot_of(*exchange, rank);
    if (count > 0) std::memcpy(to + rank * stride, slot, static_cast<size_t>(count));
  }
  return 1;
}
}
