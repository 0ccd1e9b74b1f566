// The engine for tensors of the CPU: ranks of one host put their data into buffers that all see.
//
// A collective is cut into pieces of half a buffer, numbered 1, 2, ... over the communicator's life. For piece n a rank writes
// half n % 2 of its buffer and then says that it has arrived; when all have, each reads what it needs. A rank that writes piece
// n + 1 knows that all have arrived at n, so that none reads the half of n - 1 any more.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <mutex>

#include "core/board.h"
#include "core/cpu_isa.h"

namespace leanfleet {

namespace sums {
LEANFLEET_CPU_FUNCTION(void, add_parts, (const void* const* parts, int num_parts, void* output, int64_t count, int32_t dtype))
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kBufferBytes = 1 << 20, kPieceBytes = kBufferBytes / 2;
constexpr int kSpins = 2000;                     // loads before the thread sleeps: ranks in step are there within microseconds
constexpr int64_t kNapNanoseconds = 20'000'000;  // between looks at whether the rank waited for is alive
enum Kind : int32_t { kSum, kGather };
const char* const kKindNames[] = {"a sum", "a gathering"};

void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen) {
  const struct timespec nap = {0, kNapNanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &nap, nullptr, 0);
}
void wake_all(const std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

std::string text_of_step(const BoardStep& step) {
  const bool known = step.kind >= 0 && step.kind <= kGather && step.dtype >= 0 && step.dtype < kNumDTypes;
  if (!known) return "something else";
  return std::string(kKindNames[step.kind]) + " of " + std::to_string(step.count) + " " +
         dtype_name(static_cast<DType>(step.dtype)) + " numbers";
}

class SharedMemory : public Communicator {
 public:
  SharedMemory(const CommunicatorSetup& setup, std::unique_ptr<Board> board)
      : board_(std::move(board)), process_(getpid()), timeout_s_(setup.timeout_s) {
    name = setup.name;
    rank = setup.rank;
    world = setup.world;
    engine = Engine::kSharedMemory;
  }

  // Waits until all ranks have taken their places.
  Status join() {
    const Clock::time_point begin = Clock::now();
    for (int other = 0; other < world; ++other) {
      const BoardPlace& place = board_->place(other);
      while (place.process.load(std::memory_order_acquire) == 0) {
        if (timed_out(begin)) return late(other, "has not come");
        usleep(1000);
      }
      if (place.world != world)
        return Status::invalid(message("rank " + std::to_string(other) + " says that there are " + std::to_string(place.world) +
                                       " ranks; all must say the same"));
    }
    board_->remove_name();
    return {};
  }

  Status sum(const void* input, void* output, int64_t count, DType dtype, void*) override {
    const int64_t size = element_size(dtype);
    return exchange({kSum, static_cast<int32_t>(dtype), count}, input, count * size,
                    [&](int64_t offset, int64_t bytes, int half) {
                      const void* parts[kMaxRanks];
                      for (int r = 0; r < world; ++r) parts[r] = board_->buffer(r) + half * kPieceBytes;
                      sums::select_add_parts()(parts, world, static_cast<char*>(output) + offset, bytes / size,
                                               static_cast<int32_t>(dtype));
                    });
  }

  Status gather(const void* input, void* output, int64_t count, DType dtype, void*) override {
    const int64_t own = count * element_size(dtype);
    return exchange({kGather, static_cast<int32_t>(dtype), count}, input, own, [&](int64_t offset, int64_t bytes, int half) {
      for (int r = 0; r < world; ++r)
        std::memcpy(static_cast<char*>(output) + r * own + offset, board_->buffer(r) + half * kPieceBytes,
                    static_cast<size_t>(bytes));
    });
  }

  Status health() override {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    return failure_;
  }

  void abort(const std::string& reason) override { fail({Code::kPeer, message(reason)}); }

 private:
  template <class Read>
  Status exchange(const BoardStep& step, const void* input, int64_t bytes, Read&& read) {
    std::lock_guard<std::mutex> lock(calls_);
    if (getpid() != process_)
      return Status::invalid(
          message("it belongs to process " + std::to_string(process_) + ", which forked this one; create one in this process"));
    LEANFLEET_RETURN_IF_ERROR(health());
    for (int64_t offset = 0; offset < bytes; offset += kPieceBytes) {
      const int64_t piece = std::min(kPieceBytes, bytes - offset);
      ++number_;
      const int half = static_cast<int>(number_ % 2);
      BoardPlace& own = board_->place(rank);
      own.steps[half] = step;
      std::memcpy(board_->buffer(rank) + half * kPieceBytes, static_cast<const char*>(input) + offset,
                  static_cast<size_t>(piece));
      own.arrived.store(number_, std::memory_order_release);
      wake_all(own.arrived);
      Status status = await_all(step, half);
      if (!status.ok()) return fail(status);
      read(offset, piece, half);
    }
    return {};
  }

  Status await_all(const BoardStep& step, int half) {
    const Clock::time_point begin = Clock::now();
    for (int other = 0; other < world; ++other) {
      if (other == rank) continue;
      LEANFLEET_RETURN_IF_ERROR(await(other, begin));
      const BoardStep& theirs = board_->place(other).steps[half];
      if (theirs.kind != step.kind || theirs.dtype != step.dtype || theirs.count != step.count)
        return {Code::kPeer, message("rank " + std::to_string(other) + " is at " + text_of_step(theirs) + ", this one at " +
                                     text_of_step(step) +
                                     "; all ranks must run the same nodes with the same shapes in one "
                                     "order")};
    }
    return {};
  }

  Status await(int other, Clock::time_point begin) {
    const std::atomic<uint32_t>& arrived = board_->place(other).arrived;
    for (int spin = 0;; ++spin) {
      const uint32_t seen = arrived.load(std::memory_order_acquire);
      if (static_cast<int32_t>(seen - number_) >= 0) return {};
      if (spin < kSpins) continue;
      LEANFLEET_RETURN_IF_ERROR(health());  // aborted by another thread
      const std::string absent = board_->absent(other, true);
      // It may have arrived as its last act.
      if (!absent.empty() && static_cast<int32_t>(arrived.load() - number_) < 0) return {Code::kPeer, message(absent)};
      if (timed_out(begin)) return late(other, "has not come to the same node");
      sleep_on(arrived, seen);
    }
  }

  bool timed_out(Clock::time_point begin) const {
    return std::chrono::duration<double>(Clock::now() - begin).count() > timeout_s_;
  }
  Status late(int other, const char* what) const {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", timeout_s_);
    return {Code::kPeer, message("rank " + std::to_string(other) + " " + what + " within " + seconds + " s")};
  }
  Status fail(Status status) {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_.ok()) failure_ = std::move(status);
    return failure_;
  }

  const std::unique_ptr<Board> board_;
  const int process_;
  const double timeout_s_;
  std::mutex calls_, failure_mutex_;
  uint32_t number_ = 0;
  Status failure_;
};

}  // namespace

Status open_shared_memory(const CommunicatorSetup& setup, std::shared_ptr<Communicator>* made) {
  std::unique_ptr<Board> board;
  LEANFLEET_RETURN_IF_ERROR(Board::open(setup, kBufferBytes, &board));
  auto communicator = std::make_shared<SharedMemory>(setup, std::move(board));
  LEANFLEET_RETURN_IF_ERROR(communicator->join());
  *made = std::move(communicator);
  return {};
}

}  // namespace leanfleet
