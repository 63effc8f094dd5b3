// The path for any CPU, without target flags.
#include "interface.h"
#include "path.h"

extern "C" const void* tpc_portable() {
  static constexpr tpc::Path kPath =
      make_path("portable", tpc::few_bits_portable, tpc::rounded_portable);
  return &kPath;
}
