#include "core/peers.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace leanfleet {

namespace {

using Clock = std::chrono::steady_clock;

// What a rank says of its window, in its buffer of the board. What it says last of `says` stays.
enum Seat : int32_t { kNothing, kMade, kReached, kCannot };
struct PeerSeat {
  std::atomic<int32_t> says;
  std::atomic<int32_t> closed;  // 1: it has no window of another rank open any more
  cudaIpcMemHandle_t handle;
};
static_assert(sizeof(PeerSeat) <= kPeerBoardBytes, "a seat does not fit");

constexpr auto kLastWait = std::chrono::seconds(1);  // at its end, for the others to let go of its window

PeerSeat& seat_of(const Board& board, int rank) { return *reinterpret_cast<PeerSeat*>(board.buffer(rank)); }

bool wanted() {
  const char* const text = std::getenv("LEANFLEET_DIRECT");
  return text == nullptr || std::strcmp(text, "0") != 0;
}

// A failure here is no error of the program: it must not come up behind its next call.
bool succeeds(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error == cudaSuccess;
}

}  // namespace

bool PeerWindows::make() {
  if (!wanted() || !succeeds(cudaGetDevice(&device_))) return false;
  const size_t bytes = sizeof(PeerLine) * 2 * static_cast<size_t>(setup_.world) * kPeerLines;
  const PeerState first = {kFirstExchange, 0};
  void* seen = nullptr;  // of the host's memory by the device
  if (!succeeds(cudaMalloc(&memory_, bytes + sizeof(PeerLine)))) return false;
  if (!succeeds(cudaHostAlloc(reinterpret_cast<void**>(&stop_), sizeof(uint32_t), cudaHostAllocMapped))) return false;
  *stop_ = 0;
  view_.windows[setup_.rank] = static_cast<PeerLine*>(memory_);
  view_.state = reinterpret_cast<PeerState*>(static_cast<char*>(memory_) + bytes);
  if (!succeeds(cudaHostGetDevicePointer(&seen, stop_, 0)) || !succeeds(cudaMemset(memory_, 0, bytes)) ||
      !succeeds(cudaMemcpy(view_.state, &first, sizeof first, cudaMemcpyHostToDevice)) || !succeeds(cudaDeviceSynchronize()))
    return false;
  view_.stop = static_cast<const uint32_t*>(seen);
  return succeeds(cudaIpcGetMemHandle(&seat_of(board_, setup_.rank).handle, memory_));
}

bool PeerWindows::reach() {
  for (int other = 0; other < setup_.world; ++other) {
    if (other == setup_.rank) continue;
    void* window = nullptr;
    if (!succeeds(cudaIpcOpenMemHandle(&window, seat_of(board_, other).handle, cudaIpcMemLazyEnablePeerAccess))) return false;
    view_.windows[other] = static_cast<PeerLine*>(window);
  }
  return true;
}

Status PeerWindows::open(const CommunicatorSetup& setup, const Board& board, std::unique_ptr<PeerWindows>* opened) {
  if (setup.world > kMaxPeers) return {};
  for (int other = 0; other < setup.world; ++other)
    if (board.place(other).process.load() == 0) return {};  // NCCL has all of them: it is on another host
  std::unique_ptr<PeerWindows> made(new PeerWindows(setup, board));
  made->view_.rank = setup.rank;
  made->view_.world = setup.world;
  const Clock::time_point begin = Clock::now();
  for (const Seat step : {kMade, kReached}) {
    const bool done = step == kMade ? made->make() : made->reach();
    seat_of(board, setup.rank).says.store(done ? step : kCannot, std::memory_order_release);
    bool all = done;
    for (int other = 0; other < setup.world; ++other) {
      int32_t says = kNothing;
      while ((says = seat_of(board, other).says.load(std::memory_order_acquire)) < step) {
        const std::string absent = board.absent(other, true);
        if (seat_of(board, other).says.load(std::memory_order_acquire) >= step) continue;  // it said so, and has left since
        const bool late = std::chrono::duration<double>(Clock::now() - begin).count() > setup.timeout_s;
        if (!absent.empty() || late)
          return {Code::kPeer, late ? "rank " + std::to_string(other) + " has not opened its window in time" : absent};
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      all = all && says != kCannot;
    }
    if (!all) {  // also those learn of it that have not come so far
      seat_of(board, setup.rank).says.store(kCannot, std::memory_order_release);
      return {};
    }
  }
  *opened = std::move(made);
  return {};
}

PeerWindows::~PeerWindows() {
  int before = device_;  // of this thread, which may be any
  succeeds(cudaGetDevice(&before));
  if (before != device_) succeeds(cudaSetDevice(device_));
  for (int other = 0; other < setup_.world; ++other)
    if (other != setup_.rank && view_.windows[other] != nullptr) succeeds(cudaIpcCloseMemHandle(view_.windows[other]));
  seat_of(board_, setup_.rank).closed.store(1, std::memory_order_release);
  // What others still have open stays until the process ends.
  const Clock::time_point begin = Clock::now();
  bool all = true;
  for (int other = 0; other < setup_.world; ++other) {
    const auto open = [&] { return seat_of(board_, other).closed.load() == 0 && board_.absent(other, true).empty(); };
    while (open() && Clock::now() - begin < kLastWait) std::this_thread::sleep_for(std::chrono::microseconds(100));
    all = all && !open();
  }
  if (all && memory_ != nullptr) succeeds(cudaFree(memory_));
  if (all && stop_ != nullptr) succeeds(cudaFreeHost(stop_));
  if (before != device_) succeeds(cudaSetDevice(before));
}

void PeerWindows::stop() { *static_cast<volatile uint32_t*>(stop_) = 1; }

}  // namespace leanfleet
