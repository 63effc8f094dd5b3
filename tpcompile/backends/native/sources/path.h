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

// The types of a model with one dtype.
template <class S>
using Dense = Types<S, Plain<S>, S, S>;

// The same with weights of few bits in its linears, whose values are rounded to int8 or not.
template <class S>
using Few = Types<S, Grouped, S, S>;
template <class S>
using Rounds = Types<S, Rounding, S, S>;

// The same with weights of 8-bit floating point.
template <class S>
using Floats = Types<S, Float8, S, S>;

template <class T>
constexpr tpc::Dtypes dtypes_of() {
  return {kDType<typename T::Value>, T::Weight::kFormat, kDType<typename T::Vector>,
          kDType<typename T::Cache>};
}

// The types of a model with one dtype and a KV cache in int8.
template <class S>
using Eight = Types<S, Plain<S>, S, scaled8>;

// A kernel for some types.
#define TPC_KERNEL(OP, name, types) {TPC_OP_##OP, dtypes_of<types>(), name<types>}
#define TPC_DENSE(OP, name)                                              \
  TPC_KERNEL(OP, name, Dense<f32>), TPC_KERNEL(OP, name, Dense<bf16>), \
      TPC_KERNEL(OP, name, Dense<f16>)
// Kernels of attention, which reads a cache in any format.
#define TPC_READER(OP, name)                                                       \
  TPC_DENSE(OP, name), TPC_KERNEL(OP, name, Eight<f32>),                           \
      TPC_KERNEL(OP, name, Eight<bf16>), TPC_KERNEL(OP, name, Eight<f16>)
// Kernels of linears and embeddings, whose weights may have few bits, in models of dtype S with a
// cache of type C.
#define TPC_OF_KIND(OP, S, arithmetic, C, run) \
  {TPC_OP_##OP, {kDType<S>, arithmetic, kDType<S>, kDType<C>}, run}
#define TPC_KINDS(OP, name, S, C)                                                     \
  TPC_OF_KIND(OP, S, kDType<S>, C, name<Dense<S>>),                                   \
      TPC_OF_KIND(OP, S, TPC_KIND_FP8, C, name<Floats<S>>),                           \
      TPC_OF_KIND(OP, S, TPC_KIND_INT8, C, name<Few<S>>),                             \
      TPC_OF_KIND(OP, S, TPC_KIND_INT4, C, name<Few<S>>),                             \
      TPC_OF_KIND(OP, S, TPC_KIND_INT8 | tpc::kRoundsValues, C, name<Rounds<S>>),     \
      TPC_OF_KIND(OP, S, TPC_KIND_INT4 | tpc::kRoundsValues, C, name<Rounds<S>>)
#define TPC_LINEAR(OP, name)                                                    \
  TPC_KINDS(OP, name, f32, f32), TPC_KINDS(OP, name, bf16, bf16), \
      TPC_KINDS(OP, name, f16, f16)
// Linears that store rows in the cache. One kernel stores them in any format.
#define TPC_WRITER(OP, name)                                                    \
  TPC_LINEAR(OP, name), TPC_KINDS(OP, name, f32, scaled8),                      \
      TPC_KINDS(OP, name, bf16, scaled8), TPC_KINDS(OP, name, f16, scaled8)

// All combinations of types that instructions may have.
constexpr tpc::TypedKernel kKernels[] = {
    TPC_LINEAR(EMBED, embed),
    TPC_WRITER(NORM_QKV_ROPE_APPEND, norm_qkv_rope_append),
    TPC_WRITER(NORM_QKV_ROWS, norm_qkv_rows),
    TPC_READER(PARTIAL_ATTENTION, partial_attention),
    TPC_DENSE(ATTENTION_REDUCE, attention_reduce),
    TPC_LINEAR(LINEAR_RESIDUAL, linear_residual),
    TPC_LINEAR(LINEAR_TERMS, linear_terms),
    TPC_DENSE(ALL_REDUCE, all_reduce),
    TPC_LINEAR(NORM_GATE_UP_SWIGLU, norm_gate_up_swiglu),
    TPC_LINEAR(NORM_LM_HEAD, norm_lm_head),
    {TPC_OP_ARGMAX, {}, argmax},
    TPC_LINEAR(NORM_UP_ACTIVATION, norm_up_activation),
    TPC_LINEAR(NORM_GATE, norm_gate),
    TPC_LINEAR(NORM_GATED_UP, norm_gated_up),
};

constexpr tpc::Path make_path(const char* name, const tpc::ManyKernel* many = nullptr) {
  return {name, read_all, many, kKernels, sizeof kKernels / sizeof *kKernels};
}

}  // namespace
