// The path for CPUs with AVX-512 and its dot products of bf16.
#include "path.h"
#include "prompts.h"

namespace tpc {

const Path avx512_bf16 = make_path("avx512_bf16", many_avx512_bf16);

}  // namespace tpc
