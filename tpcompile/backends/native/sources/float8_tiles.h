// Products of weights of 8-bit floating point by AMX: 16 rows are widened to bf16 in the nearest
// cache, and multiplied by up to 16 sequences. Included by float8.h in the path that has tiles.
//
// Tiles of even and of odd columns have sums of their own, to which pairs of columns are added in
// order. So a sum does not depend on the batch.

// Columns of a leaf that are widened together and share a scale, that of `group`.
struct Segment {
  int64_t leaf, group, column, count;
  bool begins, ends;  // the columns of the leaf with this scale
};

struct Segments {
  const Segment* first;
  int64_t count;
};

inline Segments segments_of(const Float8& weight, int64_t columns, int64_t leaves, Scratch& scratch) {
  const Leaf* leaf = leaves_of(weight, columns, leaves, scratch);
  Segment* segments = scratch.take<Segment>(columns / kMany + leaves + weight.groups());
  int64_t count = 0;
  for (int64_t number = 0; number < leaves; ++number, ++leaf) {
    const int64_t end = leaf->first + leaf->columns;
    int64_t column = leaf->first, group = leaf->group;
    for (int64_t next = leaf->left; column < end; next = weight.group(), ++group) {
      const int64_t first = column, stop = next < end - column ? column + next : end;
      for (; column < stop; column += segments[count++].count) {
        const int64_t left = stop - column, width = left < kMany ? left : kMany;
        segments[count] = {number, group, column, width, column == first, width == left};
      }
    }
  }
  return {segments, count};
}

template <>
inline Operand<Form<bf16, Float8>> operand(Sequences<Form<bf16, Float8>> values, int64_t batch,
                                           int64_t columns, int64_t leaves, const Float8& weight,
                                           Scratch& scratch) {
  const Segments segments = segments_of(weight, columns, leaves, scratch);
  const void** packed = scratch.take<const void*>((batch + 15) / 16 * segments.count);
  const void** next = packed;
  for (int64_t b = 0; b < batch; b += 16)
    for (const Segment* segment = segments.first; segment != segments.first + segments.count;
         ++segment)
      *next++ = tiled(values.first + b * values.stride + segment->column, values.stride,
                      batch - b < 16 ? batch - b : 16, segment->count, scratch);
  return {values, batch, columns, leaves, packed};
}

// The columns of most segments; a constant is faster.
using Many = std::integral_constant<int64_t, kMany>;

// The numbers of a tile of weights.
constexpr int64_t kTile = kTileRows * kTileColumns;

// Widen `count` columns of some rows to tiles, and fetch as many bytes from `ahead`.
template <class Count>
TPC_INLINE void widen(const Float8& weight, int64_t rows, int64_t column, Count count,
                      const char* ahead, bf16* tiles) {
  const LargeFloat8 large;
  for (int64_t row = 0; row < rows; ++row, tiles += kTileColumns, ahead += count) {
    const uint8_t* numbers = weight.row(row) + column;
    for (int64_t line = 0; line < count; line += 64) fetch_line(ahead + line);
    const bool all_large = std::is_same_v<Count, Many> && large.are(numbers);
#pragma GCC unroll 4
    for (int64_t place = 0; place < count; place += kTileColumns) {
      __m512i loaded;
      if (all_large) loaded = large.load_bf16(numbers + place);
      else if (count - place >= kTileColumns) loaded = float8_as_bf16(numbers + place);
      else loaded = some_float8<Form<bf16, Float8>>(numbers, place, count - place);
      _mm512_storeu_si512(tiles + place / kTileColumns * kTile, loaded);
    }
  }
}

// Add the products of a segment to the sums of its columns.
TPC_INLINE void add_tiles(const Segment& segment, const bf16* tiles, const float* x,
                          int64_t sequences) {
  complete_writes();
  if (segment.begins) {
    _tile_zero(TPC_SUMS);
    _tile_zero(TPC_ODD_SUMS);
  }
  for (int64_t column = 0; column < segment.count; column += 2 * kTileColumns) {
    _tile_loadd(TPC_WEIGHTS, tiles, 2 * kTileColumns);
    _tile_loadd(TPC_VALUES, x, 4 * sequences);
    _tile_dpbf16ps(TPC_SUMS, TPC_WEIGHTS, TPC_VALUES);
    if (column + kTileColumns >= segment.count) break;
    _tile_loadd(TPC_ODD_WEIGHTS, tiles + kTile, 2 * kTileColumns);
    _tile_loadd(TPC_ODD_VALUES, x + kTileColumns / 2 * sequences, 4 * sequences);
    _tile_dpbf16ps(TPC_ODD_SUMS, TPC_ODD_WEIGHTS, TPC_ODD_VALUES);
    tiles += 2 * kTile, x += kTileColumns * sequences;
  }
}

// A segment of 16 rows.
struct Place {
  int64_t row = 0, segment = 0;

  TPC_INLINE void advance(int64_t segments) {
    if (++segment < segments) return;
    row += kTileRows, segment = 0;
  }
};

// Multiply rows by up to 16 sequences, those of group `group`. In each step, a segment is widened,
// the one before it is multiplied, and the sums of the one before that are scaled: loads of what
// was just stored would wait.
inline void float8_tile_dots(const Float8& weight, int64_t rows, const Segments& segments,
                             const Operand<Form<bf16, Float8>>& x, int64_t group, float* out,
                             int64_t out_stride, Scratch& scratch) {
  const int64_t left = x.batch - 16 * group, sequences = left < 16 ? left : 16;
  // Sums of one sequence are a register with 16 rows; those of several are a register per row.
  const int64_t registers = sequences == 1 ? 1 : kTileRows;
  const int64_t groups = weight.groups();
  float* scales = scratch.take<float>(groups * kTileRows);
  float* held_scales = scratch.take<float>(groups * kTileRows);
  Lanes* terms = scratch.take<Lanes>(x.leaves * kTileRows);
  alignas(64) bf16 tiles[2][kMany / kTileColumns * kTile];
  Lanes even[2][kTileRows] = {}, odd[2][kTileRows] = {};
  const char* const next_weights =
      scratch.next_weights ? scratch.next_weights : weight.address(0);
  const auto held = [&](int64_t row) { return rows - row < kTileRows ? rows - row : kTileRows; };

  const auto widened = [&](Place place, int64_t at) TPC_ALWAYS {
    const Segment& segment = segments.first[place.segment];
    const int64_t next = place.row + kTileRows;
    const char* ahead = next < rows ? weight.address(next) : next_weights;
    const auto run = [&](auto count) TPC_ALWAYS {
      widen(weight.from(place.row, 0), held(place.row), segment.column, count,
            ahead + kTileRows * segment.column, tiles[at]);
    };
    if (segment.count == kMany) run(Many());
    else run(segment.count);
  };
  const auto multiply = [&](Place place, int64_t at) TPC_ALWAYS {
    if (place.segment == 0 && (place.row == 0 || held(place.row) < kTileRows))
      shape_tiles(held(place.row), sequences);
    const Segment& segment = segments.first[place.segment];
    add_tiles(segment, tiles[at],
              static_cast<const float*>(x.packed[group * segments.count + place.segment]),
              sequences);
    if (!segment.ends) return;
    _tile_stored(TPC_SUMS, even[at], registers == 1 ? sizeof(float) : sizeof(Lanes));
    _tile_stored(TPC_ODD_SUMS, odd[at], registers == 1 ? sizeof(float) : sizeof(Lanes));
    complete_writes();
  };
  const auto scale = [&](Place place, int64_t at) TPC_ALWAYS {
    if (place.segment == 0) {
      const float* of_rows = weight.scales(place.row, 0, held(place.row) * groups, held_scales);
      for (int64_t row = 0; row < held(place.row); ++row)
        for (int64_t number = 0; number < groups; ++number)
          scales[number * kTileRows + row] = of_rows[row * groups + number] * kFloat8;
      for (int64_t term = 0; term < x.leaves * registers; ++term) terms[term] = Lanes{};
    }
    const Segment& segment = segments.first[place.segment];
    if (!segment.ends) return;
    const float* factors = scales + segment.group * kTileRows;
    Lanes* sums = terms + segment.leaf * registers;
    if (registers == 1)
      sums[0] = multiply_add(sums[0], even[at][0] + odd[at][0], load(factors));
    else
      for (int64_t row = 0; row < kTileRows; ++row)
        sums[row] = multiply_add(sums[row], even[at][row] + odd[at][row], everywhere(factors[row]));
    if (place.segment + 1 < segments.count) return;
    const int64_t stored = join_leaves(x, terms, registers);
    for (int64_t leaf = 0; leaf < stored; ++leaf) {
      Lanes* sequence = terms + leaf * registers;
      if (registers > 1) transpose(sequence);
      float* first = out + leaf * x.apart + place.row + 16 * group * out_stride;
      for (int64_t b = 0; b < sequences; ++b)
        store_some(first + b * out_stride, sequence[b], held(place.row));
    }
  };

  const int64_t steps = (rows + kTileRows - 1) / kTileRows * segments.count;
  Place first, second, third;
  for (int64_t step = 0; step < steps + 2; ++step) {
    const int64_t at = step % 2;
    if (step < steps) widened(first, at), first.advance(segments.count);
    if (step >= 1 && step <= steps) multiply(second, 1 - at), second.advance(segments.count);
    if (step >= 2) scale(third, at), third.advance(segments.count);
  }
}

// Multiply rows by all sequences.
inline void float8_tile_dots(const Float8& weight, int64_t rows,
                             const Operand<Form<bf16, Float8>>& x, float* out, int64_t out_stride,
                             Scratch& scratch) {
  const Segments segments = segments_of(weight, x.columns, x.leaves, scratch);
  for (int64_t group = 0; 16 * group < x.batch; ++group)
    float8_tile_dots(weight, rows, segments, x, group, out, out_stride, scratch);
  _tile_release();
}
