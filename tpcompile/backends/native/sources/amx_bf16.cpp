// The path for CPUs with AMX, whose other instructions are those of AVX-512 with bf16.
#include "interface.h"
#include "path.h"

extern "C" const void* tpc_amx_bf16() {
  static constexpr tpc::Path kPath =
      make_path("amx_bf16", tpc::few_bits_avx512_bf16, tpc::rounded_avx512_bf16);
  return &kPath;
}
