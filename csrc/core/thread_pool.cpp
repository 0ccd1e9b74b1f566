#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace leanfleet {

namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spins for about `microseconds` until ready() holds; says whether it does.
template <class F>
bool spin_until(int microseconds, F&& ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// Waking a sleeping thread takes longer than a small call, so workers watch for the next call a little while before
// they sleep, and a call waits only for the workers that came in time to take part.
class Pool : public Threads {
 public:
  // Where the system gives fewer threads, those do all the work. count() stays what was asked for: how a call is cut, and
  // with it its workspace and every bit of its result, does not depend on luck.
  explicit Pool(int count) : count_(count), spin_us_(count <= available_processors() ? 50 : 0) {
    workers_.reserve(static_cast<size_t>(count - 1));
    try {
      for (int i = 1; i < count; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::exception&) {  // a limit on threads or on memory
    }
  }

  ~Pool() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      calls_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int count() const override { return count_; }

  void run(int64_t tasks, void (*task)(void*, int64_t), void* context) override {
    if (tasks <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < tasks; ++i) task(context, i);
      return;
    }
    std::lock_guard<std::mutex> turn(turn_);
    bool sleepers;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      calls_.fetch_add(1);
      sleepers = sleeping_ > 0;
    }
    if (sleepers) wake_.notify_all();
    drain();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;  // who comes now finds nothing to do
    }
    if (spin_until(spin_us_, [this] { return busy_.load() == 0; })) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_.load() == 0; });
  }

 private:
  void drain() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, i);
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (calls_.load() == seen) {
        lock.unlock();
        spin_until(spin_us_, [&] { return calls_.load() != seen; });
        lock.lock();
        ++sleeping_;
        wake_.wait(lock, [&] { return calls_.load() != seen; });
        --sleeping_;
      }
      if (stopping_) return;
      seen = calls_.load();
      if (!open_) continue;
      busy_.fetch_add(1);
      lock.unlock();
      drain();
      lock.lock();
      if (busy_.fetch_sub(1) == 1) done_.notify_one();
    }
  }

  const int count_;
  const int spin_us_;
  std::vector<std::thread> workers_;
  std::mutex turn_;   // held by the call that runs
  std::mutex mutex_;  // guards what follows; calls_ and busy_ are also read without it
  std::condition_variable wake_, done_;
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> calls_{0};  // how many there have been
  std::atomic<int> busy_{0};        // workers inside the call
  int sleeping_ = 0;
  bool open_ = false;  // workers may still join the call
  bool stopping_ = false;
};

// The process's pool. A forked child has none of its parent's threads, and of mutexes and condition variables it cannot
// know the state: it forgets the whole of it, without a destructor, and makes its own. Callers bring no call across a
// fork, which is made by one of their threads and not within a task.
struct Shared {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
};

std::atomic<Shared*> shared{nullptr};

struct Owner {
  Owner() {
    pthread_atfork(nullptr, nullptr, [] { shared.store(nullptr); });
  }
  ~Owner() {  // before the library is unloaded: its threads run in it
    Shared* const last = shared.load();
    if (last == nullptr) return;
    std::lock_guard<std::mutex> lock(last->mutex);
    last->pool.reset();
  }
} owner;

Shared& own() {
  Shared* found = shared.load();
  if (found != nullptr) return *found;
  auto made = std::make_unique<Shared>();
  if (!shared.compare_exchange_strong(found, made.get())) return *found;
  return *made.release();
}

}  // namespace

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

std::shared_ptr<Threads> shared_threads(int count) {
  if (count < 1) count = available_processors();
  Shared& mine = own();
  std::lock_guard<std::mutex> lock(mine.mutex);
  if (mine.pool == nullptr || mine.pool->count() != count) mine.pool = std::make_shared<Pool>(count);
  return mine.pool;
}

}  // namespace leanfleet
