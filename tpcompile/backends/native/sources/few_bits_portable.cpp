// Weights of few bits on any CPU, without target flags.
#include "few_bits_kernels.h"

const tpc::Kernels tpc::few_bits_portable = kTable;
