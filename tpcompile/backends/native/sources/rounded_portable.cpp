// Weights of few bits by values in int8 on any CPU, without target flags.
#include "few_bits_kernels.h"

TPC_TABLE(rounded_portable, TPC_ROUNDED_KINDS)
