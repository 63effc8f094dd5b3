// Weights of few bits on any CPU, without target flags.
#include "few_bits_kernels.h"

TPC_TABLE(few_bits_portable, TPC_FEW_KINDS)
