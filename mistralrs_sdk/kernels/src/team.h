// Threads that share the work of a call, and during a tape stay together from call to call.
//
// OpenMP gathers threads for each region and sends them back; the hundreds of calls of a decode step
// are so short that this is felt. The members of a team wait for the next call where they are.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>

namespace team {

class Team {
 public:
  explicit Team(int size) : size_(size) {}

  // By the leader, thread 0: body(thread, threads) by each of `threads` members at most.
  template <class Body>
  void run(int threads, const Body& body) {
    threads_ = std::min(threads, size_);
    body_ = &body;
    job_ = [](const void* what, int thread, int all) { (*(const Body*)what)(thread, all); };
    start();
    body(0, threads_);
    for (int spins = 0; working_.load(std::memory_order_acquire);) pause(spins);
  }

  // By the others: take part in all calls until the leader dismisses the team.
  void serve(int thread) {
    for (uint32_t round = 0;;) {
      for (int spins = 0; round_.load(std::memory_order_acquire) == round;) pause(spins);
      round++;
      if (!job_) return;
      if (thread < threads_) job_(body_, thread, threads_);
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

  // By the leader, once and last.
  void dismiss() {
    job_ = nullptr;
    start();
  }

 private:
  static constexpr int PATIENCE = 4096;  // looks, some 70 us, before others may have the core

  static void pause(int& spins) {
    if (++spins > PATIENCE) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void start() {
    working_.store(size_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
  }

  const int size_;
  int threads_ = 0;
  const void* body_ = nullptr;
  void (*job_)(const void*, int, int) = nullptr;
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> working_{0};
};

// The team this thread leads.
inline thread_local Team* current = nullptr;

// body(thread, threads) by each of up to `threads` threads.
template <class Body>
void together(int threads, const Body& body) {
  if (threads <= 1) return body(0, 1);
  if (current) return current->run(threads, body);
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}

// body(i) or body(i, thread) for all i < count, each thread some that follow each other.
template <class Body>
void share(int threads, int64_t count, const Body& body) {
  together(int(std::min<int64_t>(threads, count)), [&](int thread, int all) {
    for (int64_t i = count * thread / all; i < count * (thread + 1) / all; i++) {
      if constexpr (std::is_invocable_v<Body, int64_t, int>) body(i, thread);
      else body(i);
    }
  });
}

// The same, each thread taking the next one when it is ready; body(i) of all are independent.
template <class Body>
void take_turns(int threads, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  together(int(std::min<int64_t>(threads, count)), [&](int, int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
  });
}

}  // namespace team
