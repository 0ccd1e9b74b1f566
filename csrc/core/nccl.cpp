// The engine for tensors of CUDA: NCCL, and for exchanges of up to half a megabyte between GPUs of one host the windows of
// peers.h. NCCL is loaded at run time: what of its interface is used is declared here, as NCCL 2.14 and later have it. Nothing
// else of CUDA's is needed to compile this file.
//
// A thread of each communicator looks ten times a second whether NCCL reports an error, whether a rank of this host has ended
// (NCCL's kernels would wait for it for ever), and whether the last launch has waited longer than the time-out. Then it aborts
// the communicator: kernels that wait return, those in replays of CUDA graphs too. A replay itself it cannot see: who replays
// watches the time, see leanfleet/communicators.py.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "core/board.h"
#include "core/find_symbol.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#include "core/peers.h"
#endif

namespace leanfleet {

namespace {

using Clock = std::chrono::steady_clock;
using NcclComm = void*;

constexpr int kSuccess = 0, kInProgress = 7;  // ncclResult_t
constexpr int kSumOf = 0;                     // ncclRedOp_t
#ifdef LEANFLEET_CUDA
constexpr int64_t kBoardBytes = kPeerBoardBytes;
#else
constexpr int64_t kBoardBytes = 0;
#endif
constexpr int kOldest = 21400;  // the first whose calls need not block
constexpr auto kLook = std::chrono::milliseconds(100);
constexpr auto kStuckCall = std::chrono::seconds(5);  // a launch into a full queue holds the lock

struct NcclId {
  char bytes[128];
};

// ncclConfig_t of 2.14, with the field behind it that pads it in later versions, undefined.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kOldest;
  int blocking = 0;
  int cluster_size = INT_MIN;
};

int nccl_type(DType dtype) {
  return dtype == DType::kFloat16 ? 6 : dtype == DType::kBFloat16 ? 9 : 7;  // ncclDataType_t: half, bfloat16, float
}

struct Nccl {
  int (*get_version)(int*);
  int (*get_id)(NcclId*);
  int (*init)(NcclComm*, int, NcclId, int, NcclConfig*);
  int (*get_error)(NcclComm, int*);
  int (*finalize)(NcclComm);
  int (*destroy)(NcclComm);
  int (*abort)(NcclComm);
  int (*all_reduce)(const void*, void*, size_t, int, int, NcclComm, void*);
  int (*all_gather)(const void*, void*, size_t, int, NcclComm, void*);
  const char* (*error_string)(int);
  const char* (*last_error)(NcclComm);
};

// Stays loaded, as NCCL's threads may outlive a communicator.
Status load_nccl(const std::string& told, const Nccl** loaded) {
  static std::mutex mutex;
  static Nccl nccl;
  static std::string loaded_from;
  std::lock_guard<std::mutex> lock(mutex);
  *loaded = &nccl;
  if (!loaded_from.empty() && (told.empty() || told == loaded_from)) return {};
  const std::string path = told.empty() ? "libnccl.so.2" : told;
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return Status::unsupported(std::string("NCCL cannot be loaded: ") + dlerror() +
                               ". Install the wheel nvidia-nccl-cu13 (or -cu12), which PyTorch for CUDA brings, or give the "
                               "path of libnccl.so.2");
  Nccl found;
  if (!find_symbol(library, "ncclGetVersion", &found.get_version) || !find_symbol(library, "ncclGetUniqueId", &found.get_id) ||
      !find_symbol(library, "ncclCommInitRankConfig", &found.init) ||
      !find_symbol(library, "ncclCommGetAsyncError", &found.get_error) ||
      !find_symbol(library, "ncclCommFinalize", &found.finalize) || !find_symbol(library, "ncclCommDestroy", &found.destroy) ||
      !find_symbol(library, "ncclCommAbort", &found.abort) || !find_symbol(library, "ncclAllReduce", &found.all_reduce) ||
      !find_symbol(library, "ncclAllGather", &found.all_gather) ||
      !find_symbol(library, "ncclGetErrorString", &found.error_string) ||
      !find_symbol(library, "ncclGetLastError", &found.last_error))
    return Status::unsupported(path + " lacks functions of NCCL 2.14 or later; install a newer nvidia-nccl-cu13 or -cu12");
  int version = 0;
  if (found.get_version(&version) != kSuccess || version < kOldest)
    return Status::unsupported(path + " is NCCL " + std::to_string(version) + "; expected 2.14 (21400) or later");
  if (!loaded_from.empty() && found.get_id != nccl.get_id)
    return Status::unsupported("NCCL is " + loaded_from + " in this process, and cannot be " + path + " too");
  if (!loaded_from.empty()) return {};
  nccl = found;
  loaded_from = path;
  return {};
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

// Whether the process ends: what NCCL and the driver stand on may be gone.
std::atomic<bool>& ending() {
  static std::atomic<bool> value{false};
  static const bool noted = std::atexit([] { ending() = true; }) == 0;
  static_cast<void>(noted);
  return value;
}

// A CUDA graph with exchanges keeps its communicator: NCCL waits at a communicator's end until no graph refers to it.
class NcclCommunicator : public Communicator, public std::enable_shared_from_this<NcclCommunicator> {
 public:
  NcclCommunicator(const CommunicatorSetup& setup, const Nccl& nccl, std::unique_ptr<Board> board)
      : nccl_(nccl), board_(std::move(board)), timeout_s_(setup.timeout_s) {
    name = setup.name;
    rank = setup.rank;
    world = setup.world;
    engine = Engine::kNccl;
  }

  ~NcclCommunicator() override {
    {
      std::lock_guard<std::mutex> lock(closing_mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    if (watch_.joinable()) watch_.join();
    close();
#ifdef LEANFLEET_CUDA
    if (windows_ != nullptr) end_windows();
    free_mark(mark_);
    free_mark(order_.captured);
#endif
  }

  Status join(const CommunicatorSetup& setup) {
    NcclId id = {};
    setup.id.copy(id.bytes, sizeof id.bytes);
    NcclConfig config;
    NcclComm comm = nullptr;
    const int code = nccl_.init(&comm, world, id, rank, &config);
    comm_ = comm;
    const Status status = settle("creating it", code);
    if (!status.ok()) {
      drop();
      return status;
    }
    board_->remove_name();
#ifdef LEANFLEET_CUDA
    const Status windows = PeerWindows::open(setup, *board_, &windows_);
    if (!windows.ok()) return {windows.code, message(windows.message)};
#endif
    ending();
    watch_ = std::thread([this] { watch(); });
    return {};
  }

  Status sum(const void* input, void* output, int64_t count, DType dtype, void* stream) override {
    const char* const what = "a sum";
    if (count == 0) return {};
#ifdef LEANFLEET_CUDA
    if (windows_ != nullptr && fits_peers(count * element_size(dtype)))
      return launch_direct(what, stream,
                           [&] { return launch_peer_sum(windows_->view(), input, output, count, dtype, stream); });
#endif
    return launch(what, stream, [&] {
      return nccl_.all_reduce(input, output, static_cast<size_t>(count), nccl_type(dtype), kSumOf, comm_, stream);
    });
  }

  Status gather(const void* input, void* output, int64_t count, DType dtype, void* stream) override {
    const char* const what = "a gathering";
    if (count == 0) return {};
#ifdef LEANFLEET_CUDA
    const int64_t bytes = count * element_size(dtype);
    if (windows_ != nullptr && fits_peers(bytes))
      return launch_direct(what, stream, [&] { return launch_peer_gather(windows_->view(), input, output, bytes, stream); });
#endif
    return launch(what, stream,
                  [&] { return nccl_.all_gather(input, output, static_cast<size_t>(count), nccl_type(dtype), comm_, stream); });
  }

#ifdef LEANFLEET_CUDA
  Status merge(const PartialAttention& part, void* stream, bool* done) override {
    *done = windows_ != nullptr && fits_peers(part);
    if (!*done) return {};
    return launch_direct("a merge", stream, [&] { return launch_peer_merge(windows_->view(), part, stream); });
  }

  int64_t direct() override { return direct_; }
#endif

  Status health() override {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    return failure_;
  }

  void abort(const std::string& reason) override {
    note({Code::kPeer, message(reason)});
    std::unique_lock<std::timed_mutex> lock(calls_, kStuckCall);  // without it after a while: a call may hang in a full queue
    drop();
  }

 private:
  template <class F>
  Status launch(const char* what, void* stream, F&& call) {
    std::lock_guard<std::timed_mutex> lock(calls_);
    LEANFLEET_RETURN_IF_ERROR(ready());
    return launched(stream, settle(what, call()));
  }

#ifdef LEANFLEET_CUDA
  // NCCL puts exchanges of several streams in order; kernels of our own are put in order here.
  template <class F>
  Status launch_direct(const char* what, void* stream, F&& call) {
    std::lock_guard<std::timed_mutex> lock(calls_);
    LEANFLEET_RETURN_IF_ERROR(ready());
    direct_began_ = since_start();
    int error = wait_in_order(order_, pending_ ? mark_ : nullptr, stream);
    if (error == 0) error = call();
    if (error == 0) error = note_in_order(&order_, stream);
    direct_began_ = 0;
    ++direct_;
    return launched(stream,
                    error == 0 ? Status{} : Status{Code::kCuda, message(what + (" failed: " + cuda_error_text(error)))});
  }

  // Kernels may still write into the others' windows.
  void end_windows() {
    const auto wait = [&](double seconds) {
      const Clock::time_point begin = Clock::now();
      while (mark_ != nullptr && !mark_done(mark_) && elapsed(begin) < seconds && absent_rank().empty())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    if (health().ok()) wait(timeout_s_);
    windows_->stop();
    wait(1.0);
    windows_.reset();
  }

  static int64_t since_start() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count() + 1;
  }
#endif

  Status ready() {
    LEANFLEET_RETURN_IF_ERROR(health());
    return comm_ != nullptr ? Status{} : Status::internal(message("it is closed"));
  }

  Status launched(void* stream, const Status& status) {
    if (!status.ok()) {
      note(status);
      drop();
      return health();
    }
#ifdef LEANFLEET_CUDA
    if (record_mark(&mark_, stream)) {
      marked_ = Clock::now();
      pending_ = true;
      return {};
    }
    auto* const kept = new std::shared_ptr<NcclCommunicator>(shared_from_this());
    if (!keep_with_graph(stream, &graph_, kept, let_go)) delete kept;
#else
    static_cast<void>(stream);
#endif
    return {};
  }

  // Elsewhere than on the driver's thread, as the end of a communicator calls CUDA.
  static void let_go(void* kept) {
    const auto held = static_cast<std::shared_ptr<NcclCommunicator>*>(kept);
    if (ending()) return;
    try {
      std::thread([held] {
#ifdef LEANFLEET_CUDA
        allow_calls_during_capture();
#endif
        delete held;
      }).detach();
    } catch (const std::exception&) {  // no thread can be had: it stays
    }
  }

  // Waits until NCCL has taken the call, whose connections it may still be making.
  Status settle(const char* what, int code) {
    const Clock::time_point begin = Clock::now();
    for (int64_t turn = 0; code == kInProgress; ++turn) {
      if (nccl_.get_error(comm_, &code) != kSuccess) break;
      if (code != kInProgress) break;
      if (turn < 1000) continue;
      const std::string absent = absent_rank();
      if (!absent.empty()) return {Code::kPeer, message(absent)};
      if (elapsed(begin) > timeout_s_)
        return {Code::kPeer,
                message(std::string(what) + " has waited " + seconds_text(timeout_s_) + " for the other ranks" + not_come())};
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return code == kSuccess ? Status{} : failed(what, code);
  }

  Status failed(const char* what, int code) const {
    const char* const detail = nccl_.last_error(comm_);
    std::string text = std::string(what) + " failed in NCCL: " + nccl_.error_string(code);
    if (detail != nullptr && detail[0] != '\0') text += std::string(" (") + detail + ")";
    return {Code::kPeer, message(text)};
  }

  std::string absent_rank() const {
    for (int other = 0; other < world; ++other) {
      std::string text = board_->absent(other, false);
      if (!text.empty()) return text;
    }
    return "";
  }
  // Of ranks on other hosts nothing is known.
  std::string not_come() const {
    std::string text;
    for (int other = 0; other < world; ++other)
      if (board_->place(other).process.load() == 0)
        text += (text.empty() ? "; not seen on this host: rank " : ", ") + std::to_string(other);
    return text;
  }

  void watch() {
#ifdef LEANFLEET_CUDA
    allow_calls_during_capture();
#endif
    std::unique_lock<std::mutex> lock(closing_mutex_);
    while (!wake_.wait_for(lock, kLook, [this] { return closing_; })) {
      lock.unlock();
      look();
      lock.lock();
      if (!health().ok()) return;
    }
  }

  void look() {
    const std::string absent = absent_rank();
    if (!absent.empty()) return abort(absent);
    std::unique_lock<std::timed_mutex> lock(calls_, std::try_to_lock);
#ifdef LEANFLEET_CUDA
    const int64_t began = direct_began_;
    if (!lock.owns_lock() && began != 0 && static_cast<double>(since_start() - began) > 1000.0 * timeout_s_) {
      note({Code::kPeer,
            message("a launch has waited " + seconds_text(timeout_s_) + " for those before it, and the other ranks")});
      return drop();
    }
#endif
    if (!lock.owns_lock() || comm_ == nullptr) return;  // a call of NCCL under way watches itself
    int code = kSuccess;
    if (nccl_.get_error(comm_, &code) == kSuccess && code != kSuccess && code != kInProgress) {
      note(failed("an exchange", code));
      return drop();
    }
#ifdef LEANFLEET_CUDA
    if (!pending_) return;
    if (mark_done(mark_)) pending_ = false;
    else if (elapsed(marked_) > timeout_s_) {
      note({Code::kPeer, message("an exchange has waited " + seconds_text(timeout_s_) + " for the other ranks")});
      drop();
    }
#endif
  }

  void note(Status status) {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_.ok()) failure_ = std::move(status);
  }

  // Ends all kernels that wait.
  void drop() {
#ifdef LEANFLEET_CUDA
    if (windows_ != nullptr) windows_->stop();
#endif
    const NcclComm comm = comm_.exchange(nullptr);
    if (comm != nullptr) nccl_.abort(comm);
  }

  void close() {
    const NcclComm comm = comm_.load();
    if (comm == nullptr) return;
    int code = nccl_.finalize(comm);
    const Clock::time_point begin = Clock::now();
    while (code == kInProgress && elapsed(begin) < timeout_s_ && absent_rank().empty()) {
      if (nccl_.get_error(comm, &code) != kSuccess) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (code != kSuccess) return drop();
    comm_ = nullptr;
    nccl_.destroy(comm);
  }

  static double elapsed(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  const Nccl& nccl_;
  const std::unique_ptr<Board> board_;
  const double timeout_s_;
  std::timed_mutex calls_;
  std::mutex failure_mutex_, closing_mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  Status failure_;
  std::atomic<NcclComm> comm_{nullptr};
  std::thread watch_;
#ifdef LEANFLEET_CUDA
  void* mark_ = nullptr;  // a cudaEvent_t behind the last launch that was no capture
  Clock::time_point marked_;
  bool pending_ = false;
  unsigned long long graph_ = 0;  // the last that keeps this
  std::unique_ptr<PeerWindows> windows_;
  LaunchOrder order_;                     // of those through windows
  std::atomic<int64_t> direct_{0};        // how many went through windows
  std::atomic<int64_t> direct_began_{0};  // milliseconds; 0: none is being launched, which may take until the queue has room
#endif
};

}  // namespace

Status open_nccl(const CommunicatorSetup& setup, std::shared_ptr<Communicator>* made) {
  if (setup.id.size() != sizeof(NcclId))
    return Status::invalid("communicator '" + setup.name + "': its id has " + std::to_string(setup.id.size()) +
                           " bytes; expected the 128 of one made for NCCL");
  const Nccl* nccl = nullptr;
  LEANFLEET_RETURN_IF_ERROR(load_nccl(setup.library, &nccl));
#ifdef LEANFLEET_CUDA
  if (setup.device >= 0) LEANFLEET_RETURN_IF_ERROR(use_device(setup.device));
#endif
  std::unique_ptr<Board> board;
  LEANFLEET_RETURN_IF_ERROR(Board::open(setup, kBoardBytes, &board));
  auto communicator = std::make_shared<NcclCommunicator>(setup, *nccl, std::move(board));
  LEANFLEET_RETURN_IF_ERROR(communicator->join(setup));
  *made = std::move(communicator);
  return {};
}

Status make_nccl_id(const std::string& library, std::string* id) {
  const Nccl* nccl = nullptr;
  LEANFLEET_RETURN_IF_ERROR(load_nccl(library, &nccl));
  NcclId made;
  const int code = nccl->get_id(&made);
  if (code != kSuccess) return {Code::kPeer, std::string("an id failed in NCCL: ") + nccl->error_string(code)};
  id->assign(made.bytes, sizeof made.bytes);
  return {};
}

}  // namespace leanfleet
