// The check of a program before its threads start.
#pragma once

#include <vector>

#include "interface.h"
#include "machine.h"

namespace tpc {

// Whether a program cannot run on a path; `tpc_refusal` then returns the reason. If it can run,
// `kernels` receives the kernel of each instruction in the queues of this process, by number.
bool refuses(const tpc_program* program, const Path* path, std::vector<Kernel>& kernels);

}  // namespace tpc
