// A file in /dev/shm where the ranks of a communicator on one host see each other: who has come, who has ended, how far each
// is, and a buffer of each. A rank holds a lock on its byte of the file, which the kernel drops with the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "core/communicator.h"

namespace leanfleet {

// What a rank says of its collective number n, in step n % 2.
struct BoardStep {
  int32_t kind, dtype;
  int64_t count;
};

struct alignas(128) BoardPlace {
  std::atomic<int32_t> process;   // 0: it has not come yet
  std::atomic<int32_t> left;      // 1: it ended its part
  std::atomic<uint32_t> arrived;  // number of its last collective whose data are in the buffer; others wait on this word
  int32_t world;                  // the ranks it expects
  BoardStep steps[2];
};

class Board {
 public:
  // Takes the place of setup.rank in the file that setup.id names. buffer_bytes: of each rank's buffer, a multiple of 4096.
  static Status open(const CommunicatorSetup& setup, int64_t buffer_bytes, std::unique_ptr<Board>* opened);
  ~Board();

  BoardPlace& place(int rank) const { return places_[rank]; }
  char* buffer(int rank) const;
  // "rank 1 (process 4711) has ended", or empty for one that is there or has not come yet. left: also for a rank that ended
  // its part in good order.
  std::string absent(int rank, bool left) const;
  // Removes the file's name, which nobody needs once all have come. What has it open keeps it.
  void remove_name();

 private:
  Board() = default;

  std::string path_;
  int file_ = -1, rank_ = 0;
  BoardPlace* places_ = nullptr;
  int64_t buffer_bytes_ = 0, mapped_bytes_ = 0;
  bool taken_ = false;
};

}  // namespace leanfleet
