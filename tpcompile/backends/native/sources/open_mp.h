// The OpenMP library in this process, which torch uses, found when the library is loaded.
#pragma once

#include <dlfcn.h>

namespace {

// Its functions, if there is one.
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

inline const OpenMp& open_mp() {
  static const OpenMp functions;
  return functions;
}

}  // namespace
