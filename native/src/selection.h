// The largest values of a row, in order.
#pragma once

#include <cstdint>

namespace giveway {

struct Entry {
  double value;
  int64_t token;
};

// The order in which tokens are ranked everywhere: the larger value first, between equal ones the smaller id.
inline bool is_ranked_before(const Entry& one, const Entry& other) {
  return one.value > other.value || (one.value == other.value && one.token < other.token);
}

// Finds the `count` best-ranked of row [vocab], 1 <= count <= vocab, and writes them to entries, best first.
// entries: room for `vocab`; what lies behind the first `count` is used on the way.
void select_best(const double* row, int64_t vocab, int64_t count, Entry* entries);

}  // namespace giveway
