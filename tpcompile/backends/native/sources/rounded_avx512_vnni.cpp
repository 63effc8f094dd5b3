// Weights of few bits by values in int8 on CPUs with AVX-512 and its products of integers.
#include "few_bits_kernels.h"

TPC_TABLE(rounded_avx512_vnni, TPC_ROUNDED_KINDS)
