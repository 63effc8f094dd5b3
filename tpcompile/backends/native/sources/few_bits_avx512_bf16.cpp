// Weights of few bits on CPUs with AVX-512 and its dot products of bf16.
#include "few_bits_kernels.h"

const tpc::Kernels tpc::few_bits_avx512_bf16 = kTable;
