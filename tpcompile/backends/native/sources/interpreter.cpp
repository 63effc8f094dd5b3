// The interpreter: worker threads that take instructions from queues, wait for counters and signal
// them. The functions of the C interface are at the end.
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "board.h"
#include "checks.h"
#include "clocks.h"
#include "cores.h"
#include "interface.h"
#include "machine.h"

namespace tpc {

namespace {

// Fetch an instruction's first weights into the second cache: no instruction writes them.
void fetch_weights(const char* weights) {
  constexpr int64_t kBytes = 1 << 16;
  for (int64_t offset = 0; weights != nullptr && offset < kBytes; offset += 64)
    __builtin_prefetch(weights + offset, 0, 2);
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
    uint64_t bits = state_ += 0x9e3779b97f4a7c15;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    return bits ^ (bits >> 31);
  }

  uint64_t state_;
};

// Let other threads run for some time.
void delay(int64_t ns) {
  for (const int64_t end = now_ns() + ns; now_ns() < end;) sched_yield();
}

// The time that a wait usually takes, from earlier waits.
class Usual {
 public:
  void add(int64_t ns) { usual_ns_ += (std::min(ns, kMostNs) - usual_ns_) / 8; }

  // The time to poll before looking for the reason of a wait.
  int64_t patience_ns() const { return kLeastNs + 2 * usual_ns_; }

 private:
  static constexpr int64_t kLeastNs = 10000, kMostNs = 100000;
  int64_t usual_ns_ = 0;
};

// The private state of a worker.
struct Worker {
  int number;
  Seat& seat;
  Delays delays;
  Scratch scratch{};
  Usual usual{};
  CoreTime core_time{};
};

// An instruction that a worker has taken from its queue.
struct Turn {
  int64_t ticket, step;
  int32_t number;
};

// Steps and tickets are counted from the start of the machine, as counters are: none of them is
// ever cleared, so a worker may wait with an instruction of the next launch.
class Machine {
 public:
  Machine(const tpc_program& program, std::vector<Kernel> kernels)
      : program_(program),
        kernels_(std::move(kernels)),
        memory_{program.buffers},
        bell_(*static_cast<Bell*>(program.board)),
        seats_(reinterpret_cast<Seat*>(&bell_ + 1)),
        workers_(program.queues * program.sharing),
        tickets_(new Ticket[static_cast<size_t>(program.queues)]),
        done_(new Done[static_cast<size_t>(workers_)]) {
    const int32_t* edges = program.queue_offsets + program.first_queue;
    instructions_ = edges[program.queues] - edges[0];
    for (int32_t place = edges[0]; place < edges[program.queues]; ++place)
      if (words_of(program.queue_values[place])[0] == TPC_OP_ARGMAX) ++ends_per_step_;
  }

  ~Machine() {
    quits_.store(true);
    bell_.ring();
    for (std::thread& thread : threads_) thread.join();
  }

  // Start the threads; return false if the system refuses one.
  bool start() {
    try {
      for (int worker = 0; worker < workers_; ++worker)
        threads_.emplace_back([this, worker] { work(worker); });
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

  void launch(int64_t steps, int64_t* times) {
    begin_ = limit_.load();
    stops_.store(false);
    times_ = times;
    step_ends_.store(0);
    limit_.store(begin_ + steps);
    bell_.ring();
  }

  // Wait at most `milliseconds` until a launch ends or has done `wanted` steps. Return whether it
  // has ended.
  bool wait(int64_t milliseconds, int64_t wanted) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_.store(wanted);
    ends_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                   [&] { return over() || steps_done() >= wanted; });
    wanted_.store(INT64_MAX);
    return over();
  }

  void give_up() {
    fails_.store(true);
    bell_.ring();
    tell();
  }

  // End a launch after its current step. Return the number of its steps, or -1 if it failed.
  int64_t end() {
    stops_.store(true, std::memory_order_relaxed);
    std::unique_lock<std::mutex> lock(mutex_);
    ends_.wait(lock, [this] { return over(); });
    return fails_.load() ? -1 : limit_.load() - begin_;
  }

  void execute(int32_t number) const {
    Scratch scratch;
    kernels_[static_cast<size_t>(number)](memory_, words_of(number), scratch);
  }

  // The number of steps of the launch whose tokens are known.
  int64_t steps_done() const {
    return ends_per_step_ == 0 ? 0 : step_ends_.load() / ends_per_step_;
  }

 private:
  void work(int number) {
    Worker worker{number, take_seat(number),
                  Delays(program_.delays + static_cast<uint64_t>(number) * 0x9e3779b9)};
    const int32_t* edges = program_.queue_offsets + program_.first_queue + queue_of(worker);
    if (edges[0] == edges[1]) return;
    Turn turn = claim_next(worker);
    while (!ends()) {
      int64_t taken = now_if_timed();
      const bool may_start = ready(turn) || comes(turn, worker, taken);
      int64_t claim = turn.ticket + 1;
      const bool claimed = may_start && worker.seat.claim.compare_exchange_strong(claim, 0);
      const Turn next = ends() ? turn : claim_next(worker);
      if (claimed) run(turn, next, worker, taken);
      turn = next;
    }
  }

  int queue_of(const Worker& worker) const { return worker.number / program_.sharing; }

  // Claim the next instruction of the queue. A worker claims before it runs an instruction: the
  // prefetches at its end go on with the next weights.
  Turn claim_next(Worker& worker) {
    const int queue = queue_of(worker);
    Ticket& tickets = tickets_[static_cast<size_t>(queue)];
    const Turn turn = turn_of(queue, tickets.next.fetch_add(1, std::memory_order_relaxed));
    worker.seat.claim.store(turn.ticket + 1);
    return turn;
  }

  // Describe the thread of a worker on the board, and pin it if each worker can have a core.
  Seat& take_seat(int number) {
    const int place = program_.first_worker + number;
    Seat& seat = seats_[place];
    clockid_t clock = 0;
    pthread_getcpuclockid(pthread_self(), &clock);
    seat.clock.store(clock);
    seat.core.store(-1);
    seat.thread.store(static_cast<int32_t>(syscall(SYS_gettid)));
    if (program_.workers == cores_.count()) cores_.pin(seat, place);
    prefer_short_slices();
    seat.state.store(Seat::kWaits);
    return seat;
  }

  // Whether workers share queues: then no queue orders instructions, and any worker may run one.
  bool shares() const { return program_.sharing > 1; }

  Turn turn_of(int queue, int64_t ticket) const {
    const int32_t* edges = program_.queue_offsets + program_.first_queue + queue;
    const int64_t length = edges[1] - edges[0];
    return {ticket, ticket / length, program_.queue_values[edges[0] + ticket % length]};
  }

  // Whether an instruction may start.
  bool ready(const Turn& turn) const {
    if (turn.step >= limit_.load(std::memory_order_acquire)) return false;
    const int32_t* waits = program_.wait_offsets + turn.number;
    for (int32_t place = waits[0]; place < waits[1]; ++place) {
      const int32_t counter = program_.wait_values[2 * place];
      const int64_t total = program_.totals[counter];
      if (count(counter) < program_.wait_values[2 * place + 1] + turn.step * total) return false;
    }
    // The step before this one may have been the last: it says so before its last signal.
    return turn.step < limit_.load(std::memory_order_acquire);
  }

  int64_t now_if_timed() const {
    return times_.load(std::memory_order_relaxed) == nullptr ? 0 : now_ns();
  }

  void run(const Turn& turn, const Turn& next, Worker& worker, int64_t taken) {
    const int64_t start = now_if_timed();
    worker.seat.state.store(Seat::kRuns, std::memory_order_relaxed);
    worker.scratch.next_weights = weights_of(next.number);
    worker.scratch.next_scales = nullptr;
    const int32_t* words = words_of(turn.number);
    if (program_.delays != 0) delay(worker.delays.next_ns());
    worker.scratch.begin(program_.families[turn.number], turn.step);
    kernels_[static_cast<size_t>(turn.number)](memory_, words, worker.scratch);
    if (words[0] == TPC_OP_ARGMAX) end_step(words, turn.step);
    if (int64_t* times = times_.load(std::memory_order_relaxed)) {
      int64_t* time = times + 3 * int64_t{turn.number};
      time[0] = taken, time[1] = start, time[2] = now_ns();
    }
    const int32_t* signals = program_.signal_offsets + turn.number;
    for (int32_t place = signals[0]; place < signals[1]; ++place)
      __atomic_fetch_add(counter_of(program_.signal_values[place]), 1, __ATOMIC_SEQ_CST);
    worker.seat.state.store(Seat::kWaits, std::memory_order_relaxed);
    done_[static_cast<size_t>(worker.number)].instructions.fetch_add(1);
    if (bell_.has_sleepers() && completes(turn)) bell_.ring();
  }

  // Whether a counter that an instruction signals has all signals of its step. Workers that wait
  // for fewer signals poll again after a while.
  bool completes(const Turn& turn) const {
    const int32_t* signals = program_.signal_offsets + turn.number;
    return std::any_of(program_.signal_values + signals[0], program_.signal_values + signals[1],
                       [&](int32_t counter) {
                         return count(counter) >= (turn.step + 1) * program_.totals[counter];
                       });
  }

  // Note the end of a step: its tokens are known.
  void end_step(const int32_t* words, int64_t step) {
    if (stops_.load(std::memory_order_relaxed) || all_ended(words)) end_after(step);
    // Sequentially consistent, as in `wait`: either the waiter sees the step or this sees the wish.
    ++step_ends_;
    if (steps_done() >= wanted_.load()) tell();
  }

  void end_after(int64_t step) {
    int64_t last = limit_.load();
    while (step + 1 < last && !limit_.compare_exchange_weak(last, step + 1)) {
    }
  }

  bool all_ended(const int32_t* words) const {
    const auto& operands = *reinterpret_cast<const tpc_argmax*>(words);
    for (int32_t b = 0; b < operands.batch; ++b)
      if (memory_.at<int32_t>(operands.finished)[b] == 0 &&
          memory_.at<int32_t>(operands.lengths)[b] != 0)
        return false;
    return true;
  }

  // Wake the caller that waits for a launch.
  void tell() {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.notify_all();
  }

  // Whether no instruction of a launch is left, or it has failed.
  bool over() const {
    int64_t done = 0;
    for (int worker = 0; worker < workers_; ++worker)
      done += done_[static_cast<size_t>(worker)].instructions.load();
    return fails_.load() || done >= limit_.load() * instructions_;
  }

  const int32_t* words_of(int32_t number) const {
    return program_.words + int64_t{number} * TPC_ROW_WORDS;
  }

  // The address of the weights that an instruction reads first, or null.
  const char* weights_of(int32_t number) const {
    return reinterpret_cast<const char*>(program_.weights[number]);
  }

  int64_t* counter_of(int32_t counter) const {
    return program_.counters + program_.own_row * program_.counter_stride + counter;
  }

  // The signals of all ranks: each has a row of counters.
  int64_t count(int32_t counter) const {
    int64_t signals = 0;
    for (int64_t row = 0; row < program_.counter_rows; ++row)
      signals += __atomic_load_n(program_.counters + row * program_.counter_stride + counter,
                                 __ATOMIC_SEQ_CST);
    return signals;
  }

  // Whether the threads must end.
  bool ends() const {
    return quits_.load(std::memory_order_relaxed) || fails_.load(std::memory_order_relaxed);
  }

  // Wait until an instruction may start; return false if the machine ends before, and if another
  // worker has taken it. If the worker does anything else meanwhile, `taken` is the time after it.
  //
  // A worker first polls for as long as its waits usually take. Then it looks for the reason: it
  // runs an instruction that a worker without a core waits with, or gives its own core to a worker
  // that has none. It sleeps if other programs want its core, or after a long time.
  bool comes(const Turn& turn, Worker& worker, int64_t& taken) {
    constexpr int kPolls = 16;
    while (shares() && helps(turn, worker, Seat::kRuns)) {
      taken = now_if_timed();
      if (ready(turn)) return true;
    }
    if (turn.step < limit_.load()) fetch_weights(weights_of(turn.number));
    int64_t begin = now_ns(), look = begin + worker.usual.patience_ns();
    worker.seat.lost.store(worker.core_time.lost(begin), std::memory_order_relaxed);
    for (int64_t polls = 1; !ready(turn); ++polls) {
      if (ends()) return false;
      if (turn.step >= limit_.load() && over()) {
        tell();
        sleep(worker, -1, [&] { return turn.step < limit_.load() || ends(); });
        cores_.pin_again(worker.seat);
        taken = now_if_timed();
        begin = now_ns(), look = begin + worker.usual.patience_ns();
        continue;
      }
      rest();
      if (polls % kPolls) continue;
      const int64_t now = now_ns();
      if (now < look) continue;
      if (worker.seat.claim.load() == 0) return false;
      if (now - begin > static_cast<int64_t>(program_.timeout * 1e9)) give_up();
      if (shares() && helps(turn, worker, Seat::kSleeps)) {
        taken = now_if_timed();
        begin = now_ns(), look = begin + worker.usual.patience_ns();
      } else if (gives_core(worker, now - begin)) {
        // On a busy core: time not used now lets this worker start soon when it wakes up.
        sleep(worker, kNapNs, [&] { return ready(turn) || ends(); });
      } else if (now - begin < kPollNs && worker.core_time.lost(now) <= kLittleLost &&
                 workers_ <= cores_.count()) {
        look = now + worker.usual.patience_ns();
      } else {
        sleep(worker, kNapNs, [&] { return ready(turn) || ends(); });
      }
    }
    worker.usual.add(now_ns() - begin);
    return true;
  }

  template <class Met>
  void sleep(Worker& worker, int64_t ns, const Met& met) {
    const int64_t begin = now_ns();
    worker.seat.state.store(Seat::kSleeps);
    bell_.sleep(ns, met);
    worker.seat.state.store(Seat::kWaits);
    worker.core_time.slept(now_ns() - begin);
  }

  // Run an instruction that another worker of the queue claims, if one may start and the other
  // worker is in this state or a busier one.
  bool helps(const Turn& next, Worker& worker, int32_t state) {
    const int queue = queue_of(worker), first = queue * program_.sharing;
    for (int number = first; number < first + program_.sharing; ++number) {
      Seat& seat = seats_[program_.first_worker + number];
      int64_t claim = seat.claim.load();
      if (number == worker.number || claim == 0 || seat.state.load() < state) continue;
      const Turn turn = turn_of(queue, claim - 1);
      if (!ready(turn) || !seat.claim.compare_exchange_strong(claim, 0)) continue;
      run(turn, next, worker, now_if_timed());
      return true;
    }
    return false;
  }

  // Exchange cores with a worker that has no core, after so long a wait.
  bool gives_core(Worker& worker, int64_t waited_ns) {
    if (worker.seat.core.load() < 0) return false;
    for (int place = 0; place < program_.workers; ++place) {
      Seat& seat = seats_[place];
      const int32_t state = seat.state.load();
      if (&seat == &worker.seat || state == Seat::kSleeps) continue;
      const int number = place - program_.first_worker;
      const bool is_local = 0 <= number && number < workers_;
      if (is_local && shares() && state == Seat::kWaits) continue;  // others can take its claim
      // No clock tells whether a worker of another process has a core. If other programs take much
      // of a core, a long wait tells; if they take little, an exchange costs more than it gains.
      const bool shared = worker.seat.lost.load() + seat.lost.load() > kMuchLost;
      const bool has_core = is_local ? runs(seat.clock.load()) : !shared || waited_ns < kStrangerNs;
      if (has_core) continue;
      const int64_t begin = now_ns();
      if (!Cores::exchange(bell_, worker.seat, seat)) continue;
      worker.core_time.slept(std::min(now_ns() - begin, kExchangeNs));
      return true;
    }
    return false;
  }

  // In per cent of the time in which a worker wanted a core, and of two workers together.
  static constexpr int kLittleLost = 7, kMuchLost = 30;
  static constexpr int64_t kPollNs = 1000000, kNapNs = 500000, kStrangerNs = 100000,
                           kExchangeNs = 200000;  // more than it takes if no core is busy

  struct alignas(64) Ticket {
    std::atomic<int64_t> next{0};
  };

  struct alignas(64) Done {
    std::atomic<int64_t> instructions{0};
  };

  const tpc_program program_;
  const std::vector<Kernel> kernels_;  // by instruction
  const Memory memory_;
  const Cores cores_;
  Bell& bell_;
  Seat* const seats_;  // of all ranks
  const int workers_;
  std::unique_ptr<Ticket[]> tickets_;
  std::unique_ptr<Done[]> done_;  // by worker
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable ends_;
  std::atomic<bool> quits_{false}, stops_{false}, fails_{false};
  std::atomic<int64_t> limit_{0};  // the number of steps of all launches
  int64_t begin_ = 0;              // the number of steps before the launch
  int64_t instructions_ = 0, ends_per_step_ = 0;
  std::atomic<int64_t> step_ends_{0}, wanted_{INT64_MAX};
  std::atomic<int64_t*> times_{nullptr};
};

}  // namespace
}  // namespace tpc

extern "C" {

int32_t tpc_abi_version() { return TPC_ABI_VERSION; }

void* tpc_open(const tpc_program* program, const void* path) {
  std::vector<tpc::Kernel> kernels;
  if (tpc::refuses(program, static_cast<const tpc::Path*>(path), kernels)) return nullptr;
  auto machine = std::make_unique<tpc::Machine>(*program, std::move(kernels));
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

void tpc_close(void* machine) { delete static_cast<tpc::Machine*>(machine); }
}
