// The threads of OpenMP, asleep while a launch runs.
//
// After a parallel region the threads of OpenMP, which torch uses, spin for some milliseconds. On
// the cores of the workers they would slow down a launch. They do not spin while a region lasts, so
// the caller of a launch waits inside a region in which all other threads sleep.
#include <condition_variable>
#include <mutex>

#include "interface.h"
#include "open_mp.h"

namespace {

struct Region {
  void (*const wait)();
  std::mutex mutex;
  std::condition_variable ends;
  bool ended = false;
};

void run(void* data) {
  auto& region = *static_cast<Region*>(data);
  if (open_mp().thread() == 0) {
    region.wait();
    std::lock_guard<std::mutex> lock(region.mutex);
    region.ended = true;
    region.ends.notify_all();
  } else {
    std::unique_lock<std::mutex> lock(region.mutex);
    region.ends.wait(lock, [&] { return region.ended; });
  }
}

}  // namespace

extern "C" void tpc_asleep(void (*wait)()) {
  if (!open_mp().usable()) return wait();
  Region region{wait, {}, {}, false};
  open_mp().parallel(run, &region, 0, 0);
}
