#include "sampling.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#if defined(GIVEWAY_X86)
#include <xmmintrin.h>
#endif

#include "draw.h"
#include "float64_math.h"
#include "row_loops.h"

namespace giveway {

namespace {

// The usual floating point of IEEE 754 for as long as it lives, with denormal numbers, whatever the thread has set.
class UsualFloats {
 public:
#if defined(GIVEWAY_X86)
  UsualFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~UsualFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  UsualFloats() {}
#endif

 public:
  UsualFloats(const UsualFloats&) = delete;
  UsualFloats& operator=(const UsualFloats&) = delete;
};

// Memory that the work on one row writes to.
struct RowScratch {
  double* row;      // [vocab]
  int32_t* counts;  // [vocab]; of any content
  DrawScratch draw;
};

size_t rounded_up(size_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

size_t row_bytes(int64_t vocab) { return rounded_up(sizeof(double) * vocab); }
size_t entry_bytes(int64_t vocab) { return rounded_up(sizeof(Entry) * vocab); }
size_t sum_bytes(int64_t vocab) { return rounded_up(sizeof(double) * num_draw_sums(vocab)); }
size_t count_bytes(int64_t vocab) { return rounded_up(sizeof(int32_t) * vocab); }

RowScratch scratch_of(std::byte* start, int64_t vocab) {
  std::byte* const entries = start + row_bytes(vocab);
  std::byte* const sums = entries + entry_bytes(vocab);
  std::byte* const counts = sums + sum_bytes(vocab);
  return {reinterpret_cast<double*>(start),
          reinterpret_cast<int32_t*>(counts),
          {reinterpret_cast<Entry*>(entries), reinterpret_cast<double*>(sums)}};
}

// The list of one row without the ids outside the vocabulary, given to `use` one by one with their place in all lists.
template <typename Use>
void for_each_known(const TokenLists& lists, int64_t row, int64_t vocab, Use use) {
  if (lists.offsets == nullptr) return;
  for (int64_t place = lists.offsets[row]; place < lists.offsets[row + 1]; ++place) {
    const int64_t token = lists.tokens[place];
    if (token >= 0 && token < vocab) use(token, place);
  }
}

bool is_empty(const TokenLists& lists, int64_t row) {
  return lists.offsets == nullptr || lists.offsets[row] == lists.offsets[row + 1];
}

bool has_output_penalty(const RowWishes& wishes, int64_t index) {
  return wishes.presence_penalty[index] != 0 || wishes.frequency_penalty[index] != 0;
}

bool has_mask(const TokenMasks& masks, int64_t row) { return masks.rows != nullptr && masks.rows[row].start >= 0; }

// Calls use(token) for every token of the vocabulary that the mask of a row leaves out.
template <typename Use>
void for_each_left_out(const TokenMasks& masks, int64_t row, int64_t vocab, Use use) {
  constexpr int64_t kBits = 32;
  constexpr uint32_t kAll = 0xffffffffu;
  const auto [word_start, num_words] = masks.rows[row];
  for (int64_t start = 0; start < vocab; start += kBits) {
    const int64_t place = start / kBits;
    const uint32_t word = place < num_words ? masks.words[word_start + place] : 0;
    if (word == kAll) continue;
    const int64_t count = std::min(kBits, vocab - start);
    for (int64_t bit = 0; bit < count; ++bit) {
      if ((word >> bit & 1u) == 0) use(start + bit);
    }
  }
}

bool changes_logits(const RowWishes& wishes, int64_t index) {
  return !is_empty(wishes.forbidden, index) || has_mask(wishes.allowed, index) || !is_empty(wishes.biased, index) ||
         wishes.repetition_penalty[index] != 1 || has_output_penalty(wishes, index);
}

void penalize_repetition(const RowWishes& wishes, int64_t index, int64_t vocab, const RowScratch& scratch) {
  const double penalty = wishes.repetition_penalty[index];
  const TokenLists* const all_lists[] = {&wishes.prompt, &wishes.output};
  for (const TokenLists* lists : all_lists) {
    for_each_known(*lists, index, vocab, [&](int64_t token, int64_t) { scratch.counts[token] = 0; });
  }
  for (const TokenLists* lists : all_lists) {
    for_each_known(*lists, index, vocab, [&](int64_t token, int64_t) {
      if (scratch.counts[token]++ > 0) return;  // once for each token
      double& logit = scratch.row[token];
      logit = logit > 0 ? logit / penalty : logit * penalty;
    });
  }
}

void penalize_output(const RowWishes& wishes, int64_t index, int64_t vocab, const RowScratch& scratch) {
  for_each_known(wishes.output, index, vocab, [&](int64_t token, int64_t) { scratch.counts[token] = 0; });
  for_each_known(wishes.output, index, vocab, [&](int64_t token, int64_t) { ++scratch.counts[token]; });
  for_each_known(wishes.output, index, vocab, [&](int64_t token, int64_t) {
    if (scratch.counts[token] == 0) return;  // done
    scratch.row[token] -= wishes.frequency_penalty[index] * scratch.counts[token];
    scratch.row[token] -= wishes.presence_penalty[index];
    scratch.counts[token] = 0;
  });
}

void change_logits(const RowWishes& wishes, int64_t index, int64_t vocab, const RowScratch& scratch) {
  constexpr double kNever = -std::numeric_limits<double>::infinity();
  for_each_known(wishes.forbidden, index, vocab, [&](int64_t token, int64_t) { scratch.row[token] = kNever; });
  if (has_mask(wishes.allowed, index)) {
    for_each_left_out(wishes.allowed, index, vocab, [&](int64_t token) { scratch.row[token] = kNever; });
  }
  for_each_known(wishes.biased, index, vocab,
                 [&](int64_t token, int64_t place) { scratch.row[token] += wishes.biases[place]; });
  if (wishes.repetition_penalty[index] != 1) penalize_repetition(wishes, index, vocab, scratch);
  if (has_output_penalty(wishes, index)) penalize_output(wishes, index, vocab, scratch);
}

// The token of one row of finite logits, or -1 when all are forbidden. found: what scan_row said of the logits.
int64_t choose_token(const float* logits, int64_t vocab, RowScan found, const RowWishes& wishes, int64_t index,
                     const RowScratch& scratch) {
  const bool is_changed = changes_logits(wishes, index);
  if (is_changed) {
    widen_row(logits, vocab, scratch.row);
    change_logits(wishes, index, vocab, scratch);
    found = scan_row(scratch.row, vocab);
    if (found.largest == -std::numeric_limits<double>::infinity()) return -1;
  }
  const double temperature = wishes.temperature[index];
  // Only a repetition penalty next to 0 makes a logit infinite: nothing else has any weight beside it.
  if (temperature == 0 || std::isinf(found.largest)) return found.best;
  if (is_changed) {
    scale_row(scratch.row, vocab, found.largest, temperature, scratch.row);
  } else {
    scale_row(logits, vocab, found.largest, temperature, scratch.row);
  }
  const double number = uniform(wishes.seed[index], wishes.output_index[index]);
  return draw_token(scratch.row, vocab, (found.smallest - found.largest) / temperature,
                    {wishes.min_p[index], wishes.top_k[index], wishes.top_p[index], number}, scratch.draw);
}

// Log-probabilities of `token` and of the num_top best, from finite logits of which `largest` is the largest.
void score_token(const float* logits, int64_t vocab, double largest, int64_t token, int64_t num_top,
                 const RowScratch& scratch, int64_t index, const LogprobRows& logprobs) {
  constexpr double kNoLimit = -std::numeric_limits<double>::infinity();
  scale_row(logits, vocab, largest, 1.0, scratch.row);
  subtract(scratch.row, vocab, log_of_positive(sum_weights(scratch.row, vocab, kNoLimit, scratch.draw.sums)));
  logprobs.logprob[index] = scratch.row[token];
  logprobs.rank[index] = 1 + count_before(scratch.row, vocab, scratch.row[token], token);
  const int64_t count = std::min(num_top, vocab);
  if (count == 0) return;
  Entry* const best = scratch.draw.entries;
  select_best(scratch.row, vocab, count, best);
  for (int64_t i = 0; i < count; ++i) {
    logprobs.top_tokens[index * logprobs.max_top + i] = best[i].token;
    logprobs.top_logprobs[index * logprobs.max_top + i] = best[i].value;
  }
}

// Runs work(index of a row, number of the thread) for every row.
template <typename Work>
void for_each_row(int64_t num_rows, int num_threads, Work work) {
#pragma omp parallel num_threads(num_threads)
  {
    const UsualFloats usual_floats;
#pragma omp for schedule(dynamic)
    for (int64_t index = 0; index < num_rows; ++index) work(index, omp_get_thread_num());
  }
}

// Threads that are of use for so many rows.
int limited_threads(int num_threads, int64_t num_rows) {
  return static_cast<int>(std::clamp<int64_t>(num_rows, 1, std::max(num_threads, 1)));
}

}  // namespace

size_t sampling_scratch_bytes(int64_t vocab) {
  return row_bytes(vocab) + entry_bytes(vocab) + sum_bytes(vocab) + count_bytes(vocab);
}

void choose_largest(const LogitRows& logits, int num_threads, int64_t* tokens, int64_t* num_wrong) {
  for_each_row(logits.num_rows, limited_threads(num_threads, logits.num_rows), [&](int64_t index, int) {
    const RowScan found = scan_row(logits.row(index), logits.vocab);
    num_wrong[index] = found.num_wrong;
    tokens[index] = found.num_wrong > 0 ? -1 : found.best;
  });
}

void choose_tokens(const LogitRows& logits, const RowWishes& wishes, int num_threads, std::byte* scratch,
                   int64_t* tokens, int64_t* num_wrong, const LogprobRows& logprobs) {
  const size_t bytes = sampling_scratch_bytes(logits.vocab);
  for_each_row(logits.num_rows, limited_threads(num_threads, logits.num_rows), [&](int64_t index, int thread) {
    const RowScratch own = scratch_of(scratch + thread * bytes, logits.vocab);
    const float* const row = logits.row(index);
    const RowScan found = scan_row(row, logits.vocab);
    num_wrong[index] = found.num_wrong;
    tokens[index] = found.num_wrong > 0 ? -1 : choose_token(row, logits.vocab, found, wishes, index, own);
    if (tokens[index] >= 0 && wishes.num_logprobs[index] >= 0) {
      score_token(row, logits.vocab, found.largest, tokens[index], wishes.num_logprobs[index], own, index, logprobs);
    }
  });
}

void score_tokens(const LogitRows& logits, const int64_t* tokens, int num_threads, std::byte* scratch,
                  int64_t* num_wrong, const LogprobRows& logprobs) {
  const size_t bytes = sampling_scratch_bytes(logits.vocab);
  for_each_row(logits.num_rows, limited_threads(num_threads, logits.num_rows), [&](int64_t index, int thread) {
    const RowScratch own = scratch_of(scratch + thread * bytes, logits.vocab);
    const float* const row = logits.row(index);
    const RowScan found = scan_row(row, logits.vocab);
    num_wrong[index] = found.num_wrong;
    if (found.num_wrong == 0) {
      score_token(row, logits.vocab, found.largest, tokens[index], logprobs.max_top, own, index, logprobs);
    }
  });
}

}  // namespace giveway
