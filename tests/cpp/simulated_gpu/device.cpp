// The scheduler of device.h, and the CUDA runtime functions that the host code around kernels calls.
#include "device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

namespace {

constexpr size_t kStack = 256 << 10;  // bytes of a thread
constexpr int kWarp = 32;
constexpr size_t kMostShared = 227 << 10;
// In the library's own data, as `static` shared variables are: all are less than 4 GiB apart.
alignas(1024) char dynamic[kMostShared];
constexpr size_t kBelow = size_t{1} << 31;

// Lanes that meet under one mask: what they brought to their last two meetings.
struct Meeting {
  char brought[2][kWarp * kMost];
  unsigned arrived[2] = {}, left[2] = {};
  unsigned turn[kWarp] = {};
};

struct Copy {
  uint32_t to;
  const void* from;
  int size, read;
};

// A fiber: a context brings it to its stack, after that it is left and entered by jumps, which cost no system call.
struct Thread {
  ucontext_t start;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  Place place;
  std::vector<Copy> copies;              // that belong to no group yet
  std::deque<std::vector<Copy>> groups;  // that were committed and not waited for
  bool started = false, ended = false;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<std::map<unsigned, Meeting>> warps;
  jmp_buf scheduler;
  const std::function<void()>* body = nullptr;
  int current = 0, alive = 0, at_barrier = 0, votes = 0, counted = 0;
  unsigned generation = 0;
  struct Named {
    int arrived = 0;
    unsigned generation = 0;
    bool vote = false, counted = false;
  } named[16];
  bool progress = false, failed = false;
};

Block* block = nullptr;  // the CTA that runs: one at a time
std::mutex launches;
cudaError_t last_error = cudaSuccess;
uint64_t products = 0, group_products = 0, started = 0;
std::map<void*, std::pair<std::string, size_t>> allocations;  // by address: name and bytes
std::map<void*, size_t> opened;                               // those of other processes
struct Cleaner {                                              // at the process's end
  ~Cleaner() {
    for (const auto& [memory, named] : allocations) shm_unlink(named.first.c_str());
  }
} cleaner;

std::mt19937& order() {
  static std::mt19937 generator([] {
    const char* seed = std::getenv("LEANFLEET_SIMULATED_SEED");
    return seed != nullptr ? static_cast<unsigned>(std::atoi(seed)) : 0u;
  }());
  return generator;
}

Thread& current() { return block->threads[static_cast<size_t>(block->current)]; }

// Back to the scheduler, until it comes to this thread again.
void wait() {
  if (_setjmp(current().at) == 0) _longjmp(block->scheduler, 1);
}

void enter(int thread) {
  block->current = thread;
  if (_setjmp(block->scheduler) != 0) return;
  if (current().started) _longjmp(current().at, 1);
  current().started = true;
  setcontext(&current().start);
}

void release_barrier_if_all_wait() {
  if (block->at_barrier == 0 || block->at_barrier < block->alive) return;
  block->counted = block->votes;
  block->at_barrier = block->votes = 0;
  ++block->generation;
  block->progress = true;
}

void thread_main() {
  (*block->body)();
  current().ended = true;
  --block->alive;
  block->progress = true;
  release_barrier_if_all_wait();  // threads that have ended are not waited for, as on a GPU
  wait();
}

// false: threads wait for ever.
bool run_block(Block& b) {
  std::vector<int> turns(b.threads.size());
  for (size_t i = 0; i < turns.size(); ++i) turns[i] = static_cast<int>(i);
  while (b.alive > 0) {
    b.progress = false;
    std::shuffle(turns.begin(), turns.end(), order());
    for (const int i : turns)
      if (!b.threads[static_cast<size_t>(i)].ended) enter(i);
    if (!b.progress || b.failed) return false;
  }
  return true;
}

}  // namespace

const Place& place() { return current().place; }
void* dynamic_shared() { return dynamic; }
int lane() { return block->current % kWarp; }

int block_votes(bool vote) {
  const unsigned generation = block->generation;
  ++block->at_barrier;
  block->votes += vote;
  release_barrier_if_all_wait();
  while (block->generation == generation) wait();
  return block->counted;
}

void block_barrier() { block_votes(false); }

bool named_barrier(int id, int threads, bool waits, bool vote) {
  Block::Named& barrier = block->named[id];
  const unsigned generation = barrier.generation;
  barrier.vote |= vote;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.counted = std::exchange(barrier.vote, false);
    ++barrier.generation;
    block->progress = true;
  }
  while (waits && barrier.generation == generation) wait();
  return barrier.counted;
}
void pause() { wait(); }
void note_progress() { block->progress = true; }
uint32_t shared_base() { return static_cast<uint32_t>(kBelow); }

void exchange(unsigned mask, const void* mine, void* all, size_t bytes) {
  Meeting& m = block->warps[static_cast<size_t>(block->current / kWarp)][mask];
  const int self = lane();
  const unsigned bit = 1u << self, turn = m.turn[self]++ % 2;
  std::memcpy(m.brought[turn] + bytes * static_cast<size_t>(self), mine, bytes);
  m.arrived[turn] |= bit;
  if (m.arrived[turn] == mask) block->progress = true;
  while (m.arrived[turn] != mask) wait();  // for ever, where this lane is not of the mask
  std::memcpy(all, m.brought[turn], bytes * kWarp);
  m.left[turn] |= bit;
  // Nobody comes to the meeting after the next, which has this one's place, before all have left here for the next.
  if (m.left[turn] == mask) m.arrived[turn] = m.left[turn] = 0;
}

uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - dynamic + static_cast<ptrdiff_t>(kBelow));
}

void count_product() { ++products; }
void count_group_product() { ++group_products; }

void unsupported() {
  block->failed = true;
  wait();
}

char* from_shared(uint32_t address, unsigned alignment) {
  if (address % alignment != 0) unsupported();
  return dynamic + (static_cast<ptrdiff_t>(address) - static_cast<ptrdiff_t>(kBelow));
}

void copy_later(uint32_t to, const void* from, int size, int read) {
  from_shared(to, static_cast<unsigned>(size));
  current().copies.push_back({to, from, size, read});
}

void commit_copies() {
  current().groups.push_back(std::move(current().copies));
  current().copies.clear();
}

void wait_for_copies(size_t groups) {
  for (auto& waiting = current().groups; waiting.size() > groups; waiting.pop_front())
    for (const Copy& copy : waiting.front()) {
      char* const to = from_shared(copy.to, static_cast<unsigned>(copy.size));
      std::memset(to, 0, static_cast<size_t>(copy.size));
      std::memcpy(to, copy.from, static_cast<size_t>(copy.read));
    }
}

void run(dim3 blocks, dim3 threads, size_t shared_bytes, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(launches);
  ++started;
  const size_t count = static_cast<size_t>(threads.x) * threads.y * threads.z;
  if (count == 0 || count > 1024 || blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.y > 65535 || blocks.z > 65535 ||
      shared_bytes > kMostShared) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  Block b;
  b.body = &thread;
  b.threads.resize(count);
  for (Thread& t : b.threads) t.stack.reset(new char[kStack]);
  block = &b;
  bool well = true;
  for (unsigned z = 0; z < blocks.z && well; ++z)
    for (unsigned y = 0; y < blocks.y && well; ++y)
      for (unsigned x = 0; x < blocks.x && well; ++x) {
        std::memset(dynamic, 0xff, shared_bytes);
        b.warps.assign((count + kWarp - 1) / kWarp, {});
        b.alive = static_cast<int>(count);
        b.at_barrier = b.votes = 0;
        for (Block::Named& named : b.named) named = {};
        for (size_t i = 0; i < count; ++i) {
          Thread& t = b.threads[i];
          const auto n = static_cast<unsigned>(i);
          t.place = {{n % threads.x, n / threads.x % threads.y, n / threads.x / threads.y}, {x, y, z}, threads, blocks};
          t.started = t.ended = false;
          t.copies.clear();
          t.groups.clear();
          getcontext(&t.start);
          t.start.uc_stack.ss_sp = t.stack.get();
          t.start.uc_stack.ss_size = kStack;
          t.start.uc_link = nullptr;
          makecontext(&t.start, thread_main, 0);
        }
        well = run_block(b);
      }
  block = nullptr;
  if (!well) last_error = cudaErrorLaunchFailure;
}

}  // namespace simulated

extern "C" {

// How many mma.sync the library's kernels have run, a warp's as one: whether a kernel on tensor cores was taken.
uint64_t leanfleet_simulated_products() { return simulated::products / simulated::kWarp; }
// The same of wgmma.
uint64_t leanfleet_simulated_group_products() { return simulated::group_products / simulated::kWarp; }
uint64_t leanfleet_simulated_launches() { return simulated::started; }

cudaError_t cudaGetLastError() { return std::exchange(simulated::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return simulated::last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "an error of the simulated GPU";
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure
             ? "threads wait for ever, an address in shared memory is not aligned, or an instruction is not simulated"
             : "see device.cpp";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// An H200's, or what these variables tell.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const auto told = [](const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atoi(text) : otherwise;
  };
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = told("LEANFLEET_SIMULATED_SMS", 132); return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = told("LEANFLEET_SIMULATED_MAJOR", 9); return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(simulated::kMostShared); return cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
// Nothing is captured, so nothing belongs to a graph.
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
// All is done when it is called, so that every event has come.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<char*>(event);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
// Memory in files that other processes of the host can open.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  char name[sizeof(cudaIpcMemHandle_t)];
  static std::atomic<int> count{0};
  std::snprintf(name, sizeof name, "/simulated-gpu-%d-%d", static_cast<int>(getpid()), count++);
  const int file = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
  const bool sized = file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0;
  *memory = sized ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  if (file >= 0) close(file);
  if (*memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  simulated::allocations[*memory] = {name, bytes};
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const auto found = simulated::allocations.find(memory);
  if (found == simulated::allocations.end()) return cudaErrorInvalidValue;
  munmap(memory, found->second.second);
  shm_unlink(found->second.first.c_str());
  simulated::allocations.erase(found);
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  const auto found = simulated::allocations.find(memory);
  if (found == simulated::allocations.end()) return cudaErrorInvalidValue;
  std::strcpy(handle->reserved, found->second.first.c_str());
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  if (std::getenv("LEANFLEET_SIMULATED_NO_PEERS") != nullptr) return cudaErrorPeerAccessUnsupported;
  const int file = shm_open(handle.reserved, O_RDWR, 0600);
  struct stat known;
  if (file < 0 || fstat(file, &known) != 0) return cudaErrorInvalidResourceHandle;
  *memory = mmap(nullptr, static_cast<size_t>(known.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (*memory == MAP_FAILED) return cudaErrorMapBufferObjectFailed;
  simulated::opened[*memory] = static_cast<size_t>(known.st_size);
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  const auto found = simulated::opened.find(memory);
  if (found == simulated::opened.end()) return cudaErrorInvalidValue;
  munmap(memory, found->second);
  simulated::opened.erase(found);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** seen, void* memory, unsigned) {
  *seen = memory;
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
CUresult simulated_encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if ((rank != 2 && rank != 4) || box[0] != 64 || reinterpret_cast<uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  simulated::TensorMap to = {static_cast<const char*>(data), {}, {}, box[1]};
  std::copy(sizes, sizes + rank, to.sizes);
  std::copy(strides, strides + rank - 1, to.strides);
  for (const uint64_t stride : to.strides)
    if (stride % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  static_assert(sizeof(to) <= sizeof(*map));
  std::memcpy(map, &to, sizeof(to));
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(simulated_encode_tiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
}
