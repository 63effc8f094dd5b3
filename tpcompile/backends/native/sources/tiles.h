// Dot products by AMX: 16 rows of weights as they are stored, times up to 16 sequences.
//
// Included by dots.h in the path that has tiles. A tile holds fp32 sums of 16 rows and the
// sequences of a group; each pair of columns is added in order. So a sum does not depend on the
// batch.

constexpr int64_t kTileRows = 16, kTileColumns = 32, kTileSequences = 16;
// The numbers of tiles are macros, because the intrinsics paste them into the names of registers.
#define TPC_SUMS 0
#define TPC_WEIGHTS 1
#define TPC_VALUES 2
#define TPC_ODD_SUMS 3
#define TPC_ODD_WEIGHTS 4
#define TPC_ODD_VALUES 5

// Whether a form has tiles.
template <class F>
constexpr bool kHasTiles = false;
template <>
constexpr bool kHasTiles<Form<bf16, Plain<bf16>>> = true;

// The sequences of a tile, if so many are left.
TPC_INLINE int64_t in_tile(int64_t left) { return left < kTileSequences ? left : kTileSequences; }

// Set the shapes of tiles for some rows and sequences.
TPC_INLINE void shape_tiles(int64_t rows, int64_t sequences) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes;
  const auto wide = static_cast<uint16_t>(4 * sequences);
  const auto shape = [&](int tile, int64_t of_rows, uint16_t bytes) {
    shapes.rows[tile] = static_cast<uint8_t>(of_rows), shapes.row_bytes[tile] = bytes;
  };
  for (int sums : {TPC_SUMS, TPC_ODD_SUMS}) shape(sums, rows, wide);
  for (int weights : {TPC_WEIGHTS, TPC_ODD_WEIGHTS}) shape(weights, rows, 64);
  for (int values : {TPC_VALUES, TPC_ODD_VALUES}) shape(values, 16, wide);
  complete_writes();
  _tile_loadconfig(&shapes);
}

// Return the columns of some sequences as tiles: pairs of columns, each with all sequences.
inline const float* tiled(const bf16* x, int64_t stride, int64_t sequences, int64_t columns,
                          Scratch& scratch) {
  const int64_t tiles = (columns + kTileColumns - 1) / kTileColumns;
  const int64_t pairs = tiles * kTileColumns / 2;
  // The last store may extend past the last pair.
  float* packed = scratch.take<float>(pairs * sequences + kLanes);
  for (int64_t pair = 0; pair < pairs; pair += kLanes) {
    Lanes block[kLanes] = {};
    const int64_t left = columns - 2 * pair, count = left < kTileColumns ? left : kTileColumns;
    for (int64_t b = 0; b < sequences; ++b)
      std::memcpy(block + b, x + b * stride + 2 * pair, sizeof(bf16) * static_cast<size_t>(count));
    if (sequences == 1) {
      store(packed + pair, block[0]);
      continue;
    }
    transpose(block);
    for (int64_t place = 0; place < kLanes; ++place)
      store(packed + (pair + place) * sequences, block[place]);
  }
  return packed;
}

// Multiply up to 16 rows: `sums[row][sequence]`. Fetch as many bytes from `ahead`, alternating with
// lines of a later tile, which go into the nearest cache: a tile whose lines are missing there
// would wait for all fetches in flight.
inline void tile_block(Plain<bf16> weight, int64_t rows, int64_t columns, const float* x,
                       int64_t sequences, const char* ahead, float* sums) {
  const int64_t step = 4 * sequences;
  complete_writes();
  _tile_zero(TPC_SUMS);
  int64_t column = 0;
  for (; column + kTileColumns <= columns; column += kTileColumns) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < kTileRows; ++line, ahead += 64) {
      fetch_line(ahead);
      fetch_near(weight.row(line) + column + 2 * kTileColumns);
    }
    _tile_loadd(TPC_WEIGHTS, weight.row(0) + column, weight.stride());
    _tile_loadd(TPC_VALUES, x + column / 2 * sequences, step);
    _tile_dpbf16ps(TPC_SUMS, TPC_WEIGHTS, TPC_VALUES);
  }
  if (column < columns) {
    alignas(64) bf16 last[kTileRows * kTileColumns] = {};
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(last + row * kTileColumns, weight.row(row) + column,
                  static_cast<size_t>(weight.bytes(columns - column)));
    complete_writes();
    _tile_loadd(TPC_WEIGHTS, last, 64);
    _tile_loadd(TPC_VALUES, x + column / 2 * sequences, step);
    _tile_dpbf16ps(TPC_SUMS, TPC_WEIGHTS, TPC_VALUES);
  }
  _tile_stored(TPC_SUMS, sums, step);
}

// Multiply rows by all sequences, as sums over even runs of columns that are added in a fixed tree.
inline void tile_dots(Plain<bf16> weight, int64_t rows,
                      const Operand<Form<bf16, Plain<bf16>>>& x, float* out, int64_t out_stride,
                      Scratch& scratch) {
  const int64_t least = x.columns / x.leaves, longer = x.columns % x.leaves;
  float* sums = scratch.take<float>(x.leaves * kTileRows * kTileSequences);
  const char* const next_weights =
      scratch.next_weights ? scratch.next_weights : weight.address(0);
  for (int64_t group = 0; kTileSequences * group < x.batch; ++group) {
    const int64_t sequences = in_tile(x.batch - kTileSequences * group);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t held = rows - row < kTileRows ? rows - row : kTileRows;
      if (row == 0 || held < kTileRows) shape_tiles(held, sequences);
      const char* ahead = weight.address(row + kTileRows);
      if (row + kTileRows >= rows) ahead = next_weights;
      for (int64_t leaf = 0, first = 0; leaf < x.leaves; ++leaf) {
        const int64_t width = least + (leaf < longer);
        tile_block(weight.from(row, first), held, width,
                   static_cast<const float*>(x.packed[group * x.leaves + leaf]), sequences,
                   ahead + kTileRows * weight.bytes(first),
                   sums + leaf * held * sequences);
        first += width;
      }
      const int64_t stored = join_leaves(x, sums, held * sequences);
      for (int64_t leaf = 0; leaf < stored; ++leaf) {
        const float* leaf_sums = sums + leaf * held * sequences;
        Lanes of_rows[kLanes];
        for (int64_t place = 0; place < kTileRows; ++place)
          of_rows[place] = load(leaf_sums + place * sequences);  // those after `held` are not used
        transpose(of_rows);
        float* found = out + leaf * x.apart + row + kTileSequences * group * out_stride;
        for (int64_t b = 0; b < sequences; ++b)
          store_some(found + b * out_stride, of_rows[b], held);
      }
    }
  }
  _tile_release();
}
