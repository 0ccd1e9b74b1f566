// Exchanges straight through the memory of the other GPUs of a host: every rank has a window that all others write into, so
// that an exchange of up to half a megabyte is one kernel. NCCL does the others.
//
// Data go in lines of 16 bytes: 8 of data, and beside each half of them the number of the exchange. Who waits for a line reads
// it until both numbers are right: no other signal is needed. A window has two slots for the lines of each rank, one for
// exchanges of even number and one for those of odd number. A rank that is at exchange n + 2 has got everything of n + 1, so
// that all have ended n, whose slots it writes.
//
// Exchanges of a rank come one after the other: each writes the number of the next into the rank's state, and 0 once the
// communicator has failed, behind which nothing is sent.
#pragma once

#include <memory>
#include <string>

#include "core/board.h"

namespace leanfleet {

constexpr int kMaxPeers = 8;
#ifdef LEANFLEET_PEER_LINES
constexpr int64_t kPeerLines = LEANFLEET_PEER_LINES;
#else
constexpr int64_t kPeerLines = int64_t{1} << 16;  // of a slot
#endif

struct alignas(16) PeerLine {
  uint32_t low, low_number, high, high_number;
};

struct PeerState {
  uint32_t number;   // of the exchange that comes next, never 1; 0: there is none any more
  uint32_t arrived;  // CTAs that have ended it
};
// The first: one of the last that 32 bits hold, so that what happens behind them happens soon.
constexpr uint32_t kFirstExchange = 0xffffffe0u;

// What a kernel gets.
struct PeerView {
  PeerLine* windows[kMaxPeers];  // of each rank: [2,world,kPeerLines]
  PeerState* state;              // this rank's
  const uint32_t* stop;          // of the host: no longer 0 once the communicator has failed
  int32_t rank, world;
};

class PeerWindows {
 public:
  // All ranks call it. Null where one of them cannot: on another host, without access to the others' memory, without a GPU, or
  // with LEANFLEET_DIRECT=0. board: with buffers of kPeerBoardBytes.
  // Errors name the rank at fault; who calls puts the communicator before them.
  static Status open(const CommunicatorSetup& setup, const Board& board, std::unique_ptr<PeerWindows>* opened);
  ~PeerWindows();

  const PeerView& view() const { return view_; }
  // Ends all kernels that wait; those that are queued do nothing.
  void stop();

 private:
  PeerWindows(const CommunicatorSetup& setup, const Board& board) : setup_(setup), board_(board) {}
  bool make();
  bool reach();

  const CommunicatorSetup setup_;
  const Board& board_;
  PeerView view_ = {};
  int device_ = 0;
  void* memory_ = nullptr;
  uint32_t* stop_ = nullptr;
};
constexpr int64_t kPeerBoardBytes = 4096;

// Whether an exchange of so many bytes, or of so many rows, goes through windows.
bool fits_peers(int64_t bytes);
bool fits_peers(const PartialAttention& part);

// Each returns the cudaError_t of its launch.
int launch_peer_sum(const PeerView& view, const void* input, void* output, int64_t count, DType dtype, void* stream);
int launch_peer_gather(const PeerView& view, const void* input, void* output, int64_t bytes, void* stream);
int launch_peer_merge(const PeerView& view, const PartialAttention& part, void* stream);

}  // namespace leanfleet
