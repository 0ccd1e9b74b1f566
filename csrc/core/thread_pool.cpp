#include "core/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace leanfleet {

namespace {

class Pool : public Threads {
 public:
  explicit Pool(int count) : pid_(getpid()) {
    for (int i = 1; i < count; ++i) workers_.emplace_back([this] { work(); });
  }

  ~Pool() override {
    if (!in_creator()) {  // after a fork the threads do not exist in this process: leave their handles alone
      new std::vector<std::thread>(std::move(workers_));
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int count() const override { return static_cast<int>(workers_.size()) + 1; }
  bool in_creator() const { return pid_ == getpid(); }

  void run(int64_t tasks, void (*task)(void*, int64_t), void* context) override {
    if (tasks <= 1 || workers_.empty()) {
      for (int64_t i = 0; i < tasks; ++i) task(context, i);
      return;
    }
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      busy_ = static_cast<int>(workers_.size());
      ++generation_;
    }
    wake_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void drain() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, i);
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      lock.unlock();
      drain();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  const pid_t pid_;
  std::vector<std::thread> workers_;
  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t tasks_ = 0;
  std::atomic<int64_t> next_{0};
  int busy_ = 0;
  uint64_t generation_ = 0;
  bool stopping_ = false;
};

}  // namespace

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

std::shared_ptr<Threads> shared_threads(int count) {
  static std::mutex mutex;
  static std::shared_ptr<Pool> pool;
  if (count < 1) count = available_processors();
  std::lock_guard<std::mutex> lock(mutex);
  if (pool == nullptr || pool->count() != count || !pool->in_creator()) pool = std::make_shared<Pool>(count);
  return pool;
}

}  // namespace leanfleet
