// The path for CPUs with AVX2, FMA and F16C.
#include "interface.h"
#include "path.h"

extern "C" const void* tpc_avx2() {
  static constexpr tpc::Path kPath = make_path("avx2", tpc::few_bits_avx2, tpc::rounded_avx2);
  return &kPath;
}
