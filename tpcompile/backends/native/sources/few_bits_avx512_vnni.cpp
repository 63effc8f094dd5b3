// Weights of few bits on CPUs with AVX-512 and its products of integers.
#include "few_bits_kernels.h"

TPC_TABLE(few_bits_avx512_vnni, TPC_FEW_KINDS)
