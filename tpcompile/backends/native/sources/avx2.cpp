// The path for CPUs with AVX2, FMA and F16C.
#include "path.h"
#include "prompts.h"

namespace tpc {

const Path avx2 = make_path("avx2", many_avx2);

}  // namespace tpc
