// Products by VDPBF16PS. Included by kernels_avx512_bf16.cpp only.
//
// Order of adding, the same for every number of rows but not that of the other sets: one chain from +0 takes pair after
// pair of inputs, of each pair the odd input first and then the even one, each a fused multiply-add. Source: Intel SDM,
// VDPBF16PS (denormal numbers are taken and given as zero).
#pragma once

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "matmul_epilogue.h"
#include "pairs.h"
#include "register_tile.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace giveway::GW_SET {

inline constexpr int kDotRows = 12;       // rows that two panels of pairs are multiplied with at once
inline constexpr int kDirectDotRows = 4;  // up to so many rows, weights are decoded in registers for each product
inline constexpr int kDirectPanels = 4;   // decoded abreast: a single row has no other independent sums

inline constexpr int64_t kPartRows = 48;  // rows that are multiplied with two decoded panels at a time
inline constexpr int64_t kChunkBytesOfPairs = int64_t{1} << 20;  // activations that share what was decoded

// The panel's weights as pairs: where they lie if they are stored so, else decoded into scratch.
template <Encoding encoding>
static const uint16_t* panel_pairs(const Panels& panels, int64_t panel, uint16_t* scratch) {
  const std::byte* data = panels.panel(panel);
  if constexpr (encoding == Encoding::bf16) return reinterpret_cast<const uint16_t*>(data);
  decode_pairs<encoding>(data, panels.num_blocks(), scratch);
  return scratch;
}

// Two panels by all rows of a part; weights as [blocks][16 pairs][16 columns][2].
struct PairStrip {
  const uint16_t* x;  // [rows][x_stride]
  int64_t x_stride;
  const uint16_t* weights[2];
  int64_t num_panels, num_blocks;
  float* totals;  // [kPartRows][2 panels][16 columns]
};

template <int rows, int panels>
static void multiply_dots(const PairStrip& strip, int64_t first_row) {
  const uint16_t* x = strip.x + first_row * strip.x_stride;
  const uint16_t* weights[panels];
  for (int panel = 0; panel < panels; ++panel) weights[panel] = strip.weights[panel];
  v16 totals[rows][panels];
  clear(totals);
  for (int64_t pair = 0; pair < strip.num_blocks * (kBlockK / 2); ++pair) {
    __m512i pairs[panels];
#pragma GCC unroll 2
    for (int panel = 0; panel < panels; ++panel) pairs[panel] = load_pairs(weights[panel] + pair * 2 * kPanelColumns);
    add_pair(x + 2 * pair, strip.x_stride, pairs, totals);
  }
  float* out = strip.totals + first_row * kTotalsStride;
  for_each_sum<rows, panels>(
      [&](int row, int panel) { store(out + row * kTotalsStride + panel * kPanelColumns, totals[row][panel]); });
}

// The same with weights that are decoded on the way. totals: [panels / 2, rounded up][rows][2][16].
template <Encoding encoding, int rows, int panels>
static void multiply_decoded(const uint16_t* x, int64_t x_stride, const std::byte* data, int64_t panel_bytes,
                             int64_t num_blocks, float* totals) {
  v16 sums[rows][panels];
  clear(sums);
  for (int64_t index = 0; index < num_blocks; ++index, x += kBlockK, data += panel_block_bytes(encoding)) {
    PanelBlock<encoding, Compute::f32> blocks[panels];
#pragma GCC unroll 4
    for (int panel = 0; panel < panels; ++panel) {
      prefetch_ahead<encoding>(data + panel * panel_bytes, panels * panel_bytes);
      blocks[panel] = PanelBlock<encoding, Compute::f32>::open(data + panel * panel_bytes);
    }
#pragma GCC unroll 2
    for (int64_t pair = 0; pair < kBlockK / 2; ++pair) {
      __m512i pairs[panels];
#pragma GCC unroll 4
      for (int panel = 0; panel < panels; ++panel) {
        if constexpr (encoding == Encoding::bf16) {
          pairs[panel] = load_pairs(data + panel * panel_bytes + pair * 4 * kPanelColumns);
        } else {
          pairs[panel] = as_pairs<encoding>(blocks[panel].pair(pair));
        }
      }
      add_pair(x + 2 * pair, x_stride, pairs, sums);
    }
  }
  for_each_sum<rows, panels>([&](int row, int panel) {
    store(totals + (panel / 2 * rows + row) * kTotalsStride + panel % 2 * kPanelColumns, sums[row][panel]);
  });
}

using DotFunction = void (*)(const PairStrip&, int64_t);

template <int panels, int... rows_less_one>
constexpr DotFunction dot_function(int64_t rows, std::integer_sequence<int, rows_less_one...>) {
  constexpr DotFunction functions[] = {multiply_dots<rows_less_one + 1, panels>...};
  return functions[rows - 1];
}

using DecodedFunction = void (*)(const uint16_t*, int64_t, const std::byte*, int64_t, int64_t, float*);

template <Encoding encoding, int panels, int... rows_less_one>
constexpr DecodedFunction decoded_function(int64_t rows, std::integer_sequence<int, rows_less_one...>) {
  constexpr DecodedFunction functions[] = {multiply_decoded<encoding, rows_less_one + 1, panels>...};
  return functions[rows - 1];
}

template <Encoding encoding>
static DecodedFunction decoded_function(int64_t rows, int64_t panels) {
  constexpr auto sizes = std::make_integer_sequence<int, kDirectDotRows>();
  switch (panels) {
    case 1:
      return decoded_function<encoding, 1>(rows, sizes);
    case 2:
      return decoded_function<encoding, 2>(rows, sizes);
    case 3:
      return decoded_function<encoding, 3>(rows, sizes);
    default:
      return decoded_function<encoding, 4>(rows, sizes);
  }
}

// How many of `left` panels are decoded abreast; gate and up stay together.
GW_INLINE int64_t choose_panels(int64_t left, Epilogue epilogue) {
  if (epilogue != Epilogue::gate && (left == 5 || left == 6)) return 3;
  return std::min<int64_t>(left, kDirectPanels);
}

template <Encoding encoding>
static void multiply_few(const MatmulArgs& args) {
  const Panels& weights = *args.weights;
  float* totals = reinterpret_cast<float*>(args.scratch);
  for (int64_t panel = args.first_panel, abreast; panel < args.last_panel; panel += abreast) {
    abreast = choose_panels(args.last_panel - panel, args.epilogue);
    decoded_function<encoding>(args.num_rows, abreast)(static_cast<const uint16_t*>(args.x), args.x_stride,
                                                       weights.panel(panel), weights.panel_bytes(),
                                                       weights.num_blocks(), totals);
    for (int64_t done = 0; done < abreast; done += 2)
      finish(args, 0, args.num_rows, panel + done, std::min<int64_t>(2, abreast - done),
             totals + done / 2 * args.num_rows * kTotalsStride);
  }
}

// Scratch: the totals of a part, then two decoded panels.
static int64_t bf16_scratch_bytes(int64_t num_inputs) {
  const int64_t num_blocks = (num_inputs + kBlockK - 1) / kBlockK;
  return kPartRows * kTotalsStride * static_cast<int64_t>(sizeof(float)) + 2 * num_blocks * kPairWords * 2;
}

static void multiply_part(const PairStrip& strip, int64_t num_rows) {
  constexpr auto sizes = std::make_integer_sequence<int, kDotRows>();
  // Tiles of nearly equal size: a small one at the end has too few independent sums.
  for (int64_t first = 0; first < num_rows;) {
    const int64_t rows = equal_part(num_rows - first, kDotRows);
    (strip.num_panels == 2 ? dot_function<2>(rows, sizes) : dot_function<1>(rows, sizes))(strip, first);
    first += rows;
  }
}

template <Encoding encoding>
static void multiply_many(const MatmulArgs& args) {
  const Panels& panels = *args.weights;
  float* totals = reinterpret_cast<float*>(args.scratch);
  uint16_t* decoded = reinterpret_cast<uint16_t*>(totals + kPartRows * kTotalsStride);
  const int64_t fitting = kChunkBytesOfPairs / (args.x_stride * 2) / kPartRows * kPartRows;
  const int64_t chunk_rows = std::max(fitting, kPartRows);
  for (int64_t first = 0; first < args.num_rows; first += chunk_rows) {
    const int64_t last = std::min(first + chunk_rows, args.num_rows);
    const int64_t part_rows = equal_part(last - first, kPartRows);
    for (int64_t panel = args.first_panel; panel < args.last_panel; panel += 2) {
      PairStrip strip{nullptr,
                      args.x_stride,
                      {nullptr, nullptr},
                      std::min<int64_t>(2, args.last_panel - panel),
                      panels.num_blocks(),
                      totals};
      for (int64_t index = 0; index < strip.num_panels; ++index)
        strip.weights[index] =
            panel_pairs<encoding>(panels, panel + index, decoded + index * strip.num_blocks * kPairWords);
      for (int64_t row = first; row < last; row += part_rows) {
        const int64_t num_rows = std::min(part_rows, last - row);
        strip.x = static_cast<const uint16_t*>(args.x) + row * args.x_stride;
        multiply_part(strip, num_rows);
        finish(args, row, num_rows, panel, strip.num_panels, totals);
      }
    }
  }
}

static void multiply_bf16(const MatmulArgs& args) {
  with_encoding(args.weights->encoding, [&](auto encoding) {
    args.num_rows <= kDirectDotRows ? multiply_few<encoding>(args) : multiply_many<encoding>(args);
  });
}

}  // namespace giveway::GW_SET

#endif
