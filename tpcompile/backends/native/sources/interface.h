// The C interface of the library.
#pragma once

#include "tpc_abi.h"

extern "C" {

// A program and the memory that it runs in. The arrays must outlive the machine.
typedef struct {
  const int32_t* words;
  const tpc_buffer* buffers;
  const int32_t* queue_offsets;
  const int32_t* queue_values;
  const int32_t* wait_offsets;
  const int32_t* wait_values;
  const int32_t* signal_offsets;
  const int32_t* signal_values;
  const int32_t* totals;
  const int64_t* weights;   // the address of each instruction's first weights, or 0
  const int32_t* families;  // the first of the instructions that multiply by the same values
  int64_t* counters;
  void* board;  // see board.h: a line for all workers, and one for each
  int64_t counter_rows;
  int64_t counter_stride;
  int64_t own_row;
  int32_t buffer_count;
  int32_t instruction_count;
  int32_t counter_count;
  int32_t queue_value_count;
  int32_t wait_count;    // pairs in `wait_values`
  int32_t signal_count;  // numbers in `signal_values`
  int32_t first_queue;
  int32_t queues;
  int32_t sharing;
  int32_t first_worker;  // the place of this rank's first worker among those of all ranks
  int32_t workers;       // of all ranks
  double timeout;
  uint64_t delays;  // the seed of random delays before instructions; 0 means none
} tpc_program;

int32_t tpc_abi_version();

// Return the name of the path at this place among those that run here, fastest first, or null.
const char* tpc_path(int32_t place);

// Return the kernels of a path, for the functions below. Each path and dtype of values has its own
// library, with one of these functions.
const void* tpc_portable();
const void* tpc_avx2();
const void* tpc_avx512_vnni();
const void* tpc_avx512_bf16();
const void* tpc_amx_bf16();

// Return the operations on many tokens, which are in the libraries for bf16.
const void* tpc_prompts_avx2();
const void* tpc_prompts_avx512_bf16();
const void* tpc_prompts_amx_bf16();

// Return a machine, or null if the program is refused or the threads cannot be started.
void* tpc_open(const tpc_program* program, const void* path);

// Return why the last `tpc_open` of this thread refused the program, or an empty text.
const char* tpc_refusal();

// Return whether a path has a kernel for an instruction with these types: of its values, its
// weight, its norms and biases, and the cache. 0 stands for any.
int32_t tpc_has_kernel(const void* path, int32_t opcode, int32_t values, int32_t weight,
                       int32_t vectors, int32_t cache);

// Start a launch of up to `steps` steps. `times` is null, or receives begin, ready and end of each
// instruction in ns.
void tpc_launch(void* machine, int64_t steps, int64_t* times);

// Wait at most `milliseconds` until a launch ends or has done `wanted` steps. Return whether it has
// ended.
int32_t tpc_wait(void* machine, int64_t milliseconds, int64_t wanted);

// Return the number of steps of the launch whose tokens are known.
int64_t tpc_steps_done(void* machine);

// Fail a launch whose waits will not be met, because another rank has ended.
void tpc_give_up(void* machine);

// End a launch after its current step. Return the number of its steps, or -1 if it failed: by
// `tpc_give_up`, or because an instruction waited longer than the timeout.
int64_t tpc_end(void* machine);

// Run one instruction in this thread, without waits and signals. No launch may be active.
void tpc_execute(void* machine, int32_t number);

void tpc_close(void* machine);

// Call `wait` while the other threads of OpenMP sleep.
void tpc_asleep(void (*wait)());

// Do all items of an operation on many tokens (see prompts.h), `grain` at a time, on the threads of
// OpenMP. `prompts` are those of a path that runs here.
void tpc_many(const void* prompts, int32_t operation, const void* arguments, int64_t items,
              int64_t grain, int32_t threads);

// Read memory on some threads, an even part each, and return the seconds.
double tpc_read(const void* path, const char* data, int64_t bytes, int32_t threads);
}
