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
    tpc::Scratch scratch;
    for (int64_t first; (first = next.fetch_add(grain)) < items;)
      kernel(arguments, first, first + grain < items ? first + grain : items, scratch);
  }
};

void run(void* work) { static_cast<Work*>(work)->run(); }

}  // namespace

extern "C" void tpc_many(int32_t operation, const void* arguments, int64_t items, int64_t grain,
                         int32_t threads) {
  Work work{tpc::many_kernels[operation], arguments, items, grain};
  const OpenMp& threads_of = open_mp();
  if (threads > 1 && items > grain && threads_of.usable())
    threads_of.parallel(run, &work, static_cast<unsigned>(threads), 0);
  else
    work.run();
}
