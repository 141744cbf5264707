#include "draw.h"

#include <algorithm>
#include <limits>

#include "float64_math.h"
#include "row_loops.h"

namespace giveway {

namespace {

uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

// Index of the first entry with which the weights, behind those that sum up to `before`, exceed `target`. If rounding
// leaves none, the last with a weight that counts: one of weight zero is never chosen.
int64_t find_place(const Entry* entries, int64_t count, double before, double target) {
  int64_t last = 0;
  double reached = before;
  for (int64_t i = 0; i < count; ++i) {
    const double next = reached + exp_of_nonpositive(entries[i].value);
    if (next > target) return i;
    if (next > reached) last = i;
    reached = next;
  }
  return last;
}

struct Kept {
  int64_t count;
  double mass;  // of these, and of all before them
};

// The fewest entries with which the weights, behind those that sum up to `before`, reach `target`; all, if none does.
Kept keep_until(const Entry* entries, int64_t count, double before, double target) {
  double reached = before;
  for (int64_t i = 0; i < count; ++i) {
    reached += exp_of_nonpositive(entries[i].value);
    if (reached >= target) return {i + 1, reached};
  }
  return {count, reached};
}

// The draw from all tokens of at least `limit`, whose weights are added up in the order of the ids.
int64_t draw_in_order_of_ids(const double* scaled, int64_t vocab, double limit, double number, double* piece_sums) {
  const double mass = sum_weights(scaled, vocab, limit, piece_sums);
  const double target = number * mass;  // below the mass also when rounded: it is half a unit in the last place away
  int64_t piece = 0;
  double reached = 0;
  while (reached + piece_sums[piece] <= target) reached += piece_sums[piece++];
  double weights[kPieceSize];
  const int64_t start = piece * kPieceSize;
  const int64_t count = std::min(kPieceSize, vocab - start);
  weigh_piece(scaled + start, count, limit, weights);
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double next = reached + weights[i];
    if (next > target) return start + i;
    if (next > reached) last = i;
    reached = next;
  }
  return start + last;  // the piece added up one by one gave less than its sum
}

// The draw from the top_k best, and of these from the fewest that reach top_p.
int64_t draw_from_best(const double* scaled, int64_t vocab, const DrawWishes& wishes, Entry* entries) {
  select_best(scaled, vocab, wishes.top_k, entries);
  Kept kept = keep_until(entries, wishes.top_k, 0.0, std::numeric_limits<double>::infinity());
  if (wishes.top_p < 1) kept = keep_until(entries, kept.count, 0.0, wishes.top_p * kept.mass);
  return entries[find_place(entries, kept.count, 0.0, wishes.number * kept.mass)].token;
}

// A scaled row in buckets, so that only the buckets in which something is decided need to be sorted.
struct BucketedRow {
  const double* scaled;
  int64_t vocab;
  Buckets buckets;
  const double* sums;  // of the weights, bucket by bucket

  // Writes the entries of one bucket, best first; returns how many.
  int64_t sorted_bucket(int32_t bucket, Entry* entries) const {
    int32_t places[kPieceSize];
    int64_t collected = 0;
    for (int64_t start = 0; start < vocab; start += kPieceSize) {
      const int64_t count = std::min(kPieceSize, vocab - start);
      if (find_bucket(scaled + start, count, buckets, bucket, places) == 0) continue;
      for (int64_t i = 0; i < count; ++i) {
        if (places[i] == bucket) entries[collected++] = {scaled[start + i], start + i};
      }
    }
    std::sort(entries, entries + collected, is_ranked_before);
    return collected;
  }
};

// Buckets that are fine where top_p can end. What is smaller than the range holds less than half of the mass that top_p
// leaves out, since the largest weight is 1; but for a top_p within rounding of 1 nothing of it is kept.
Buckets choose_buckets(double smallest, int64_t vocab, double top_p) {
  const double range = std::min(-smallest, log_of_positive(2.0 * static_cast<double>(vocab) / (1 - top_p)));
  return {range > 1e-290 ? Buckets::kCount / range : 0.0};  // a smaller range might give an infinite quotient
}

// The draw from the fewest best that reach top_p, of the tokens of at least `limit`.
int64_t draw_from_top_p(const BucketedRow& row, const DrawWishes& wishes, Entry* entries) {
  double mass = 0;
  for (int64_t i = 0; i < Buckets::kCount; ++i) mass += row.sums[i];
  const double end = wishes.top_p * mass;
  int32_t bucket = 0;
  double before = 0;
  while (before + row.sums[bucket] < end) before += row.sums[bucket++];  // ends: all of them reach the mass
  int64_t count = row.sorted_bucket(bucket, entries);
  const Kept kept = keep_until(entries, count, before, end);
  count = kept.count;
  const double target = wishes.number * kept.mass;
  if (target < before) {  // in an earlier bucket
    bucket = 0;
    before = 0;
    while (before + row.sums[bucket] <= target) before += row.sums[bucket++];
    count = row.sorted_bucket(bucket, entries);
  }
  return entries[find_place(entries, count, before, target)].token;
}

}  // namespace

double uniform(uint64_t seed, uint64_t index) {
  return static_cast<double>(mix(mix(seed) + (index + 1) * 0x9E3779B97F4A7C15u) >> 11) * 0x1p-53;
}

int64_t num_draw_sums(int64_t vocab) { return std::max(num_pieces(vocab), Buckets::kCount); }

int64_t draw_token(const double* scaled, int64_t vocab, double smallest, const DrawWishes& wishes,
                   const DrawScratch& scratch) {
  constexpr double kNoLimit = -std::numeric_limits<double>::infinity();
  const double limit = wishes.min_p > 0 ? log_of_positive(wishes.min_p) : kNoLimit;
  if (wishes.top_k > 0) {
    const int64_t num_allowed = wishes.min_p > 0 ? count_before(scaled, vocab, limit, vocab) : vocab;
    if (wishes.top_k < num_allowed) return draw_from_best(scaled, vocab, wishes, scratch.entries);
  }
  if (wishes.top_p >= 1) return draw_in_order_of_ids(scaled, vocab, limit, wishes.number, scratch.sums);
  const Buckets buckets = choose_buckets(smallest, vocab, wishes.top_p);
  sum_buckets(scaled, vocab, limit, buckets, scratch.sums);
  return draw_from_top_p({scaled, vocab, buckets, scratch.sums}, wishes, scratch.entries);
}

}  // namespace giveway
