// What leanfleet loads as NCCL in tests of communicators' lives: it exchanges nothing. Ranks wait for each other's file in the
// folder FAKE_NCCL_FOLDER. The environment variable FAKE_NCCL says what the next question gets: hang (still under way), error, or
// nothing.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {
std::atomic<int> aborts{0}, destroys{0};
bool says(const char* word) {
  const char* const told = std::getenv("FAKE_NCCL");
  return told != nullptr && std::strcmp(told, word) == 0;
}
struct Comm {
  int ranks;
  std::atomic<int> questions{0};
};
std::string file_of(int rank) { return std::getenv("FAKE_NCCL_FOLDER") + ("/" + std::to_string(rank)); }
bool all_came(int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    std::FILE* const file = std::fopen(file_of(rank).c_str(), "r");
    if (file == nullptr) return false;
    std::fclose(file);
  }
  return true;
}
struct Id {
  char bytes[128];
};
struct Config {
  size_t size;
  unsigned int magic, version;
  int blocking, next;
};
}  // namespace

extern "C" {
int ncclGetVersion(int* version) { return *version = 22703, 0; }
int ncclGetUniqueId(Id* id) {
  std::FILE* const random = std::fopen("/dev/urandom", "rb");
  const bool read = std::fread(id->bytes, sizeof id->bytes, 1, random) == 1;
  std::fclose(random);
  return read ? 0 : 2;
}
int ncclCommInitRankConfig(Comm** comm, int ranks, Id, int rank, const Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || config->size != sizeof(Config)) return 4;
  *comm = new Comm{ranks};
  std::fclose(std::fopen(file_of(rank).c_str(), "w"));
  return 7;
}
int ncclCommGetAsyncError(Comm* comm, int* code) {
  *code = says("error") ? 6 : says("hang") || comm->questions++ < 3 || !all_came(comm->ranks) ? 7 : 0;
  return 0;
}
int ncclCommFinalize(Comm* comm) { return comm->questions = 0, 7; }
int ncclCommDestroy(Comm* comm) { return delete comm, ++destroys, 0; }
int ncclCommAbort(Comm* comm) { return delete comm, ++aborts, 0; }
int ncclAllReduce(const void*, void*, size_t, int, int, Comm*, void*) { return 0; }
int ncclAllGather(const void*, void*, size_t, int, Comm*, void*) { return 0; }
const char* ncclGetErrorString(int code) { return code == 6 ? "remote process exited or there was a network error" : "?"; }
const char* ncclGetLastError(Comm*) { return "connection closed by 10.0.0.7"; }
int fake_aborts() { return aborts; }
int fake_destroys() { return destroys; }
}
