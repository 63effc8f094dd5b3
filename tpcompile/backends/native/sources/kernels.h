// The types and the lists of kernels. A path has two tables of them, each compiled on its own.
#pragma once

#include "attention.h"
#include "delta.h"
#include "embed.h"
#include "experts.h"
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
// A kernel of models of dtype S with weights of a kind and a cache of type C.
#define TPC_OF_KIND(OP, S, arithmetic, C, run) \
  {TPC_OP_##OP, {kDType<S>, arithmetic, kDType<S>, kDType<C>}, run}

// Kernels of instructions that read weights, of each dtype. `KINDS(OP, name, S, C)` are those of the
// kinds of weights that a table is for.
#define TPC_LINEAR(KINDS, OP, name) \
  KINDS(OP, name, f32, f32), KINDS(OP, name, bf16, bf16), KINDS(OP, name, f16, f16)
// The same if they store rows in the cache. One kernel stores them in any format.
#define TPC_WRITER(KINDS, OP, name)                                         \
  TPC_LINEAR(KINDS, OP, name), KINDS(OP, name, f32, scaled8),               \
      KINDS(OP, name, bf16, scaled8), KINDS(OP, name, f16, scaled8)
#define TPC_READERS_OF_WEIGHTS(KINDS)                                \
  TPC_LINEAR(KINDS, EMBED, embed),                                   \
      TPC_WRITER(KINDS, NORM_QKV_ROPE_APPEND, norm_qkv_rope_append), \
      TPC_WRITER(KINDS, NORM_QKV_ROWS, norm_qkv_rows),               \
      TPC_LINEAR(KINDS, LINEAR_RESIDUAL, linear_residual),           \
      TPC_LINEAR(KINDS, LINEAR_TERMS, linear_terms),                 \
      TPC_LINEAR(KINDS, NORM_GATE_UP_SWIGLU, norm_gate_up_swiglu),   \
      TPC_LINEAR(KINDS, NORM_LM_HEAD, norm_lm_head),                 \
      TPC_LINEAR(KINDS, NORM_UP_ACTIVATION, norm_up_activation),     \
      TPC_LINEAR(KINDS, NORM_GATE, norm_gate),                       \
      TPC_LINEAR(KINDS, NORM_GATED_UP, norm_gated_up),               \
      TPC_LINEAR(KINDS, NORM_ROWS, norm_rows),                       \
      TPC_LINEAR(KINDS, NORM_EXPERTS, norm_experts),                 \
      TPC_LINEAR(KINDS, EXPERT_TERMS, expert_terms),                 \
      TPC_LINEAR(KINDS, SHARED_TERMS, shared_terms)

}  // namespace
