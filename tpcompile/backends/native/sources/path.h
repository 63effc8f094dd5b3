// The kernels of one vector path. Each path has a source file with target flags of its own.
#pragma once

#include "attention.h"
#include "embed.h"
#include "head.h"
#include "mlp.h"
#include "project.h"
#include "qkv.h"
#include "read.h"
#include "reduce.h"

namespace {

using tpc::Kernel;

// The types of a model with one dtype.
template <class S>
using Dense = Types<S, Plain<S>, S, S>;

// Run the instantiation of a kernel for a dtype.
template <Kernel kF32, Kernel kBf16, Kernel kF16>
TPC_INLINE void run_for(int64_t dtype, const Memory& memory, const int32_t* words,
                        Scratch& scratch) {
  if (dtype == TPC_DTYPE_BF16)
    kBf16(memory, words, scratch);
  else if (dtype == TPC_DTYPE_F16)
    kF16(memory, words, scratch);
  else
    kF32(memory, words, scratch);
}

// For instructions with the operand `dtype`.
template <class Words, Kernel kF32, Kernel kBf16, Kernel kF16>
void by_operand(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const int64_t dtype = reinterpret_cast<const Words*>(words)->dtype;
  run_for<kF32, kBf16, kF16>(dtype, memory, words, scratch);
}

// For instructions whose dtype is that of the buffer `out`.
template <class Words, Kernel kF32, Kernel kBf16, Kernel kF16>
void by_result(const Memory& memory, const int32_t* words, Scratch& scratch) {
  const int64_t dtype = memory.buffers[reinterpret_cast<const Words*>(words)->out].dtype;
  run_for<kF32, kBf16, kF16>(dtype, memory, words, scratch);
}

#define TPC_KERNEL(how, name) \
  how<tpc_##name, name<Dense<f32>>, name<Dense<bf16>>, name<Dense<f16>>>

constexpr tpc::Path make_path(const char* name, const tpc::ManyKernel* many = nullptr) {
  tpc::Path path{name, read_all, many, {}};
  path.kernels[TPC_OP_EMBED] = TPC_KERNEL(by_operand, embed);
  path.kernels[TPC_OP_NORM_QKV_ROPE_APPEND] = TPC_KERNEL(by_operand, norm_qkv_rope_append);
  path.kernels[TPC_OP_NORM_QKV_ROWS] = TPC_KERNEL(by_operand, norm_qkv_rows);
  path.kernels[TPC_OP_PARTIAL_ATTENTION] = TPC_KERNEL(by_operand, partial_attention);
  path.kernels[TPC_OP_ATTENTION_REDUCE] = TPC_KERNEL(by_result, attention_reduce);
  path.kernels[TPC_OP_LINEAR_RESIDUAL] = TPC_KERNEL(by_operand, linear_residual);
  path.kernels[TPC_OP_LINEAR_TERMS] = TPC_KERNEL(by_operand, linear_terms);
  path.kernels[TPC_OP_ALL_REDUCE] = TPC_KERNEL(by_result, all_reduce);
  path.kernels[TPC_OP_NORM_GATE_UP_SWIGLU] = TPC_KERNEL(by_operand, norm_gate_up_swiglu);
  path.kernels[TPC_OP_NORM_LM_HEAD] = TPC_KERNEL(by_operand, norm_lm_head);
  path.kernels[TPC_OP_ARGMAX] = argmax;
  return path;
}

}  // namespace
