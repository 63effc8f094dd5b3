// The path for CPUs with AVX-512 and its dot products of bf16.
#include "interface.h"
#include "path.h"

extern "C" const void* tpc_avx512_bf16() {
  static constexpr tpc::Path kPath =
      make_path("avx512_bf16", tpc::few_bits_avx512_bf16, tpc::rounded_avx512_bf16);
  return &kPath;
}
