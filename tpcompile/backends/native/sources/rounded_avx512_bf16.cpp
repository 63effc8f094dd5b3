// Weights of few bits by values in int8 on CPUs with AVX-512 and its dot products of bf16.
#include "few_bits_kernels.h"

TPC_TABLE(rounded_avx512_bf16, TPC_ROUNDED_KINDS)
