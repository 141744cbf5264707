// How threads share the work of one stage and find out that it is done.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "types.h"

namespace giveway {

// How much of a stage a thread takes at a time: so little that one that falls behind holds up little. A multiple of
// `granularity`.
inline int64_t choose_piece(int64_t total, int64_t granularity, int64_t num_threads) {
  constexpr int64_t kPiecesPerThread = 4;
  const int64_t num_pieces = num_threads * kPiecesPerThread;
  return rounded_up(std::max<int64_t>((total + num_pieces - 1) / num_pieces, 1), granularity);
}

// Not a barrier: whoever finds no work left waits until every piece is *done*, not until every thread has come. So a
// thread that another process has pushed off its core holds nobody up unless it stopped in the middle of a piece; when
// it comes back it walks through the finished stages and joins the others. A step has hundreds of stages: on busy
// cores, barriers made it tens of times slower.
class alignas(64) WorkCounter {
 public:
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }

  // Calls work(first, last) for pieces of [0, total) of `piece` until none is left; returns when all are done. What one
  // thread wrote in its pieces is then visible to all.
  template <typename Work>
  void share(int64_t total, int64_t piece, Work work) {
    for (int64_t first; (first = next_.fetch_add(piece, std::memory_order_relaxed)) < total;) {
      const int64_t last = std::min(first + piece, total);
      work(first, last);
      done_.fetch_add(last - first, std::memory_order_release);
    }
    for (int turn = 0; done_.load(std::memory_order_acquire) < total; ++turn) {
      if (turn < kSpinTurns) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpinTurns = 1000;  // some ten microseconds

  static void pause() {
#if defined(GIVEWAY_X86)
    __builtin_ia32_pause();
#endif
  }

  std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace giveway
