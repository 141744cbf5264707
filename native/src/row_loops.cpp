#include "row_loops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "float64_math.h"

// Each of these functions is compiled for several instruction sets, and the loader picks one.
#if defined(GIVEWAY_X86) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define GIVEWAY_CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define GIVEWAY_CLONED
#endif

namespace giveway {

namespace {

constexpr int64_t kScanBlock = 1024;

// The bits of a float as a whole number of the same size that is ordered as the floats are, with -0 below +0. Its own
// inverse but for the types.
template <typename Whole>
[[gnu::always_inline]] inline Whole order_of(Whole bits) {
  constexpr Whole kAllButSign = std::numeric_limits<Whole>::max();
  return bits ^ ((bits >> (8 * sizeof(Whole) - 1)) & kAllButSign);
}

template <typename To, typename From>
[[gnu::always_inline]] inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// scan_row, but that num_wrong is 1 if there is any. Whole: as wide as Value. The largest and the smallest are found as
// whole numbers, because only their reductions may be reordered, and so become vector instructions.
template <typename Whole, typename Value>
[[gnu::always_inline]] inline RowScan scan(const Value* values, int64_t vocab) {
  Whole highest = std::numeric_limits<Whole>::min();
  Whole low = std::numeric_limits<Whole>::max();
  Value largest = -std::numeric_limits<Value>::infinity();
  int64_t best = 0;
  for (int64_t start = 0; start < vocab; start += kScanBlock) {
    const int64_t end = std::min(start + kScanBlock, vocab);
    Whole high = std::numeric_limits<Whole>::min();
    for (int64_t i = start; i < end; ++i) {
      const Whole order = order_of(bit_cast<Whole>(values[i]));
      high = order > high ? order : high;
      low = order < low ? order : low;
    }
    highest = high > highest ? high : highest;
    const Value block_largest = bit_cast<Value>(order_of(high));
    if (block_largest > largest) {  // as floats: -0 and +0 are equal, and the first counts
      largest = block_largest;
      best = start;
    }
  }
  const Value smallest = bit_cast<Value>(order_of(low));
  const bool is_finite = std::isfinite(bit_cast<Value>(order_of(highest))) && std::isfinite(smallest);
  return {best, largest, smallest, !is_finite};
}

// Sum of values [kPieceSize], which are overwritten: the second half is added to the first until one is left.
[[gnu::always_inline]] inline double fold(double* values) {
  for (int64_t half = kPieceSize / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) values[i] += values[half + i];
  }
  return values[0];
}

[[gnu::always_inline]] inline void weigh(const double* scaled, int64_t count, double limit, double* weights) {
  if (limit > kLowestPower) {  // mostly one that few tokens of a row reach
    int64_t num_weighed = 0;
    for (int64_t i = 0; i < count; ++i) num_weighed += scaled[i] >= limit;
    if (num_weighed == 0) {
      std::fill(weights, weights + kPieceSize, 0.0);
      return;
    }
  }
  // Short loops, because a processor runs ahead for so many instructions only, and because the compiler uses vectors
  // where a loop has one choice between two values, and not where it has two.
  alignas(64) double scales[kPieceSize];
  for (int64_t i = 0; i < count; ++i) weights[i] = scaled[i] > kLowestPower ? scaled[i] : kLowestPower;
  for (int64_t i = count; i < kPieceSize; ++i) weights[i] = kLowestPower;
  for (int64_t i = 0; i < kPieceSize; ++i) {
    const ReducedPower power = reduce_power(weights[i]);
    weights[i] = power.r;
    scales[i] = power.scale;
  }
  for (int64_t i = 0; i < kPieceSize; ++i) weights[i] = restore_power({weights[i], scales[i]});
  for (int64_t i = 0; i < count; ++i) weights[i] = scaled[i] >= limit ? weights[i] : 0.0;
}

template <typename Value>
[[gnu::always_inline]] inline void scale(const Value* values, int64_t vocab, double largest, double temperature,
                                         double* scaled) {
  for (int64_t i = 0; i < vocab; ++i) {
    scaled[i] = (static_cast<double>(values[i]) - largest) / temperature;
  }
}

}  // namespace

GIVEWAY_CLONED RowScan scan_row(const float* logits, int64_t vocab) {
  RowScan found = scan<int32_t>(logits, vocab);
  if (found.num_wrong > 0) {
    found.num_wrong = 0;
    for (int64_t i = 0; i < vocab; ++i) found.num_wrong += !std::isfinite(logits[i]);
    return found;
  }
  while (logits[found.best] != found.largest) ++found.best;
  return found;
}

GIVEWAY_CLONED RowScan scan_row(const double* row, int64_t vocab) {
  RowScan found = scan<int64_t>(row, vocab);
  found.num_wrong = 0;
  while (row[found.best] != found.largest) ++found.best;
  return found;
}

GIVEWAY_CLONED void widen_row(const float* logits, int64_t vocab, double* row) {
  for (int64_t i = 0; i < vocab; ++i) row[i] = logits[i];
}

GIVEWAY_CLONED void scale_row(const float* values, int64_t vocab, double largest, double temperature, double* scaled) {
  scale(values, vocab, largest, temperature, scaled);
}

GIVEWAY_CLONED void scale_row(const double* values, int64_t vocab, double largest, double temperature, double* scaled) {
  scale(values, vocab, largest, temperature, scaled);
}

GIVEWAY_CLONED void weigh_piece(const double* scaled, int64_t count, double limit, double* weights) {
  weigh(scaled, count, limit, weights);
}

GIVEWAY_CLONED double sum_weights(const double* scaled, int64_t vocab, double limit, double* piece_sums) {
  double sum = 0;
  alignas(64) double weights[kPieceSize];
  for (int64_t piece = 0; piece < num_pieces(vocab); ++piece) {
    const int64_t start = piece * kPieceSize;
    weigh(scaled + start, std::min(kPieceSize, vocab - start), limit, weights);
    piece_sums[piece] = fold(weights);
    sum += piece_sums[piece];
  }
  return sum;
}

GIVEWAY_CLONED int64_t count_before(const double* row, int64_t vocab, double value, int64_t end_of_equals) {
  int64_t count = 0;
  for (int64_t i = 0; i < end_of_equals; ++i) count += row[i] >= value;
  for (int64_t i = end_of_equals; i < vocab; ++i) count += row[i] > value;
  return count;
}

GIVEWAY_CLONED void subtract(double* row, int64_t vocab, double amount) {
  for (int64_t i = 0; i < vocab; ++i) row[i] -= amount;
}

GIVEWAY_CLONED bool is_any_above(const double* values, int64_t count, double limit) {
  int64_t num_above = 0;
  for (int64_t i = 0; i < count; ++i) num_above += values[i] > limit;
  return num_above > 0;
}

GIVEWAY_CLONED void sum_buckets(const double* scaled, int64_t vocab, double limit, Buckets buckets, double* sums) {
  // Most tokens of most rows are in the last bucket. They take turns in adding to several sums, because each addition
  // would have to wait for the one before.
  constexpr int32_t kLast = Buckets::kCount - 1, kLastSums = 16;
  alignas(64) double all_sums[kLast + kLastSums] = {};
  alignas(64) double weights[kPieceSize];
  alignas(64) int32_t places[kPieceSize];
  for (int64_t start = 0; start < vocab; start += kPieceSize) {
    const int64_t count = std::min(kPieceSize, vocab - start);
    weigh(scaled + start, count, limit, weights);
    for (int64_t i = 0; i < count; ++i) places[i] = buckets.of(scaled[start + i]);
    for (int32_t i = 0; i < count; ++i) places[i] += places[i] == kLast ? i % kLastSums : 0;
    for (int64_t i = 0; i < count; ++i) all_sums[places[i]] += weights[i];
  }
  for (int32_t i = 1; i < kLastSums; ++i) all_sums[kLast] += all_sums[kLast + i];
  std::copy(all_sums, all_sums + Buckets::kCount, sums);
}

GIVEWAY_CLONED int64_t find_bucket(const double* scaled, int64_t count, Buckets buckets, int32_t bucket,
                                   int32_t* places) {
  int64_t num_found = 0;
  for (int64_t i = 0; i < count; ++i) {
    places[i] = buckets.of(scaled[i]);
    num_found += places[i] == bucket;
  }
  return num_found;
}

}  // namespace giveway
