// The kernels of one vector path. Each path has source files with target flags of its own.
#pragma once

#include "few_bits.h"
#include "kernels.h"

namespace {

#define TPC_WHOLE_KINDS(S, OP, name, Model)             \
  TPC_OF_KIND(OP, S, kDType<S>, Model, name<Dense<S>>), \
      TPC_OF_KIND(OP, S, TPC_KIND_FP8, Model, name<Floats<S>>)

// All combinations of types that instructions may have, except for integers of few bits.
constexpr tpc::TypedKernel kKernels[] = {
    TPC_READERS_OF_WEIGHTS(TPC_WHOLE_KINDS),
    TPC_READER(PARTIAL_ATTENTION, partial_attention),
    TPC_DENSE(ATTENTION_REDUCE, attention_reduce),
    TPC_DENSE(DELTA_STEP, delta_step),
    TPC_DENSE(TOP_EXPERTS, top_experts),
    TPC_DENSE(ALL_REDUCE, all_reduce),
    {TPC_OP_ARGMAX, {}, argmax},
};

constexpr tpc::Path make_path(const char* name, const tpc::Kernels& few_bits,
                              const tpc::Kernels& rounded) {
  return {name, read_all, {kKernels, sizeof kKernels / sizeof *kKernels}, &few_bits, &rounded};
}

}  // namespace
