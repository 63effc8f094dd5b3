// Scratch memory, in the library of all paths and in that of each path.
#include <algorithm>
#include <cstdlib>

#include "machine.h"

namespace tpc {

Scratch::~Scratch() {
  while (blocks_ != nullptr) {
    Block* older = blocks_->older;
    std::free(blocks_);
    blocks_ = older;
  }
}

void* Scratch::bytes(size_t count) {
  constexpr size_t kLine = 64;
  count = (count + kLine - 1) / kLine * kLine;
  if (blocks_ == nullptr || used_ + count > size_) {
    // Older blocks stay until the end, because the instruction may still use them.
    const size_t size = std::max(2 * size_, std::max(count, size_t{1} << 16));
    void* memory = std::aligned_alloc(kLine, kLine + size);
    if (memory == nullptr) std::abort();
    Block* block = static_cast<Block*>(memory);
    *block = {static_cast<char*>(memory) + kLine, blocks_};
    blocks_ = block;
    size_ = size;
    used_ = 0;
  }
  void* start = blocks_->start + used_;
  used_ += count;
  return start;
}

}  // namespace tpc
