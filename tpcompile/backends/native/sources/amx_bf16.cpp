// The path for CPUs with AMX, whose other instructions are those of AVX-512 with bf16.
#include "path.h"
#include "prompts.h"

namespace tpc {

const Path amx_bf16 = make_path("amx_bf16", many_avx512_bf16);

}  // namespace tpc
