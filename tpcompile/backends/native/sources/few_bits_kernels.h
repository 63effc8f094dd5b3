// The kernels of weights of few bits of one vector path. Kernels that round values to int8 are
// compiled on their own, so that two cores share the work.
#pragma once

#include "few_bits.h"
#include "kernels.h"

#define TPC_FEW_KINDS(S, OP, name, Model)                 \
  TPC_OF_KIND(OP, S, TPC_KIND_INT8, Model, name<Few<S>>), \
      TPC_OF_KIND(OP, S, TPC_KIND_INT4, Model, name<Few<S>>)
#define TPC_ROUNDED_KINDS(S, OP, name, Model)                                     \
  TPC_OF_KIND(OP, S, TPC_KIND_INT8 | tpc::kRoundsValues, Model, name<Rounds<S>>), \
      TPC_OF_KIND(OP, S, TPC_KIND_INT4 | tpc::kRoundsValues, Model, name<Rounds<S>>)

// Define the table of some kinds.
#define TPC_TABLE(table, KINDS)                                                   \
  static constexpr tpc::TypedKernel kTyped[] = {TPC_READERS_OF_WEIGHTS(KINDS)}; \
  const tpc::Kernels tpc::table = {kTyped, sizeof kTyped / sizeof *kTyped};
