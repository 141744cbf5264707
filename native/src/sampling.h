// Choosing the next token of every row of a batch, and reporting log-probabilities.
//
// The order of operations and their meaning are those of giveway/runtime/sampler.py: forbidden tokens and those that a
// grammar does not allow, bias, penalties (repetition, frequency, presence), temperature, min_p, top_k, top_p;
// log-probabilities are the model's own, before all of these. All arithmetic on a row is float64, on that row alone and
// in a fixed order: a result depends neither on the batch, nor on threads, nor on the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace giveway {

// Logits of a batch. Rows may lie apart.
struct LogitRows {
  const float* first;  // of the first row
  int64_t row_stride;  // floats from one row to the next
  int64_t num_rows;
  int64_t vocab;  // at least 1

  const float* row(int64_t index) const { return first + index * row_stride; }
};

// A list of token ids for every row, one behind the other. Ids outside the vocabulary mean nothing.
struct TokenLists {
  const int64_t* offsets = nullptr;  // [num_rows + 1] of the lists in `tokens`; null: all are empty
  const int64_t* tokens = nullptr;   // [offsets[num_rows]]
};

// Which tokens of every row may be chosen, as bits: bit `token % 32` of word `token / 32`. None beyond the last word.
struct TokenMasks {
  struct Row {
    int64_t start;  // of its words in `words`; -1: the row has no mask, and every token may be chosen
    int64_t num_words;
  };
  const Row* rows = nullptr;  // [num_rows]; null: no row has a mask
  const uint32_t* words = nullptr;
};

// How to choose the token of every row: the fields of SampleInput. Each pointer has an element for every row.
struct RowWishes {
  const double* temperature;
  const double* top_p;
  const double* min_p;
  const double* repetition_penalty;
  const double* presence_penalty;
  const double* frequency_penalty;
  const int64_t* top_k;
  const int64_t* num_logprobs;  // -1: none
  const uint64_t* seed;
  const uint64_t* output_index;
  TokenLists forbidden;
  TokenMasks allowed;
  TokenLists biased;     // each id at most once in a row
  const double* biases;  // what is added to the logit of each of biased.tokens
  TokenLists prompt;     // needed where a row has a repetition penalty
  TokenLists output;     // and these where it has any penalty
};

// Where log-probabilities go. Each pointer has an element, or a list, for every row.
struct LogprobRows {
  double* logprob;       // of the token
  int64_t* rank;         // of the token among all: 1 for the best
  int64_t* top_tokens;   // [num_rows, max_top] the most likely tokens, best first; behind num_logprobs: unchanged
  double* top_logprobs;  // [num_rows, max_top]
  int64_t max_top;
};

// Bytes of scratch memory that each thread needs for rows of `vocab` logits.
size_t sampling_scratch_bytes(int64_t vocab);

// Finds the largest logit of every row: the first of equal ones.
// tokens, num_wrong: [num_rows]. num_wrong: logits that are NaN or infinite; if not 0, the token is -1.
void choose_largest(const LogitRows& logits, int num_threads, int64_t* tokens, int64_t* num_wrong);

// Chooses the token of every row.
// scratch: num_threads * sampling_scratch_bytes(vocab). tokens, num_wrong: as above; the token is -1 also where all are
// forbidden. logprobs: written for rows that have a token and num_logprobs >= 0.
void choose_tokens(const LogitRows& logits, const RowWishes& wishes, int num_threads, std::byte* scratch,
                   int64_t* tokens, int64_t* num_wrong, const LogprobRows& logprobs);

// Log-probabilities of one given token in every row; top lists of logprobs.max_top tokens, or all if these are fewer.
// tokens: [num_rows], within the vocabulary. num_wrong: as above; rows where it is not 0 get nothing else.
void score_tokens(const LogitRows& logits, const int64_t* tokens, int num_threads, std::byte* scratch,
                  int64_t* num_wrong, const LogprobRows& logprobs);

}  // namespace giveway
