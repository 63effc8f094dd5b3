// Operations on many tokens, on the threads that torch uses.
#include "prompts.h"

#include <atomic>

#include "interface.h"
#include "open_mp.h"

namespace {

struct Work {
  tpc::ManyKernel kernel;
  const void* arguments;
  int64_t items, grain;
  std::atomic<int64_t> next{0};

  void run() {
    thread_local tpc::Scratch scratch;  // pages that are new each time would be cleared each time
    scratch.reset();
    for (int64_t first; (first = next.fetch_add(grain)) < items; scratch.reset())
      kernel(arguments, first, first + grain < items ? first + grain : items, scratch);
  }
};

void run(void* work) { static_cast<Work*>(work)->run(); }

// Whether the blocks of a sequence contain the tokens that its new ones see, and are in the cache.
bool in_cache(const tpc::Attention& a, int64_t sequence) {
  const int64_t count = a.starts[sequence + 1] - a.starts[sequence];
  const int64_t length = a.lengths[sequence], oldest = length - count + 1 - a.window;
  if (count == 0) return true;
  if (count < 0 || length < count || length > a.columns * a.block) return false;
  const int64_t* table = a.tables + sequence * a.table_stride;
  const int64_t first = a.window > 0 && oldest > 0 ? oldest / a.block : 0;
  for (int64_t place = first; place * a.block < length; ++place)
    if (table[place] < 0 || table[place] >= a.slots / a.block) return false;
  return true;
}

}  // namespace

// Return whether all blocks that attention reads are in the cache.
extern "C" int32_t tpc_reads_cache(const void* arguments) {
  const auto& a = *static_cast<const tpc::Attention*>(arguments);
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence)
    if (!in_cache(a, sequence)) return 0;
  return 1;
}

// Return whether all slots that are written are among the first `slots`.
extern "C" int32_t tpc_writes_cache(const int64_t* written, int64_t count, int64_t slots) {
  for (int64_t place = 0; place < count; ++place)
    if (written[place] < 0 || written[place] >= slots) return 0;
  return 1;
}

// Return whether the states that sequences with new tokens read and write are among the first
// `states`.
extern "C" int32_t tpc_has_states(const void* arguments, int64_t states) {
  const auto& a = *static_cast<const tpc::Sequences*>(arguments);
  for (int64_t sequence = 0; sequence < a.count; ++sequence) {
    const int64_t count = a.starts[sequence + 1] - a.starts[sequence];
    const auto exists = [&](int64_t state) { return state >= 0 && state < states; };
    const bool resumes = a.lengths[sequence] > count;
    if (count > 0 && !(exists(a.write[sequence]) && (!resumes || exists(a.read[sequence]))))
      return 0;
  }
  return 1;
}

extern "C" void tpc_many(const void* prompts, int32_t operation, const void* arguments,
                         int64_t items, int64_t grain, int32_t threads) {
  Work work{static_cast<const tpc::ManyKernel*>(prompts)[operation], arguments, items, grain};
  const OpenMp& threads_of = open_mp();
  if (threads > 1 && items > grain && threads_of.usable())
    threads_of.parallel(run, &work, static_cast<unsigned>(threads), 0);
  else
    work.run();
}
