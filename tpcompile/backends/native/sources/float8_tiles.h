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

  const Segment& operator[](int64_t number) const { return first[number]; }
};

inline Segments segments_of(const Float8& weight, int64_t columns, int64_t leaves,
                            Scratch& scratch) {
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
constexpr bool kHasTiles<Form<bf16, Float8>> = true;

template <>
inline Operand<Form<bf16, Float8>> operand(Sequences<Form<bf16, Float8>> values, int64_t batch,
                                           int64_t columns, int64_t leaves, const Float8& weight,
                                           Scratch& scratch) {
  const Segments segments = segments_of(weight, columns, leaves, scratch);
  const int64_t groups = (batch + kTileSequences - 1) / kTileSequences;
  const void** packed = scratch.take<const void*>(groups * segments.count);
  const void** next = packed;
  for (int64_t b = 0; b < batch; b += kTileSequences)
    for (const Segment* segment = segments.first; segment != segments.first + segments.count;
         ++segment)
      *next++ = tiled(values.first + b * values.stride + segment->column, values.stride,
                      in_tile(batch - b), segment->count, scratch);
  return {values, batch, columns, leaves, packed};
}

// The columns of most segments; a constant is faster.
using Many = std::integral_constant<int64_t, kMany>;

// The numbers of a tile of weights.
constexpr int64_t kTile = kTileRows * kTileColumns;

// Widen `count` columns of some rows to tiles, and fetch as many bytes from `ahead`.
template <class Count>
TPC_INLINE void widen(const Float8& weight, int64_t rows, Count count, const char* ahead,
                      bf16* tiles) {
  const LargeFloat8 large;
  for (int64_t row = 0; row < rows; ++row, tiles += kTileColumns, ahead += count) {
    const uint8_t* numbers = weight.row(row);
    for (int64_t line = 0; line < count; line += 64) fetch_line(ahead + line);
    const bool all_large = std::is_same_v<Count, Many> && large.are(numbers);
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

// The products of rows with up to 16 sequences. In each step, a segment is widened, the one before
// it is multiplied, and the sums of the one before that are scaled: loads of what was just stored
// would wait. So memory for two segments is used in turn.
class Float8Tiles {
 public:
  // `first` is the first sequence.
  Float8Tiles(const Float8& weight, int64_t rows, const Segments& segments,
              const Operand<Form<bf16, Float8>>& x, int64_t first, float* out, int64_t out_stride,
              Scratch& scratch)
      : weight_(weight),
        rows_(rows),
        segments_(segments),
        x_(x),
        packed_(x.packed + first / kTileSequences * segments.count),
        sequences_(in_tile(x.batch - first)),
        registers_(sequences_ == 1 ? 1 : kTileRows),
        out_(out + first * out_stride),
        out_stride_(out_stride),
        next_weights_(scratch.next_weights ? scratch.next_weights : weight.address(0)),
        scales_(scratch.take<float>(weight.groups() * kTileRows)),
        held_scales_(scratch.take<float>(weight.groups() * kTileRows)),
        terms_(scratch.take<Lanes>(x.leaves * registers_)) {}

  void run() {
    const int64_t steps = (rows_ + kTileRows - 1) / kTileRows * segments_.count;
    Place widened, multiplied, scaled;
    for (int64_t step = 0; step < steps + 2; ++step) {
      const int64_t turn = step % 2;
      if (step < steps) widen_columns(widened, turn), widened.advance(segments_.count);
      if (step >= 1 && step <= steps)
        multiply(multiplied, 1 - turn), multiplied.advance(segments_.count);
      if (step >= 2) scale(scaled, turn), scaled.advance(segments_.count);
    }
  }

 private:
  // The rows that are multiplied together with one.
  int64_t held(int64_t row) const { return rows_ - row < kTileRows ? rows_ - row : kTileRows; }

  TPC_INLINE void widen_columns(Place place, int64_t turn) {
    const Segment& segment = segments_[place.segment];
    const int64_t next = place.row + kTileRows;
    const char* ahead =
        (next < rows_ ? weight_.address(next) : next_weights_) + kTileRows * segment.column;
    const auto run = [&](auto count) TPC_ALWAYS {
      widen(weight_.from(place.row, segment.column), held(place.row), count, ahead, tiles_[turn]);
    };
    if (segment.count == kMany) run(Many());
    else run(segment.count);
  }

  TPC_INLINE void multiply(Place place, int64_t turn) {
    if (place.segment == 0 && (place.row == 0 || held(place.row) < kTileRows))
      shape_tiles(held(place.row), sequences_);
    const Segment& segment = segments_[place.segment];
    add_tiles(segment, tiles_[turn], static_cast<const float*>(packed_[place.segment]), sequences_);
    if (!segment.ends) return;
    const int64_t step = registers_ == 1 ? sizeof(float) : sizeof(Lanes);
    _tile_stored(TPC_SUMS, even_[turn], step);
    _tile_stored(TPC_ODD_SUMS, odd_[turn], step);
    complete_writes();
  }

  TPC_INLINE void scale(Place place, int64_t turn) {
    if (place.segment == 0) begin_rows(place.row);
    const Segment& segment = segments_[place.segment];
    if (!segment.ends) return;
    const float* factors = scales_ + segment.group * kTileRows;
    const Lanes *even = even_[turn], *odd = odd_[turn];
    Lanes* terms = terms_ + segment.leaf * registers_;
    if (registers_ == 1)
      terms[0] = multiply_add(terms[0], even[0] + odd[0], load(factors));
    else
      for (int64_t row = 0; row < kTileRows; ++row)
        terms[row] = multiply_add(terms[row], even[row] + odd[row], everywhere(factors[row]));
    if (place.segment + 1 == segments_.count) end_rows(place.row);
  }

  // Lay out the scales of some rows as `[group][row]`.
  void begin_rows(int64_t first) {
    const int64_t groups = weight_.groups(), count = held(first);
    const float* scales = weight_.scales(first, 0, count * groups, held_scales_);
    for (int64_t row = 0; row < count; ++row)
      for (int64_t group = 0; group < groups; ++group)
        scales_[group * kTileRows + row] = *scales++ * kFloat8;
    for (int64_t term = 0; term < x_.leaves * registers_; ++term) terms_[term] = Lanes{};
  }

  void end_rows(int64_t first) {
    const int64_t stored = join_leaves(x_, terms_, registers_);
    for (int64_t leaf = 0; leaf < stored; ++leaf) {
      Lanes* sequences = terms_ + leaf * registers_;
      if (registers_ > 1) transpose(sequences);
      for (int64_t b = 0; b < sequences_; ++b)
        store_some(out_ + leaf * x_.apart + first + b * out_stride_, sequences[b], held(first));
    }
  }

  const Float8& weight_;
  const int64_t rows_;
  const Segments& segments_;
  const Operand<Form<bf16, Float8>>& x_;
  const void* const* const packed_;  // values of each segment
  const int64_t sequences_;
  // Sums of one sequence are a register with 16 rows; those of several are a register per row.
  const int64_t registers_;
  float* const out_;
  const int64_t out_stride_;
  const char* const next_weights_;
  float *const scales_, *const held_scales_;
  Lanes* const terms_;  // of each leaf
  alignas(64) bf16 tiles_[2][kMany / kTileColumns * kTile];
  Lanes even_[2][kTileRows] = {}, odd_[2][kTileRows] = {};
};

inline void float8_tile_dots(const Float8& weight, int64_t rows,
                             const Operand<Form<bf16, Float8>>& x, float* out, int64_t out_stride,
                             Scratch& scratch) {
  const Segments segments = segments_of(weight, x.columns, x.leaves, scratch);
  for (int64_t first = 0; first < x.batch; first += kTileSequences)
    Float8Tiles(weight, rows, segments, x, first, out, out_stride, scratch).run();
  _tile_release();
}
