// The path for CPUs with AVX-512 and its dot products of integers, but not those of bf16.
#include "interface.h"
#include "path.h"

extern "C" const void* tpc_avx512_vnni() {
  static constexpr tpc::Path kPath =
      make_path("avx512_vnni", tpc::few_bits_avx512_vnni, tpc::rounded_avx512_vnni);
  return &kPath;
}
