// How threads share the work of one stage and find out that it is done.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "types.h"

namespace giveway {

// How [0, total) is cut up: into pieces that begin and end at multiples of `granularity`. `piece` is one, too.
struct Cut {
  int64_t total, granularity, piece;
};

// So much of a stage at a time that a thread that falls behind holds up little.
inline Cut cut_for(int64_t num_threads, int64_t total, int64_t granularity) {
  constexpr int64_t kPiecesPerThread = 4;
  const int64_t num_pieces = num_threads * kPiecesPerThread;
  return {total, granularity, rounded_up(std::max<int64_t>((total + num_pieces - 1) / num_pieces, 1), granularity)};
}

// One of the threads that share a stage.
struct Member {
  int index, count;
};
inline Member this_member() { return {omp_get_thread_num(), omp_get_num_threads()}; }

// The spans of a stage, one for each thread: nearly equal, the first ones have one unit more.
inline constexpr int64_t kMostSpans = 8;  // as many as a cache line counts; further threads have a span in common
struct Spans {
  int64_t num_units, count;

  Spans(int64_t units, int64_t num_threads)
      : num_units(units), count(std::clamp<int64_t>(units, 1, std::min(num_threads, kMostSpans))) {}
  int64_t begin(int64_t span) const { return num_units / count * span + std::min(span, num_units % count); }
};

// Not a barrier: whoever finds no work left waits until every piece is *done*, not until every thread has come. So a
// thread that another process has pushed off its core holds nobody up unless it stopped in the middle of a piece; when
// it comes back it walks through the finished stages and joins the others. A step has hundreds of stages: on busy
// cores, barriers made it tens of times slower.
//
// Every thread has a span of its own and takes its pieces in order; one that is through helps with the others' spans.
// So what it reads next mostly lies behind what it has read, where prefetching looks: with pieces from one common
// order, products with one row took longer.
class alignas(64) WorkCounter {
 public:
  void reset() {
    for (auto& next : taken_) next.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }

  // Calls work(first, last) for all pieces; returns when all are done. What one thread wrote in its pieces is then
  // visible to all. Members must agree on everything but their index.
  template <typename Work>
  void share(const Cut& cut, Member member, Work work) {
    const Spans spans((cut.total + cut.granularity - 1) / cut.granularity, member.count);
    for (int64_t turn = 0; turn < spans.count; ++turn) {
      const int64_t span = (member.index + turn) % spans.count;  // spans are equal: their last pieces may be smaller
      const int64_t begin = spans.begin(span) * cut.granularity;
      const int64_t end = std::min(spans.begin(span + 1) * cut.granularity, cut.total);
      auto& taken = taken_[span];
      for (int64_t first; (first = begin + taken.fetch_add(cut.piece, std::memory_order_relaxed)) < end;) {
        const int64_t last = std::min(first + cut.piece, end);
        work(first, last);
        done_.fetch_add(last - first, std::memory_order_release);
      }
    }
    for (int turn = 0; done_.load(std::memory_order_acquire) < cut.total; ++turn) {
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

  std::atomic<int64_t> taken_[kMostSpans]{};  // of each span
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace giveway
