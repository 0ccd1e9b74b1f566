#include "core/board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/integers.h"

namespace leanfleet {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHeaderBytes = (kMaxRanks * int64_t{sizeof(BoardPlace)} + kPage - 1) / kPage * kPage;

// FNV-1a, which is enough to name a file by an id.
std::string path_of(const std::string& id) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  char path[64];
  std::snprintf(path, sizeof path, "/dev/shm/leanfleet-%016llx", static_cast<unsigned long long>(hash));
  return path;
}

struct flock byte_of(int rank, short type) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

std::string who(int rank, int process) { return "rank " + std::to_string(rank) + " (process " + std::to_string(process) + ")"; }

}  // namespace

Status Board::open(const CommunicatorSetup& setup, int64_t buffer_bytes, std::unique_ptr<Board>* opened) {
  std::unique_ptr<Board> board(new Board);
  board->path_ = path_of(setup.id);
  board->rank_ = setup.rank;
  board->buffer_bytes_ = buffer_bytes;
  const auto refuse = [&](const char* action, int error) {
    return Status::invalid("communicator '" + setup.name + "', rank " + std::to_string(setup.rank) + ": " + action + " " +
                           board->path_ + " failed: " + std::strerror(error));
  };
  board->file_ = ::open(board->path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (board->file_ < 0) return refuse("opening", errno);
  // Memory that the file system cannot give would be a signal at the first write, not an error.
  int error = posix_fallocate(board->file_, 0, kHeaderBytes);
  if (error == 0 && buffer_bytes > 0)
    error = posix_fallocate(board->file_, kHeaderBytes + setup.rank * buffer_bytes, buffer_bytes);
  if (error != 0) return refuse("giving memory to", error);
  board->mapped_bytes_ = kHeaderBytes + setup.world * buffer_bytes;
  void* const memory =
      mmap(nullptr, static_cast<size_t>(board->mapped_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, board->file_, 0);
  if (memory == MAP_FAILED) return refuse("mapping", errno);
  board->places_ = static_cast<BoardPlace*>(memory);  // zeros in a new file

  BoardPlace& place = board->place(setup.rank);
  struct flock lock = byte_of(setup.rank, F_WRLCK);
  const bool locked = fcntl(board->file_, F_OFD_SETLK, &lock) == 0;
  if (!locked && errno != EAGAIN && errno != EACCES) return refuse("locking", errno);
  if (!locked || place.process.load() != 0)
    return Status::invalid("communicator '" + setup.name + "': " + who(setup.rank, place.process.load()) +
                           " has this id already; every rank has a number of its own, and every communicator its own id");
  place.world = setup.world;
  place.process.store(getpid(), std::memory_order_release);
  board->taken_ = true;
  *opened = std::move(board);
  return {};
}

Board::~Board() {
  if (taken_) {
    place(rank_).left.store(1);
    remove_name();
  }
  if (places_ != nullptr) munmap(places_, static_cast<size_t>(mapped_bytes_));
  if (file_ >= 0) close(file_);
}

char* Board::buffer(int rank) const { return reinterpret_cast<char*>(places_) + kHeaderBytes + rank * buffer_bytes_; }

std::string Board::absent(int rank, bool left) const {
  const BoardPlace& other = place(rank);
  const int process = other.process.load(std::memory_order_acquire);
  if (process == 0 || rank == rank_) return "";
  if (other.left.load() != 0) return left ? who(rank, process) + " has destroyed its communicator" : "";
  struct flock lock = byte_of(rank, F_WRLCK);
  if (fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK) return "";
  if (other.left.load() != 0) return left ? who(rank, process) + " has destroyed its communicator" : "";
  return who(rank, process) + " has ended";
}

void Board::remove_name() { unlink(path_.c_str()); }

}  // namespace leanfleet
