// The kernels of weights of few bits, a table for each path.
#pragma once

#include "machine.h"

namespace tpc {

extern const Kernels few_bits_avx512_bf16, few_bits_avx512_vnni, few_bits_avx2, few_bits_portable;

}  // namespace tpc
