// The state that kernels see: the table of buffers, and scratch memory of the worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "tpc_abi.h"

namespace tpc {

// Memory of one worker for intermediate values of one instruction, and for data that it prepares
// once for a family of instructions in a step.
class Scratch {
 public:
  ~Scratch();

  // Begin an instruction. The memory that earlier ones have taken is free, except the memory that
  // `once` has prepared in this step for the same family.
  void begin(int64_t family, int64_t step) {
    if (has_ && family == family_ && step == step_) used_ = blocks_ == once_block_ ? once_used_ : 0;
    else reset();
    family_ = family, step_ = step;
  }

  // Return what `prepare` returns, for the first instruction of the family that the worker runs.
  // It may point to scratch memory, and to memory that the family does not write.
  template <class Prepare>
  const auto& once(const Prepare& prepare) {
    using Found = decltype(prepare());
    static_assert(std::is_trivially_destructible_v<Found>, "");
    if (!has_) {
      once_ = new (bytes(sizeof(Found))) Found(prepare());
      once_block_ = blocks_, once_used_ = used_, has_ = true;
    }
    return *static_cast<const Found*>(once_);
  }

  // Return memory for `count` values, aligned to a cache line. It is valid until `begin` or
  // `reset`.
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(bytes(sizeof(T) * static_cast<size_t>(count)));
  }

  void reset() { used_ = 0, has_ = false; }

  // The weights that the worker reads after those of this instruction, or null. The prefetches at
  // the end of the instruction go on there, so that a worker reads one stream.
  const char* next_weights = nullptr;
  const char* next_scales = nullptr;  // those of the first of these weights

 private:
  void* bytes(size_t count);

  struct Block {
    char* start;
    Block* older;
  };

  Block* blocks_ = nullptr;
  size_t size_ = 0;
  size_t used_ = 0;

  bool has_ = false;  // whether `once` has prepared something for the family in the step
  int64_t family_ = 0, step_ = 0;
  const void* once_ = nullptr;
  const Block* once_block_ = nullptr;  // the newest block then, and what was used of it
  size_t once_used_ = 0;
};

struct Memory {
  const tpc_buffer* buffers;

  template <class T>
  T* at(int32_t buffer) const {
    return reinterpret_cast<T*>(buffers[buffer].address);
  }

  int64_t extent(int32_t buffer, int dim) const { return buffers[buffer].shape[dim]; }

  int64_t stride(int32_t buffer, int dim) const { return buffers[buffer].strides[dim]; }
};

// Run one instruction, given its row of words.
using Kernel = void (*)(const Memory&, const int32_t* words, Scratch&);

// The types of an instruction: of its values, its weight, its norms and biases, and the cache. They
// are numbers as in words and in the table of buffers; 0 if it has none. That of the weight is a
// format, and in the table of kernels only its `arithmetic_of`.
struct Dtypes {
  int64_t values, weight, vectors, cache;
};

// A kernel for instructions with these types, or with some of them.
struct TypedKernel {
  int32_t opcode;
  Dtypes dtypes;
  Kernel run;
};

// Do some items of an operation on many tokens (see prompts.h).
using ManyKernel = void (*)(const void* arguments, int64_t first, int64_t last, Scratch&);

// The fields of a format, see tpcompile/ir/format.py.
inline int64_t kind_of(int64_t format) { return format & 0xff; }
inline int64_t scales_of(int64_t format) { return format >> 8 & 0x3f; }
inline bool has_offsets(int64_t format) { return format >> 15 & 1; }
inline int64_t group_of(int64_t format) { return format >> 16; }
inline bool has_supers(int64_t format) {
  return scales_of(format) == TPC_SCALES_SUPER || scales_of(format) == TPC_SCALES_SUPERMIN;
}
inline bool has_minima(int64_t format) {
  return scales_of(format) == TPC_SCALES_F16MIN || scales_of(format) == TPC_SCALES_SUPERMIN;
}

// The bits of integers of a kind. Of 5 or 6 bits, those above the lowest four are stored apart.
inline int bits_of(int64_t format) {
  const int64_t kind = kind_of(format);
  return kind == TPC_KIND_INT4 ? 4 : kind == TPC_KIND_INT5 ? 5 : kind == TPC_KIND_INT6 ? 6 : 8;
}

// The columns of a superblock, whose scales have a common factor.
constexpr int64_t kSuper = 256;

// Set if linears round their values to int8 before they multiply them.
constexpr int64_t kRoundsValues = 1 << 14;

// The fields by which a kernel is chosen: the kind, and whether values are rounded.
inline int64_t arithmetic_of(int64_t format) { return format & (0xff | kRoundsValues); }

struct Kernels {
  const TypedKernel* first;
  size_t count;
};

// The kernels of one vector path.
struct Path {
  const char* name;
  uint64_t (*read)(const char* data, int64_t bytes);
  Kernels kernels;
  const Kernels *few_bits, *rounded;  // those of weights of few bits
};

// Return the kernel of a path for an instruction with these types, or null.
Kernel kernel_for(const Path& path, int32_t opcode, const Dtypes& dtypes);

// Whether the CPU and the system run the kernels of this path.
bool runs_here(const Path& path);

}  // namespace tpc
