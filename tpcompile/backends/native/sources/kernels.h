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

// Entries of a table for each dtype of values, or for the one that a library is built for.
#ifdef TPC_DTYPE
#define TPC_EACH_DTYPE(ENTRY, ...) ENTRY(TPC_DTYPE, __VA_ARGS__)
#else
#define TPC_EACH_DTYPE(ENTRY, ...) \
  ENTRY(f32, __VA_ARGS__), ENTRY(bf16, __VA_ARGS__), ENTRY(f16, __VA_ARGS__)
#endif

// A kernel of models of dtype S, whose types are `Model<S>`.
#define TPC_KERNEL(S, OP, name, Model) {TPC_OP_##OP, dtypes_of<Model<S>>(), name<Model<S>>}
#define TPC_DENSE(OP, name) TPC_EACH_DTYPE(TPC_KERNEL, OP, name, Dense)
// Kernels of attention, which reads a cache in any format.
#define TPC_READER(OP, name) TPC_DENSE(OP, name), TPC_EACH_DTYPE(TPC_KERNEL, OP, name, Eight)
// A kernel of models of dtype S with weights of a kind and the cache of `Model<S>`.
#define TPC_OF_KIND(OP, S, arithmetic, Model, run) \
  {TPC_OP_##OP, {kDType<S>, arithmetic, kDType<S>, dtypes_of<Model<S>>().cache}, run}

// Kernels of instructions that read weights. `KINDS(S, OP, name, Model)` are those of the kinds of
// weights that a table is for.
#define TPC_LINEAR(KINDS, OP, name) TPC_EACH_DTYPE(KINDS, OP, name, Dense)
// The same if they store rows in the cache. One kernel stores them in any format.
#define TPC_WRITER(KINDS, OP, name) \
  TPC_LINEAR(KINDS, OP, name), TPC_EACH_DTYPE(KINDS, OP, name, Eight)
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
