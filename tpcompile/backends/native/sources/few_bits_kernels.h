// The kernels of weights of few bits of one vector path.
#pragma once

#include "few_bits.h"
#include "kernels.h"

namespace {

#define TPC_FEW_KINDS(S, OP, name, Model)                                             \
  TPC_OF_KIND(OP, S, TPC_KIND_INT8, Model, name<Few<S>>),                             \
      TPC_OF_KIND(OP, S, TPC_KIND_INT4, Model, name<Few<S>>),                         \
      TPC_OF_KIND(OP, S, TPC_KIND_INT8 | tpc::kRoundsValues, Model, name<Rounds<S>>), \
      TPC_OF_KIND(OP, S, TPC_KIND_INT4 | tpc::kRoundsValues, Model, name<Rounds<S>>)

constexpr tpc::TypedKernel kFewBits[] = {TPC_READERS_OF_WEIGHTS(TPC_FEW_KINDS)};
constexpr tpc::Kernels kTable = {kFewBits, sizeof kFewBits / sizeof *kFewBits};

}  // namespace
