// The kernels of weights of few bits, two tables per path; those of `rounded` round values to int8.
#pragma once

#include "machine.h"

namespace tpc {

extern const Kernels few_bits_avx512_bf16, few_bits_avx512_vnni, few_bits_avx2, few_bits_portable;
extern const Kernels rounded_avx512_bf16, rounded_avx512_vnni, rounded_avx2, rounded_portable;

}  // namespace tpc
