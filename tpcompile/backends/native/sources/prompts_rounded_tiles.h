// Products of rounded tokens by AMX. Included by prompts_rounded.h in the path that has tiles.

constexpr int32_t raised_by(int) { return 0; }

// The words of a row that are multiplied at a time: the most whose multiples are all ends of blocks.
inline int64_t words_together(const ColumnBlocks& blocks) {
  int64_t words = kTile;
  for (int64_t block = 0; block < blocks.count(); ++block)
    while (blocks.end(block) / kWord % words) words /= 2;
  return words;
}

// Multiply 16 rows with 16 tokens. The integers of a block are multiplied by tiles.
template <bool kOffsets, bool kLeast>
TPC_INLINE void multiply_rounded(const HeldRows& rows, const RoundedPanel& x,
                                 const ColumnBlocks& blocks, int64_t words, float* out) {
  const int64_t count = blocks.count();
  Register found[kTile] = {};
  for (int64_t block = 0; block < count; ++block) {
    const int64_t end = blocks.end(block) / kWord;
    alignas(64) int32_t totals[kTile * kTile];
    _tile_zero(0);
    for (int64_t word = blocks.begin(block) / kWord; word < end; word += words) {
      _tile_loadd(4, rows.integers + word, 4 * rows.stride);
      _tile_loadd(6, x.integers + word * x.width, 4 * x.width);
      _tile_dpbssd(0, 4, 6);
    }
    _tile_stored(0, totals, 4 * kTile);
    Tiles::complete_writes();
    const Register factors = load_register(x.factors + block * x.width);
    const auto sums =
        __builtin_convertvector(load_bytes<IntRegister>(x.sums + block * x.width), Register);
#pragma GCC unroll 16
    for (int64_t row = 0; row < kTile; ++row) {
      const Group& group = rows.groups[row * count + block];
      Register own =
          __builtin_convertvector(load_bytes<IntRegister>(totals + row * kTile), Register);
      if constexpr (kOffsets) own -= sums * group.offset;
      found[row] = multiply_add(found[row], own * factors, Register{} + group.scale);
      if constexpr (kLeast)
        found[row] = multiply_add(found[row], sums * factors, Register{} + group.least);
    }
  }
#pragma GCC unroll 16
  for (int64_t row = 0; row < kTile; ++row)
    std::memcpy(out + row * kPanel, &found[row], sizeof(Register));
}

template <bool kSigned, int kVectors>
void multiply_rounded_panel(HeldRows rows, int64_t count, RoundedPanel x,
                            const ColumnBlocks& blocks, float* out) {
  const auto run = rows.has_least     ? multiply_rounded<true, true>
                   : rows.has_offsets ? multiply_rounded<true, false>
                                      : multiply_rounded<false, false>;
  const int64_t words = words_together(blocks);
  const Tiles tiles(words);
  for (int64_t row = 0; row < count; row += kTile) {
    for (int64_t token = 0; token < kVectors * kTile; token += kTile) {
      const RoundedPanel own{x.integers + token, x.factors + token, x.sums + token, x.width};
      run(rows, own, blocks, words, out + row * kPanel + token);
    }
    rows.integers += kTile * rows.stride;
    rows.groups += kTile * blocks.count();
  }
}
