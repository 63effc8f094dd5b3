// The threads of OpenMP, asleep while a launch runs.
//
// After a parallel region the threads of OpenMP, which torch uses, spin for some milliseconds. On
// the cores of the workers they would slow down a launch. They do not spin while a region lasts, so
// the caller of a launch waits inside a region in which all other threads sleep.
#include <dlfcn.h>

#include <condition_variable>
#include <mutex>

#include "interface.h"

namespace {

// The functions of the OpenMP library in this process, if there is one.
struct OpenMp {
  template <class F>
  static F* find(const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
  }

  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) =
      find<void(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel");
  int (*thread)() = find<int()>("omp_get_thread_num");
  int (*threads)() = find<int()>("omp_get_max_threads");
  int (*inside)() = find<int()>("omp_in_parallel");

  bool usable() const {
    return parallel != nullptr && thread != nullptr && threads != nullptr && inside != nullptr &&
           threads() > 1 && !inside();
  }
};

const OpenMp& open_mp() {
  static const OpenMp found;
  return found;
}

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
