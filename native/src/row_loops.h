// Loops over one row of logits, written so that the compiler turns them into vector instructions.
//
// Each gives the same bits whatever the instruction set: whole numbers, or floats that are combined in a fixed order.
#pragma once

#include <cstdint>

namespace giveway {

// Values of a row are weighed and summed up in pieces of so many.
inline constexpr int64_t kPieceSize = 512;

inline constexpr int64_t num_pieces(int64_t vocab) { return (vocab + kPieceSize - 1) / kPieceSize; }

struct RowScan {
  int64_t best;  // index of the first of the largest values
  double largest;
  double smallest;
  int64_t num_wrong;  // values that are NaN or infinite; if not 0, the other fields mean nothing
};

// Looks at every value of logits [vocab], vocab >= 1, once.
RowScan scan_row(const float* logits, int64_t vocab);

// The same for a row that holds no NaN. Infinite values are values like any other: num_wrong is 0.
RowScan scan_row(const double* row, int64_t vocab);

// row[i] = logits[i], as float64.
void widen_row(const float* logits, int64_t vocab, double* row);

// scaled[i] = (values[i] - largest) / temperature. scaled may be the same memory as values.
void scale_row(const float* values, int64_t vocab, double largest, double temperature, double* scaled);
void scale_row(const double* values, int64_t vocab, double largest, double temperature, double* scaled);

// Weights of one piece of a scaled row: weights[i] = e^scaled[i], or 0 where scaled[i] < limit.
// weights: [kPieceSize]; zeros from `count` on.
void weigh_piece(const double* scaled, int64_t count, double limit, double* weights);

// piece_sums[p] = sum of the weights of piece p. Returns the sum of all.
double sum_weights(const double* scaled, int64_t vocab, double limit, double* piece_sums);

// Number of values above `value`, plus that of those equal to it before index `end_of_equals`.
int64_t count_before(const double* row, int64_t vocab, double value, int64_t end_of_equals);

// row[i] -= amount.
void subtract(double* row, int64_t vocab, double amount);

// Whether any of values [count] is above `limit`.
bool is_any_above(const double* values, int64_t count, double limit);

// A cut of the scaled values, which are at most 0, into buckets of equal width; the larger the value, the smaller the
// number of its bucket. Everything beyond the last but one is in the last.
struct Buckets {
  static constexpr int64_t kCount = 1024;
  double per_unit;  // buckets in an interval of length 1

  int32_t of(double scaled) const {
    const double place = scaled * -per_unit;
    return static_cast<int32_t>(place < kCount - 1 ? place : kCount - 1);
  }
};

// sums[b] = sum of the weights (as in weigh_piece) of bucket b. sums: [Buckets::kCount].
void sum_buckets(const double* scaled, int64_t vocab, double limit, Buckets buckets, double* sums);

// places [kPieceSize]: the bucket of each value of one piece. Returns how many are in `bucket`.
int64_t find_bucket(const double* scaled, int64_t count, Buckets buckets, int32_t bucket, int32_t* places);

}  // namespace giveway
