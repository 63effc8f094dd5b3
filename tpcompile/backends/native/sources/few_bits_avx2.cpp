// Weights of few bits on CPUs with AVX2, FMA and F16C.
#include "few_bits_kernels.h"

TPC_TABLE(few_bits_avx2, TPC_FEW_KINDS)
