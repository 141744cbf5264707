// Products of activations with packed weights. Included by kernels_*.cpp only.
//
// Up to kDirectRows rows: weights are decoded in registers, straight into the product. More rows: a strip of a panel is
// decoded to float32 once and then multiplied with all rows of a chunk; both stay in the second cache.
#pragma once

#include <algorithm>
#include <cstring>

#include "decode.h"
#include "kernels.h"
#include "matmul_amx.h"
#include "matmul_dot.h"
#include "matmul_epilogue.h"
#include "matmul_tile.h"

namespace giveway::GW_SET {

#if defined(__AVX512F__)
inline constexpr int kDirectRows = 6;
#elif defined(__AVX2__)
inline constexpr int kDirectRows = 3;
#else
inline constexpr int kDirectRows = 2;
#endif
// Blocks of a panel that are decoded at a time: 48 KiB. Strips of 16 KiB, which the first cache would hold, are slower.
inline constexpr int64_t kStripBlocks = 24;
inline constexpr int64_t kChunkRows = 192;                  // rows that share what was decoded, at most
inline constexpr int64_t kChunkBytes = int64_t{384} << 10;  // of these rows' activations

struct MatmulScratch {
  alignas(64) float weights[2 * kStripBlocks * kBlockWeights];
  alignas(64) float totals[kChunkRows * kTotalsStride];
  alignas(64) float parked[kParkedSums];
};

static int64_t matmul_scratch_bytes([[maybe_unused]] int64_t num_inputs) {
  constexpr int64_t bytes = sizeof(MatmulScratch);
#if GW_PACKS_BF16
  return std::max(bytes, bf16_scratch_bytes(num_inputs));
#else
  return bytes;
#endif
}

// `panels` panels, panel_bytes apart, by `rows` rows; totals [rows][kTotalsStride].
template <Encoding encoding, Compute compute, int panels, int rows>
static void multiply_directly(const float* x, int64_t x_stride, const std::byte* data, int64_t panel_bytes,
                              int64_t num_blocks, float* totals) {
  v16 total[rows][panels];
  clear(total);
  for (int64_t index = 0; index < num_blocks; ++index, x += kBlockK, data += panel_block_bytes(encoding)) {
#pragma GCC unroll 2
    for (int panel = 0; panel < panels; ++panel) {
      const std::byte* at = data + panel * panel_bytes;
      prefetch_ahead<encoding>(at);
      const auto block = PanelBlock<encoding, compute>::open(at);
      v16 even[rows], odd[rows];
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) even[row] = odd[row] = zero();
      for (int64_t pair = 0; pair < kBlockK / 2; ++pair) {
        const v16_pair weights = block.pair(pair);
#pragma GCC unroll 16
        for (int row = 0; row < rows; ++row) {
          even[row] = fma(broadcast(x[row * x_stride + 2 * pair]), weights.even, even[row]);
          odd[row] = fma(broadcast(x[row * x_stride + 2 * pair + 1]), weights.odd, odd[row]);
        }
      }
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) total[row][panel] = add(total[row][panel], add(even[row], odd[row]));
    }
  }
  for_each_sum<rows, panels>(
      [&](int row, int panel) { store(totals + row * kTotalsStride + panel * kPanelColumns, total[row][panel]); });
}

using DirectFunction = void (*)(const float*, int64_t, const std::byte*, int64_t, int64_t, float*);

template <Encoding encoding, Compute compute, int panels, int... rows_less_one>
constexpr DirectFunction direct_function(int64_t rows, std::integer_sequence<int, rows_less_one...>) {
  constexpr DirectFunction functions[] = {multiply_directly<encoding, compute, panels, rows_less_one + 1>...};
  return functions[rows - 1];
}

template <Encoding encoding, Compute compute>
static void decode(const std::byte* data, int64_t num_blocks, float* weights) {
  for (int64_t index = 0; index < num_blocks; ++index, data += panel_block_bytes(encoding)) {
    prefetch_ahead<encoding>(data);
    const auto block = PanelBlock<encoding, compute>::open(data);
    for (int64_t pair = 0; pair < kBlockK / 2; ++pair, weights += 2 * kPanelColumns) {
      const v16_pair decoded = block.pair(pair);
      store(weights, decoded.even);
      store(weights + kPanelColumns, decoded.odd);
    }
  }
}

// Rows and panels whose products are made together: totals[row][panel] = x[row] . weights[panel].
struct Group {
  const float* x;  // [num_rows][x_stride]
  int64_t x_stride, num_rows;
  const std::byte* panels;
  int64_t panel_bytes, num_panels, num_blocks;
};

template <Encoding encoding, Compute compute>
static void multiply_group(const Group& group, MatmulScratch& scratch) {
  constexpr auto sizes = std::make_integer_sequence<int, kDirectRows>();
  if (group.num_rows <= kDirectRows) {
    // Weights that are not decoded are bound by reading, and one core reads two streams faster than one; decoding
    // keeps a core so busy that a second stream only disturbs.
    constexpr int64_t kTogether = is_read_plainly(encoding) ? 2 : 1;
    const int64_t together = std::min(kTogether, group.num_panels);
    const DirectFunction multiply = together == 2 ? direct_function<encoding, compute, kTogether>(group.num_rows, sizes)
                                                  : direct_function<encoding, compute, 1>(group.num_rows, sizes);
    for (int64_t panel = 0; panel < group.num_panels; panel += together)
      multiply(group.x, group.x_stride, group.panels + panel * group.panel_bytes, group.panel_bytes, group.num_blocks,
               scratch.totals + panel * kPanelColumns);
    return;
  }
  std::memset(scratch.totals, 0, static_cast<size_t>(group.num_rows * kTotalsStride) * sizeof(float));
  Strip strip{group.x, group.x_stride, nullptr, 0, 0, scratch.totals, scratch.parked, nullptr, 0};
  const std::byte* next = group.panels + group.num_panels * group.panel_bytes;  // panels of the next group
  if constexpr (encoding == Encoding::f32 && compute == Compute::f32) {
    strip.weights = reinterpret_cast<const float*>(group.panels);
    strip.panel_stride = group.num_blocks * kBlockWeights;
    strip.num_blocks = group.num_blocks;
    strip.ahead = next;
    // A single tile has no work to spare that would hide the fetching: the processor's own is better.
    multiply_rows(strip, group.num_rows, group.num_panels,
                  group.num_rows <= kTileRows ? 0 : group.num_panels * group.panel_bytes);
    return;
  }
  strip.weights = scratch.weights, strip.panel_stride = kStripBlocks * kBlockWeights;
  for (int64_t first = 0; first < group.num_blocks; first += kStripBlocks) {
    strip.num_blocks = std::min(kStripBlocks, group.num_blocks - first);
    strip.x = group.x + first * kBlockK;
    for (int64_t panel = 0; panel < group.num_panels; ++panel)
      decode<encoding, compute>(group.panels + panel * group.panel_bytes + first * panel_block_bytes(encoding),
                                strip.num_blocks, scratch.weights + panel * strip.panel_stride);
    // Of the next group's bytes, for a block of this one; decoding asks for the smaller encodings itself.
    const int64_t share = is_read_plainly(encoding) ? group.num_panels * panel_block_bytes(encoding) : 0;
    strip.ahead = next + first * share;
    multiply_rows(strip, group.num_rows, group.num_panels, strip.num_blocks * share);
  }
}

// Rows of a chunk: as many as the second cache holds, chunks of equal size, whole tiles where that changes little.
GW_INLINE int64_t choose_chunk_rows(int64_t num_rows, int64_t x_stride) {
  const int64_t fitting = kChunkBytes / (x_stride * static_cast<int64_t>(sizeof(float)));
  const int64_t most = std::clamp<int64_t>(fitting, 2 * kTileRows, kChunkRows);
  return std::min(most, rounded_up(equal_part(std::max<int64_t>(num_rows, 1), most), kTileRows));
}

template <Compute compute, Encoding encoding>
static void multiply_floats(const MatmulArgs& args) {
  const Panels& weights = *args.weights;
  MatmulScratch& scratch = *reinterpret_cast<MatmulScratch*>(args.scratch);
  const int64_t chunk_rows = choose_chunk_rows(args.num_rows, args.x_stride);
  for (int64_t first = 0; first < args.num_rows; first += chunk_rows) {
    Group group{static_cast<const float*>(args.x) + first * args.x_stride,
                args.x_stride,
                std::min(chunk_rows, args.num_rows - first),
                nullptr,
                weights.panel_bytes(),
                0,
                weights.num_blocks()};
    for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2) {
      group.panels = weights.panel(panel);
      group.num_panels = std::min<int64_t>(2, args.last_panel - panel);
      multiply_group<encoding, compute>(group, scratch);
      finish(args, first, group.num_rows, panel, group.num_panels, scratch.totals);
    }
  }
}

template <Compute compute>
static void multiply_floats(const MatmulArgs& args) {
  with_encoding(args.weights->encoding, [&](auto encoding) { multiply_floats<compute, encoding>(args); });
}

static void matmul(const MatmulArgs& args) {
  if (args.compute == Compute::f32) return multiply_floats<Compute::f32>(args);
#if GW_PACKS_BF16
  multiply_bf16(args);
#else
  multiply_floats<Compute::bf16>(args);
#endif
}

}  // namespace giveway::GW_SET
