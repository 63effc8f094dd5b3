// Dot products by AMX: 16 rows of weights as they are stored, times up to 16 sequences.
//
// Included by dots.h in the path that has tiles. A tile holds fp32 sums of 16 rows and the sequences
// of a group; each pair of columns is added in order. So a sum does not depend on the batch.

constexpr int64_t kTileRows = 16, kTileColumns = 32;
// The numbers of tiles are macros, because the intrinsics paste them into the names of registers.
#define TPC_SUMS 0
#define TPC_WEIGHTS 1
#define TPC_VALUES 2

// GCC's intrinsics do not tell the compiler which memory they read. Writes must be complete before.
TPC_INLINE void complete_writes() { __asm__ volatile("" ::: "memory"); }

// Set the shapes of tiles for some rows and sequences.
TPC_INLINE void shape_tiles(int64_t rows, int64_t sequences) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  const auto wide = static_cast<uint16_t>(4 * sequences);
  shapes.row_bytes[TPC_SUMS] = wide, shapes.rows[TPC_SUMS] = static_cast<uint8_t>(rows);
  shapes.row_bytes[TPC_WEIGHTS] = 64, shapes.rows[TPC_WEIGHTS] = static_cast<uint8_t>(rows);
  shapes.row_bytes[TPC_VALUES] = wide, shapes.rows[TPC_VALUES] = 16;
  complete_writes();
  _tile_loadconfig(&shapes);
}

// Return the columns of some sequences as tiles: pairs of columns, each with all sequences.
inline const uint32_t* tiled(const bf16* x, int64_t stride, int64_t sequences, int64_t columns,
                             Scratch& scratch) {
  const int64_t tiles = (columns + kTileColumns - 1) / kTileColumns;
  const int64_t pairs = tiles * kTileColumns / 2;
  uint32_t* found = scratch.take<uint32_t>(pairs * sequences);
  for (int64_t b = 0; b < sequences; ++b) {
    const bf16* own = x + b * stride;
    for (int64_t pair = 0; pair < columns / 2; ++pair)
      std::memcpy(found + pair * sequences + b, own + 2 * pair, sizeof(uint32_t));
    for (int64_t pair = columns / 2; pair < pairs; ++pair)
      found[pair * sequences + b] = 0;
    if (columns % 2) found[columns / 2 * sequences + b] = own[columns - 1].bits;
  }
  return found;
}

// Multiply up to 16 rows: `sums[row][sequence]`. Prefetch as many bytes from `ahead`.
inline void tile_block(const bf16* weight, int64_t stride, int64_t rows, int64_t columns,
                       const uint32_t* x, int64_t sequences, const char* ahead, float* sums) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(bf16)), step = 4 * sequences;
  complete_writes();
  _tile_zero(TPC_SUMS);
  int64_t at = 0;
  for (; at + kTileColumns <= columns; at += kTileColumns) {
    for (int64_t line = 0; line < kTileRows; ++line) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += 64;
    }
    _tile_loadd(TPC_WEIGHTS, weight + at, bytes);
    _tile_loadd(TPC_VALUES, x + at / 2 * sequences, step);
    _tile_dpbf16ps(TPC_SUMS, TPC_WEIGHTS, TPC_VALUES);
  }
  if (at < columns) {
    alignas(64) bf16 rest[kTileRows * kTileColumns] = {};
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(rest + row * kTileColumns, weight + row * stride + at,
                  sizeof(bf16) * static_cast<size_t>(columns - at));
    complete_writes();
    _tile_loadd(TPC_WEIGHTS, rest, 64);
    _tile_loadd(TPC_VALUES, x + at / 2 * sequences, step);
    _tile_dpbf16ps(TPC_SUMS, TPC_WEIGHTS, TPC_VALUES);
  }
  _tile_stored(TPC_SUMS, sums, step);
}

// Multiply rows by all sequences, as sums over even runs of columns that are added in a fixed tree.
inline void tile_dots(const bf16* weight, int64_t stride, int64_t rows, const bf16* x,
                      int64_t x_stride, int64_t batch, int64_t columns, int64_t leaves, float* out,
                      int64_t out_stride, Scratch& scratch) {
  const int64_t each = columns / leaves, longer = columns % leaves;
  float* sums = scratch.take<float>(leaves * kTileRows * 16);
  const uint32_t** values = scratch.take<const uint32_t*>(leaves);
  for (int64_t group = 0; group < batch; group += 16) {
    const int64_t sequences = batch - group < 16 ? batch - group : 16;
    for (int64_t leaf = 0, first = 0; leaf < leaves; ++leaf) {
      const int64_t width = each + (leaf < longer);
      values[leaf] = tiled(x + group * x_stride + first, x_stride, sequences, width, scratch);
      first += width;
    }
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t held = rows - row < kTileRows ? rows - row : kTileRows;
      if (row == 0 || held < kTileRows) shape_tiles(held, sequences);
      const bf16* own = weight + row * stride;
      const char* ahead = reinterpret_cast<const char*>(own + kTileRows * stride);
      for (int64_t leaf = 0, first = 0; leaf < leaves; ++leaf) {
        const int64_t width = each + (leaf < longer);
        tile_block(own + first, stride, held, width, values[leaf], sequences,
                   ahead + first * kTileRows * static_cast<int64_t>(sizeof(bf16)),
                   sums + leaf * held * sequences);
        first += width;
      }
      fold_sums(sums, leaves, held * sequences);
      for (int64_t b = 0; b < sequences; ++b)
        for (int64_t own_row = 0; own_row < held; ++own_row)
          out[row + own_row + (group + b) * out_stride] = sums[own_row * sequences + b];
    }
  }
  _tile_release();
}
