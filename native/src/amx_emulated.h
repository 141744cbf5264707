// AMX tiles in software, so that the kernels that use them can be tested on a processor without (CMake option
// GIVEWAY_EMULATE_AMX; `make check-native` builds with it). Slow, and strict: what a processor would answer with a
// fault ends the process. Included by kernels_amx.cpp before everything else.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG, TILELOADD, TILESTORED,
// TDPBF16PS.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace giveway::emulated {

constexpr int kTiles = 8, kMostRows = 16, kMostRowBytes = 64;

struct alignas(64) Tile {
  uint8_t data[kMostRows][kMostRowBytes];
  int num_rows, row_bytes;
};

struct TileState {
  Tile tiles[kTiles];
  bool is_configured;
};

inline thread_local TileState state{};

inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline void load_configuration(const void* memory) {
  uint8_t bytes[64];
  std::memcpy(bytes, memory, sizeof bytes);
  must(bytes[0] == 1 && bytes[1] == 0, "a palette or a start row that nobody uses");
  for (int i = 2; i < 16; ++i) must(bytes[i] == 0, "reserved bytes of a configuration are not zero");
  for (int i = 0; i < 16; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    const int num_rows = bytes[48 + i];
    must(row_bytes <= kMostRowBytes && num_rows <= kMostRows, "a tile that is too large");
    if (i < kTiles) state.tiles[i] = Tile{{}, num_rows, row_bytes};
  }
  state.is_configured = true;
}

inline void release() { state = TileState{}; }

inline Tile& tile(int number) {
  must(state.is_configured, "tiles are used before they are configured");
  must(number >= 0 && number < kTiles && state.tiles[number].num_rows > 0, "a tile that has no shape");
  return state.tiles[number];
}

inline void clear(int number) { std::memset(tile(number).data, 0, sizeof(Tile::data)); }

inline void load(int number, const void* base, long stride) {
  Tile& target = tile(number);
  std::memset(target.data, 0, sizeof target.data);
  for (int row = 0; row < target.num_rows; ++row)
    std::memcpy(target.data[row], static_cast<const char*>(base) + row * stride, static_cast<size_t>(target.row_bytes));
}

inline void store(int number, void* base, long stride) {
  Tile& source = tile(number);
  for (int row = 0; row < source.num_rows; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, source.data[row], static_cast<size_t>(source.row_bytes));
}

// sums += left . right: in every lane a chain of the even products and one of the odd, both from +0, then their sum.
// Denormal numbers are flushed by the mode that kernels set when they are entered.
inline void multiply_pairs(int sums, int left, int right) {
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  must(c.num_rows == a.num_rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.num_rows,
       "tiles whose shapes do not fit");
  must(sums != left && sums != right && left != right, "a product with one tile twice");
  for (int row = 0; row < c.num_rows; ++row) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int pair = 0; pair < b.num_rows; ++pair) {
      uint32_t both;
      std::memcpy(&both, a.data[row] + 4 * pair, sizeof both);
      const __m512i x = _mm512_set1_epi32(static_cast<int>(both)), weights = _mm512_load_si512(b.data[pair]);
      const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                             _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
                            _mm512_castsi512_ps(_mm512_and_si512(weights, high)), odd);
    }
    const __m512 total = _mm512_load_ps(c.data[row]);
    _mm512_store_ps(c.data[row], _mm512_add_ps(total, _mm512_add_ps(even, odd)));
  }
}

}  // namespace giveway::emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(memory) ::giveway::emulated::load_configuration(memory)
#define _tile_release() ::giveway::emulated::release()
#define _tile_loadd(number, base, stride) ::giveway::emulated::load(number, base, stride)
#define _tile_stored(number, base, stride) ::giveway::emulated::store(number, base, stride)
#define _tile_zero(number) ::giveway::emulated::clear(number)
#define _tile_dpbf16ps(sums, left, right) ::giveway::emulated::multiply_pairs(sums, left, right)
