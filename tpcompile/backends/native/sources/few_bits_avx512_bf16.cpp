// Weights of few bits on CPUs with AVX-512 and its dot products of bf16.
#include "few_bits_kernels.h"

TPC_TABLE(few_bits_avx512_bf16, TPC_FEW_KINDS)
