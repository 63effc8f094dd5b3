// The interpreter: worker threads that take instructions from queues, wait for counters and signal
// them. The functions of the C interface are at the end.
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "interface.h"
#include "machine.h"

namespace tpc {

Scratch::~Scratch() {
  while (blocks_ != nullptr) {
    Block* older = blocks_->older;
    std::free(blocks_);
    blocks_ = older;
  }
}

void* Scratch::bytes(size_t count) {
  constexpr size_t kLine = 64;
  count = (count + kLine - 1) / kLine * kLine;
  if (blocks_ == nullptr || used_ + count > size_) {
    // Older blocks stay until the end, because the instruction may still use them.
    const size_t size = std::max(2 * size_, std::max(count, size_t{1} << 16));
    void* memory = std::aligned_alloc(kLine, kLine + size);
    if (memory == nullptr) std::abort();
    Block* block = static_cast<Block*>(memory);
    *block = {static_cast<char*>(memory) + kLine, blocks_};
    blocks_ = block;
    size_ = size;
    used_ = 0;
  }
  void* found = blocks_->start + used_;
  used_ += count;
  return found;
}

namespace {

// Whether a path runs here is decided in this file, which has no target flags.
struct Choice {
  const Path* path;
  bool (*runs_here)();
};

#if defined(__x86_64__)
bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}

// Ask whether the CPU has tiles, and the system to let this process use them.
bool asks_for_amx_bf16() {
#if defined(__linux__)
  constexpr unsigned kTileBits = 1u << 22 | 1u << 24;  // AMX-BF16 and AMX-TILE
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kTileBits) != kTileBits) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx_bf16() {
  static const bool found = asks_for_amx_bf16();
  return found;
}
#endif

const Choice kPaths[] = {
#if defined(__x86_64__)
    {&amx_bf16, has_amx_bf16},
    {&avx512_bf16, has_avx512_bf16},
    {&avx2,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {&portable, [] { return true; }}};

}  // namespace

const Path* path_named(const char* name) {
  for (const Choice& choice : kPaths)
    if (std::strcmp(choice.path->name, name) == 0 && choice.runs_here()) return choice.path;
  return nullptr;
}

namespace {

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

// The weights that an instruction reads first.
struct Weights {
  int32_t buffer;
  int64_t row;
};

template <class Words>
Weights first_rows(const int32_t* words) {
  const auto& at = *reinterpret_cast<const Words*>(words);
  return {at.weight, at.rows.start};
}

Weights first_weights(const int32_t* words) {
  switch (words[0]) {
    case TPC_OP_NORM_QKV_ROPE_APPEND: {
      const auto& at = *reinterpret_cast<const tpc_norm_qkv_rope_append*>(words);
      return {at.weight, at.first_row + int64_t{at.heads.start} * at.width};
    }
    case TPC_OP_NORM_QKV_ROWS: {
      const auto& at = *reinterpret_cast<const tpc_norm_qkv_rows*>(words);
      return {at.weight, at.first_row + int64_t{at.head} * at.width + at.rows.start};
    }
    case TPC_OP_LINEAR_RESIDUAL:
      return first_rows<tpc_linear_residual>(words);
    case TPC_OP_LINEAR_TERMS:
      return first_rows<tpc_linear_terms>(words);
    case TPC_OP_NORM_GATE_UP_SWIGLU:
      return first_rows<tpc_norm_gate_up_swiglu>(words);
    case TPC_OP_NORM_LM_HEAD:
      return first_rows<tpc_norm_lm_head>(words);
    default:
      return {TPC_NONE, 0};
  }
}

// Fetch the first rows of weights into the second cache: they do not depend on what is waited for.
void fetch_weights(const Memory& memory, const int32_t* words) {
  constexpr int64_t kRows = 16, kMostBytes = 1 << 16;
  const Weights first = first_weights(words);
  if (first.buffer == TPC_NONE) return;
  const tpc_buffer& buffer = memory.buffers[first.buffer];
  const int64_t row = buffer.strides[0] * (buffer.dtype == TPC_DTYPE_F32 ? 4 : 2);
  const int64_t rows = std::min(kRows, buffer.shape[0] - first.row);
  const char* from = reinterpret_cast<const char*>(buffer.address) + first.row * row;
  for (int64_t at = 0; at < std::min(rows * row, kMostBytes); at += 64)
    __builtin_prefetch(from + at, 0, 2);
}

void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The lengths of delays, which are a function of the seed alone. Most are short, a few are long.
class Delays {
 public:
  explicit Delays(uint64_t seed) : state_(seed) {}

  int64_t next_ns() {
    constexpr uint64_t kLongestBits = 18;
    const uint64_t bits = mixed();
    return static_cast<int64_t>((bits >> 8) & ((uint64_t{1} << bits % kLongestBits) - 1));
  }

 private:
  // SplitMix64.
  uint64_t mixed() {
    uint64_t found = state_ += 0x9e3779b97f4a7c15;
    found = (found ^ (found >> 30)) * 0xbf58476d1ce4e5b9;
    found = (found ^ (found >> 27)) * 0x94d049bb133111eb;
    return found ^ (found >> 31);
  }

  uint64_t state_;
};

// What a worker has for itself.
struct Worker {
  Scratch scratch;
  Delays delays;
};

// Let other threads run for some time.
void delay(int64_t ns) {
  for (const int64_t end = now_ns() + ns; now_ns() < end;) sched_yield();
}

class Machine {
 public:
  Machine(const tpc_program& program, const Path& path)
      : program_(program),
        path_(path),
        memory_{program.buffers},
        tickets_(new std::atomic<int64_t>[static_cast<size_t>(program.queues)]) {
    const int32_t* edges = program.queue_offsets + program.first_queue;
    for (int32_t at = edges[0]; at < edges[program.queues]; ++at)
      if (words_of(program.queue_values[at])[0] == TPC_OP_ARGMAX) ++ends_per_step_;
  }

  ~Machine() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      quits_ = true;
    }
    begins_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Start the threads; return false if the system refuses one.
  bool start() {
    const int count = program_.queues * program_.sharing;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) cores_ = CPU_COUNT(&allowed);
    try {
      for (int worker = 0; worker < count; ++worker)
        threads_.emplace_back([this, worker] { work(worker); });
    } catch (const std::system_error&) {
      return false;
    }
    if (program_.first_core + count <= cores_)
      for (int worker = 0; worker < count; ++worker) pin(worker, allowed);
    return true;
  }

  void launch(int64_t steps, int64_t* times) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_step_.store(steps, std::memory_order_relaxed);
    stops_.store(false, std::memory_order_relaxed);
    times_ = times;
    for (int queue = 0; queue < program_.queues; ++queue)
      tickets_[static_cast<size_t>(queue)].store(0, std::memory_order_relaxed);
    step_ends_.store(0);
    busy_ = static_cast<int>(threads_.size());
    ++launches_;
    begins_.notify_all();
  }

  // Wait at most `milliseconds` until a launch ends or has done `wanted` steps. Return whether it
  // has ended.
  bool wait(int64_t milliseconds, int64_t wanted) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_.store(wanted);
    ends_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                   [&] { return busy_ == 0 || steps_done() >= wanted; });
    wanted_.store(INT64_MAX);
    return busy_ == 0;
  }

  void give_up() { fails_.store(true, std::memory_order_relaxed); }

  // End a launch after its current step. Return the number of its steps, or -1 if it failed.
  int64_t end() {
    stops_.store(true, std::memory_order_relaxed);
    std::unique_lock<std::mutex> lock(mutex_);
    ends_.wait(lock, [this] { return busy_ == 0; });
    return fails_.load(std::memory_order_relaxed) ? -1 : last_step_.load(std::memory_order_relaxed);
  }

  void execute(int32_t number) const {
    Scratch scratch;
    const int32_t* words = words_of(number);
    path_.kernels[words[0]](memory_, words, scratch);
  }

  // The number of steps of the launch whose tokens are known.
  int64_t steps_done() const {
    return ends_per_step_ == 0 ? 0 : step_ends_.load() / ends_per_step_;
  }

 private:
  void pin(int worker, const cpu_set_t& allowed) {
    int left = program_.first_core + worker;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (!CPU_ISSET(core, &allowed) || left-- > 0) continue;
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(core, &own);
      // Without permission the threads run where the system puts them.
      pthread_setaffinity_np(threads_[static_cast<size_t>(worker)].native_handle(), sizeof own,
                             &own);
      return;
    }
  }

  void work(int worker) {
    Worker own{{}, Delays(program_.delays + static_cast<uint64_t>(worker) * 0x9e3779b9)};
    for (int64_t seen = 0;; ++seen) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        begins_.wait(lock, [&] { return quits_ || launches_ > seen; });
        if (quits_) return;
      }
      run(worker, own);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ > 0) continue;
      steps_before_ += last_step_.load(std::memory_order_relaxed);
      ends_.notify_all();
    }
  }

  void run(int worker, Worker& state) {
    const int place = worker / program_.sharing;
    const int32_t* edges = program_.queue_offsets + program_.first_queue + place;
    const int32_t* queue = program_.queue_values + edges[0];
    const int64_t length = edges[1] - edges[0];
    if (length == 0) return;
    for (int64_t turn = 0;; ++turn) {
      const int64_t own =
          program_.sharing == 1
              ? turn
              : tickets_[static_cast<size_t>(place)].fetch_add(1, std::memory_order_relaxed);
      const int64_t step = own / length;
      if (!run_one(queue[own % length], step, state)) return;
    }
  }

  // Run an instruction; return false if the launch ends before it.
  bool run_one(int32_t number, int64_t step, Worker& worker) {
    const int64_t begin = times_ == nullptr ? 0 : now_ns();
    const int32_t* words = words_of(number);
    if (ended(step)) return false;
    fetch_weights(memory_, words);
    const int32_t* waits = program_.wait_offsets + number;
    for (int32_t at = waits[0]; at < waits[1]; ++at) {
      const int32_t counter = program_.wait_values[2 * at];
      const int64_t each = program_.totals[counter];
      const int64_t until = program_.wait_values[2 * at + 1] + (steps_before_ + step) * each;
      if (!comes(counter, until, step)) return false;
    }
    if (ended(step)) return false;
    const int64_t ready = times_ == nullptr ? 0 : now_ns();
    if (program_.delays != 0) delay(worker.delays.next_ns());
    worker.scratch.reset();
    path_.kernels[words[0]](memory_, words, worker.scratch);
    if (words[0] == TPC_OP_ARGMAX) end_step(words, step);
    const int32_t* signals = program_.signal_offsets + number;
    for (int32_t at = signals[0]; at < signals[1]; ++at)
      __atomic_fetch_add(counter_of(program_.signal_values[at]), 1, __ATOMIC_RELEASE);
    if (times_ != nullptr) {
      int64_t* time = times_ + 3 * int64_t{number};
      time[0] = begin, time[1] = ready, time[2] = now_ns();
    }
    return true;
  }

  // Note the end of a step: its tokens are known.
  void end_step(const int32_t* words, int64_t step) {
    if (stops_.load(std::memory_order_relaxed) || all_ended(words)) end_after(step);
    // Sequentially consistent, as in `wait`: either the waiter sees the step or this sees the wish.
    ++step_ends_;
    if (steps_done() < wanted_.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.notify_all();
  }

  bool ended(int64_t step) const { return step >= last_step_.load(std::memory_order_acquire); }

  void end_after(int64_t step) {
    int64_t last = last_step_.load(std::memory_order_relaxed);
    while (step + 1 < last &&
           !last_step_.compare_exchange_weak(last, step + 1, std::memory_order_release)) {
    }
  }

  bool all_ended(const int32_t* words) const {
    const auto& at = *reinterpret_cast<const tpc_argmax*>(words);
    for (int32_t b = 0; b < at.batch; ++b)
      if (memory_.at<int32_t>(at.finished)[b] == 0 && memory_.at<int32_t>(at.lengths)[b] != 0)
        return false;
    return true;
  }

  const int32_t* words_of(int32_t number) const {
    return program_.words + int64_t{number} * TPC_ROW_WORDS;
  }

  int64_t* counter_of(int32_t counter) const {
    return program_.counters + program_.own_row * program_.counter_stride + counter;
  }

  // The signals of all ranks: each has a row of counters.
  int64_t count(int32_t counter) const {
    int64_t found = 0;
    for (int64_t row = 0; row < program_.counter_rows; ++row)
      found += __atomic_load_n(program_.counters + row * program_.counter_stride + counter,
                               __ATOMIC_ACQUIRE);
    return found;
  }

  // Wait until a counter reaches a value; return false if the launch ends before that.
  bool comes(int32_t counter, int64_t until, int64_t step) {
    constexpr int kSpins = 4096, kClockEvery = 1024;
    const int patience = static_cast<int>(threads_.size()) > cores_ ? 16 : kSpins;
    int64_t deadline = 0;
    for (int64_t looks = 0; count(counter) < until; ++looks) {
      if (ended(step)) return false;
      if (looks < patience) {
        rest();
        continue;
      }
      sched_yield();
      if (looks % kClockEvery) continue;
      if (fails_.load(std::memory_order_relaxed)) return false;
      const int64_t time = now_ns();
      if (deadline == 0) deadline = time + static_cast<int64_t>(program_.timeout * 1e9);
      if (time > deadline) {
        give_up();
        return false;
      }
    }
    return true;
  }

  const tpc_program program_;
  const Path& path_;
  const Memory memory_;
  std::unique_ptr<std::atomic<int64_t>[]> tickets_;
  std::vector<std::thread> threads_;
  int cores_ = 1;
  std::mutex mutex_;
  std::condition_variable begins_, ends_;
  int64_t launches_ = 0;
  int busy_ = 0;
  bool quits_ = false;
  std::atomic<int64_t> last_step_{0};
  std::atomic<bool> stops_{false}, fails_{false};
  int64_t ends_per_step_ = 0;
  std::atomic<int64_t> step_ends_{0}, wanted_{INT64_MAX};
  int64_t steps_before_ = 0;
  int64_t* times_ = nullptr;
};

}  // namespace
}  // namespace tpc

extern "C" {

int32_t tpc_abi_version() { return TPC_ABI_VERSION; }

const char* tpc_path(int32_t place) {
  for (const tpc::Choice& choice : tpc::kPaths)
    if (choice.runs_here() && place-- == 0) return choice.path->name;
  return nullptr;
}

void* tpc_open(const tpc_program* program, const char* name) {
  const tpc::Path* path = tpc::path_named(name);
  if (!path) return nullptr;
  auto machine = std::make_unique<tpc::Machine>(*program, *path);
  return machine->start() ? machine.release() : nullptr;
}

void tpc_launch(void* machine, int64_t steps, int64_t* times) {
  static_cast<tpc::Machine*>(machine)->launch(steps, times);
}

int32_t tpc_wait(void* machine, int64_t milliseconds, int64_t wanted) {
  return static_cast<tpc::Machine*>(machine)->wait(milliseconds, wanted);
}

int64_t tpc_steps_done(void* machine) {
  return static_cast<tpc::Machine*>(machine)->steps_done();
}

void tpc_execute(void* machine, int32_t number) {
  static_cast<const tpc::Machine*>(machine)->execute(number);
}

void tpc_give_up(void* machine) { static_cast<tpc::Machine*>(machine)->give_up(); }

int64_t tpc_end(void* machine) { return static_cast<tpc::Machine*>(machine)->end(); }

double tpc_read(const char* name, const char* from, int64_t bytes, int32_t threads) {
  const tpc::Path* path = tpc::path_named(name);
  uint64_t (*read)(const char*, int64_t) = (path ? path : &tpc::portable)->read;
  std::atomic<uint64_t> found{0};
  const int64_t begin = tpc::now_ns(), part = bytes / threads;
  std::vector<std::thread> all;
  for (int32_t thread = 0; thread < threads; ++thread)
    all.emplace_back([&, thread] { found += read(from + thread * part, part); });
  for (std::thread& thread : all) thread.join();
  return static_cast<double>(tpc::now_ns() - begin) * 1e-9;
}

void tpc_close(void* machine) { delete static_cast<tpc::Machine*>(machine); }
}
