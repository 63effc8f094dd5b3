// Weights of few bits by values in int8 on CPUs with AVX2, FMA and F16C.
#include "few_bits_kernels.h"

TPC_TABLE(rounded_avx2, TPC_ROUNDED_KINDS)
