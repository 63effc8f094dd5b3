// Operations on many tokens, whose products are computed by AMX.
//
// A tile holds sums of 16 rows and 16 columns. Each is a sum of products in order.
#include "prompts_avx512.h"

namespace {

// The rows of a tile, and the words of a row.
constexpr int64_t kTile = 16;
constexpr int64_t kRows = 2 * kTile, kStrip = kRows, kSteps = kTile;

// Return rows in bf16 as an operand: null, because those at a distance of a power of two would
// compete for places in the cache.
TPC_INLINE const Packed* as_packed(const bf16*) { return nullptr; }

// The tiles of a function, whose operands have `words` words of each row and token.
class Tiles {
 public:
  explicit Tiles(int64_t words = kTile) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = 64, shapes.rows[tile] = kTile;
    for (int tile : {4, 5}) shapes.row_bytes[tile] = static_cast<uint16_t>(4 * words);
    for (int tile : {6, 7}) shapes.rows[tile] = static_cast<uint8_t>(words);
    complete_writes();
    _tile_loadconfig(&shapes);
  }

  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }
};

// Set or increase `out` by products of 32 rows of `a` with 16·kTiles columns of `b`.
template <int kTiles, bool kAdd>
TPC_INLINE void multiply_tiles(const Packed* a, int64_t a_stride, const Packed* b, int64_t b_stride,
                               int64_t b_next, int64_t steps, float* out, int64_t out_stride) {
  const int64_t a_bytes = a_stride * int64_t{sizeof *a}, b_bytes = b_stride * int64_t{sizeof *b};
  const int64_t out_bytes = out_stride * int64_t{sizeof *out};
  const auto place = [&](int64_t row, int64_t column) {
    return out + row * kTile * out_stride + column * kTile;
  };
  if constexpr (kAdd) {
    _tile_loadd(0, place(0, 0), out_bytes);
    _tile_loadd(1, place(1, 0), out_bytes);
    if constexpr (kTiles == 2) {
      _tile_loadd(2, place(0, 1), out_bytes);
      _tile_loadd(3, place(1, 1), out_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; step += kSteps) {
    _tile_loadd(4, a + step, a_bytes);
    _tile_loadd(6, b + step * b_stride, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + kTile * a_stride + step, a_bytes);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTiles == 2) {
      _tile_loadd(7, b + b_next + step * b_stride, b_bytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, place(0, 0), out_bytes);
  _tile_stored(1, place(1, 0), out_bytes);
  if constexpr (kTiles == 2) {
    _tile_stored(2, place(0, 1), out_bytes);
    _tile_stored(3, place(1, 1), out_bytes);
  }
}

// Set or increase `out` by products of 32 rows of `a` with 16·kVectors columns of `b`, 16 of which
// are side by side.
template <int kVectors, bool kAdd>
TPC_INLINE void multiply(const Packed* a, int64_t a_stride, const Packed* b, int64_t b_stride,
                         int64_t b_next, int64_t steps, float* out, int64_t out_stride) {
  complete_writes();
#pragma GCC unroll 2
  for (int v = 0; v < kVectors / 2 * 2; v += 2)
    multiply_tiles<2, kAdd>(a, a_stride, b + v * b_next, b_stride, b_next, steps, out + v * kTile,
                            out_stride);
  if constexpr (kVectors % 2)
    multiply_tiles<1, kAdd>(a, a_stride, b + (kVectors - 1) * b_next, b_stride, b_next, steps,
                            out + (kVectors - 1) * kTile, out_stride);
  complete_writes();
}

}  // namespace

#include "prompts_kernels.h"

extern "C" const void* tpc_prompts_amx_bf16() {
  static constexpr tpc::ManyKernel kMany[] = {TPC_MANY_KERNELS};
  return kMany;
}
