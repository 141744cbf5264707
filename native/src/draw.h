// Drawing a token at random from a scaled row.
#pragma once

#include <cstdint>

#include "selection.h"

namespace giveway {

// A number in [0, 1) that is a function of its arguments: draw `index` of the stream `seed`.
// Source: the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), applied to the seed and then to the index.
double uniform(uint64_t seed, uint64_t index);

// Which tokens may be drawn, as SamplingParams has it, and the number that decides.
struct DrawWishes {
  double min_p;   // 0 to 1
  int64_t top_k;  // 0 and below: all
  double top_p;   // above 0; 1 and more: all
  double number;  // [0, 1), a multiple of 2^-53
};

// Memory that drawing writes to.
struct DrawScratch {
  Entry* entries;  // [vocab]
  double* sums;    // [num_draw_sums(vocab)]
};

int64_t num_draw_sums(int64_t vocab);

// Draws a token. scaled [vocab]: (logits - the largest) / temperature. smallest: none of them is below it.
int64_t draw_token(const double* scaled, int64_t vocab, double smallest, const DrawWishes& wishes,
                   const DrawScratch& scratch);

}  // namespace giveway
