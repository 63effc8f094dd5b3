// The check of a program before its threads start.
#pragma once

#include "interface.h"
#include "machine.h"

namespace tpc {

// Whether a program cannot run on a path, which is null if it does not run here. `tpc_refusal` then
// says why.
bool refuses(const tpc_program* program, const Path* path);

}  // namespace tpc
