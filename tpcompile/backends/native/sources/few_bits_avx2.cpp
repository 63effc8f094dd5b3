// Weights of few bits on CPUs with AVX2, FMA and F16C.
#include "few_bits_kernels.h"

const tpc::Kernels tpc::few_bits_avx2 = kTable;
