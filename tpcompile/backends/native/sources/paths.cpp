// The vector paths: which of them run here, and how fast each reads memory.
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "clocks.h"
#include "interface.h"
#include "machine.h"

namespace tpc {
namespace {

// Whether a path runs here is decided in this file, which has no target flags.
struct Choice {
  const char* name;
  bool (*runs_here)();
};

#if defined(__x86_64__)
bool has_avx512_vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

// Ask whether the CPU has tiles, and the system to let this process use them.
bool asks_for_amx_bf16() {
#if defined(__linux__)
  constexpr unsigned kTileBits = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, -TILE and -INT8
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kTileBits) != kTileBits) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx_bf16() {
  static const bool granted = asks_for_amx_bf16();
  return granted;
}
#endif

const Choice kPaths[] = {
#if defined(__x86_64__)
    {"amx_bf16", has_amx_bf16},
    {"avx512_bf16", has_avx512_bf16},
    {"avx512_vnni", has_avx512_vnni},
    {"avx2",
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#endif
    {"portable", [] { return true; }}};

// Whether kernels read weights of a format with several components: see `grouped_dots`.
bool has_groups(int64_t format) {
  const int64_t columns = group_of(format), bits = bits_of(format);
  const bool floats = kind_of(format) == TPC_KIND_FP8;
  if (!scales_of(format) && (floats || kind_of(format) == TPC_KIND_INT8)) return false;
  if (floats) return columns % 32 == 0;
  if (bits == 6) return columns == 16;
  const bool wider = bits != 5 && !has_supers(format);
  return columns == 32 || (wider && (columns == 64 || columns % 128 == 0));
}

// The kernels of 4 bits read 5 and 6 too.
int64_t arithmetic_of_kernel(int64_t format) {
  const int64_t arithmetic = arithmetic_of(format), bits = bits_of(format);
  return bits == 5 || bits == 6 ? arithmetic - kind_of(format) + TPC_KIND_INT4 : arithmetic;
}

}  // namespace

bool runs_here(const Path& path) {
  for (const Choice& choice : kPaths)
    if (std::strcmp(choice.name, path.name) == 0) return choice.runs_here();
  return false;
}

Kernel kernel_for(const Path& path, int32_t opcode, const Dtypes& dtypes) {
  const auto fits = [](int64_t wanted, int64_t had) { return wanted == 0 || wanted == had; };
  if (!has_groups(dtypes.weight)) return nullptr;
  for (const Kernels* table : {&path.kernels, path.few_bits, path.rounded})
    for (const TypedKernel* kernel = table->first; kernel != table->first + table->count; ++kernel)
      if (kernel->opcode == opcode && fits(dtypes.values, kernel->dtypes.values) &&
          fits(arithmetic_of_kernel(dtypes.weight), kernel->dtypes.weight) &&
          fits(dtypes.vectors, kernel->dtypes.vectors) && fits(dtypes.cache, kernel->dtypes.cache))
        return kernel->run;
  return nullptr;
}

}  // namespace tpc

extern "C" {

const char* tpc_path(int32_t place) {
  for (const tpc::Choice& choice : tpc::kPaths)
    if (choice.runs_here() && place-- == 0) return choice.name;
  return nullptr;
}

int32_t tpc_has_kernel(const void* path, int32_t opcode, int32_t values, int32_t weight,
                       int32_t vectors, int32_t cache) {
  const tpc::Dtypes dtypes{values, weight, vectors, cache};
  return tpc::kernel_for(*static_cast<const tpc::Path*>(path), opcode, dtypes) != nullptr;
}

double tpc_read(const void* path, const char* data, int64_t bytes, int32_t threads) {
  uint64_t (*read)(const char*, int64_t) = static_cast<const tpc::Path*>(path)->read;
  std::atomic<uint64_t> total{0};
  const int64_t begin = tpc::now_ns(), part = bytes / threads;
  std::vector<std::thread> all;
  for (int32_t thread = 0; thread < threads; ++thread)
    all.emplace_back([&, thread] { total += read(data + thread * part, part); });
  for (std::thread& thread : all) thread.join();
  return static_cast<double>(tpc::now_ns() - begin) * 1e-9;
}
}
