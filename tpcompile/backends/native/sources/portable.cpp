// The path for any CPU, without target flags.
#include "path.h"

namespace tpc {

const Path portable = make_path("portable");

}  // namespace tpc
