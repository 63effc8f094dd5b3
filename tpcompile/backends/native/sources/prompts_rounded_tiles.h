// Products of rounded tokens by AMX. Included by prompts_rounded.h in the path that has tiles.

// The offset that is added to integers with this number of bits: 0, since tiles multiply signed
// integers.
constexpr int32_t raised_by(int) { return 0; }

// The words of a row that are multiplied at a time: the most, up to a tile, that divide the ends of
// all blocks.
inline int64_t words_together(const ColumnBlocks& blocks) {
  int64_t words = kTile;
  for (int64_t block = 0; block < blocks.count(); ++block)
    while (blocks.end(block) / kWord % words) words /= 2;
  return words;
}

// Multiply the integers of a block: sums of 16 rows and 16 tokens in a tile.
template <int kSums>
TPC_INLINE void multiply_block(const HeldRows& rows, const RoundedPanel& x, int64_t begin,
                               int64_t end, int64_t words) {
  const int64_t row_bytes = rows.stride * int64_t{sizeof(Word)};
  const int64_t word_bytes = x.width * int64_t{sizeof(Word)};
  if constexpr (kSums) _tile_zero(1);
  else _tile_zero(0);
  for (int64_t word = begin; word < end; word += words) {
    _tile_loadd(4, rows.integers + word, row_bytes);
    _tile_loadd(6, x.integers + word * x.width, word_bytes);
    if constexpr (kSums) _tile_dpbssd(1, 4, 6);
    else _tile_dpbssd(0, 4, 6);
  }
}

// Add the sums of a block to the results of 16 rows.
template <int kSums, bool kOffsets, bool kLeast>
TPC_INLINE void add_block(const Group* groups, const float* factors, const int32_t* token_sums,
                          Register* results) {
  alignas(64) int32_t totals[kTile * kTile];
  if constexpr (kSums) _tile_stored(1, totals, 4 * kTile);
  else _tile_stored(0, totals, 4 * kTile);
  complete_writes();
  const Register factor = load_register(factors);
  const auto sums = __builtin_convertvector(load_bytes<IntRegister>(token_sums), Register);
#pragma GCC unroll 16
  for (int64_t row = 0; row < kTile; ++row) {
    const Group& group = groups[row];
    auto products =
        __builtin_convertvector(load_bytes<IntRegister>(totals + row * kTile), Register);
    if constexpr (kOffsets) products -= sums * everywhere(group.offset);
    results[row] = multiply_add(results[row], products * factor, everywhere(group.scale));
    if constexpr (kLeast)
      results[row] = multiply_add(results[row], sums * factor, everywhere(group.least));
  }
}

// Multiply 16 rows with 16 tokens. Tiles multiply a block while the sums of the one before it are
// added.
template <bool kOffsets, bool kLeast>
TPC_INLINE void multiply_rounded(const HeldRows& rows, const RoundedPanel& x,
                                 const ColumnBlocks& blocks, int64_t words, float* out) {
  Register results[kTile] = {};
  const auto multiply = [&](int64_t block, auto sums) TPC_ALWAYS {
    if (block < blocks.count())
      multiply_block<decltype(sums)::value>(rows, x, blocks.begin(block) / kWord,
                                            blocks.end(block) / kWord, words);
  };
  const auto add = [&](int64_t block, auto sums) TPC_ALWAYS {
    if (block < blocks.count())
      add_block<decltype(sums)::value, kOffsets, kLeast>(rows.groups + block * rows.count,
                                                         x.factors + block * x.width,
                                                         x.sums + block * x.width, results);
  };
  const std::integral_constant<int, 0> first;
  const std::integral_constant<int, 1> second;
  multiply(0, first);
  for (int64_t block = 0; block < blocks.count(); block += 2) {
    multiply(block + 1, second);
    add(block, first);
    multiply(block + 2, first);
    add(block + 1, second);
  }
#pragma GCC unroll 16
  for (int64_t row = 0; row < kTile; ++row)
    std::memcpy(out + row * kPanel, &results[row], sizeof(Register));
}

template <bool kSigned, int kVectors>
void multiply_rounded_panel(HeldRows rows, int64_t count, const RoundedPanel& x,
                            const ColumnBlocks& blocks, float* out) {
  const auto run = rows.has_least     ? multiply_rounded<true, true>
                   : rows.has_offsets ? multiply_rounded<true, false>
                                      : multiply_rounded<false, false>;
  const int64_t words = words_together(blocks);
  const Tiles tiles(words);
  for (int64_t row = 0; row < count; row += kTile) {
    for (int64_t token = 0; token < kVectors * kTile; token += kTile) {
      const RoundedPanel tokens{x.integers + token, x.factors + token, x.sums + token, x.width};
      run(rows, tokens, blocks, words, out + row * kPanel + token);
    }
    rows.integers += kTile * rows.stride;
    rows.groups += kTile;
  }
}
