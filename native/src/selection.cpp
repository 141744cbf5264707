#include "selection.h"

#include <algorithm>

#include "row_loops.h"

namespace giveway {

namespace {

constexpr int64_t kSkipped = 64;  // values that are looked at together first

}  // namespace

void select_best(const double* row, int64_t vocab, int64_t count, Entry* entries) {
  // Collect candidates. When there are twice as many as are wanted, the better half stays, and from then on only what
  // is above the worst of them is collected: an equal one that comes later has a larger id. Where nothing is above it,
  // many are passed over at once; in most rows that is nearly everywhere.
  const int64_t most = std::min(std::max<int64_t>(2 * count, 64), vocab);
  int64_t collected = 0;
  bool has_bar = false;
  double bar = 0;
  for (int64_t start = 0; start < vocab; start += kSkipped) {
    const int64_t end = std::min(start + kSkipped, vocab);
    if (has_bar && !is_any_above(row + start, end - start, bar)) continue;
    for (int64_t token = start; token < end; ++token) {
      if (has_bar && !(row[token] > bar)) continue;
      entries[collected++] = {row[token], token};
      if (collected == most && count < most) {
        std::nth_element(entries, entries + count - 1, entries + collected, is_ranked_before);
        collected = count;
        bar = entries[count - 1].value;
        has_bar = true;
      }
    }
  }
  if (count < collected) std::nth_element(entries, entries + count - 1, entries + collected, is_ranked_before);
  std::sort(entries, entries + count, is_ranked_before);
}

}  // namespace giveway
