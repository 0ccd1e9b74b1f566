// The scheduler of device.h, and the CUDA runtime functions that the host code around kernels calls.
#include "device.h"

#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

namespace simulated {

namespace {

constexpr size_t kStack = 256 << 10;  // bytes of a thread
constexpr int kWarp = 32;

// Lanes that meet under one mask: what they brought to their last two meetings.
struct Meeting {
  uint64_t brought[2][kWarp];
  unsigned arrived[2] = {}, left[2] = {};
  unsigned turn[kWarp] = {};
};

// A fiber: a context brings it to its stack, after that it is left and entered by jumps, which cost no system call.
struct Thread {
  ucontext_t start;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  Place place;
  bool started = false, ended = false;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<std::map<unsigned, Meeting>> warps;
  std::vector<char> shared;
  jmp_buf scheduler;
  const std::function<void()>* body = nullptr;
  int current = 0, alive = 0, at_barrier = 0, votes = 0, counted = 0;
  unsigned generation = 0;
  bool progress = false;
};

Block* block = nullptr;  // the CTA that runs: one at a time
std::mutex launches;
cudaError_t last_error = cudaSuccess;

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
    if (!b.progress) return false;
  }
  return true;
}

}  // namespace

const Place& place() { return current().place; }
void* dynamic_shared() { return block->shared.data(); }
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

void exchange(unsigned mask, uint64_t mine, uint64_t (&all)[32]) {
  Meeting& m = block->warps[static_cast<size_t>(block->current / kWarp)][mask];
  const int self = lane();
  const unsigned bit = 1u << self, turn = m.turn[self]++ % 2;
  m.brought[turn][self] = mine;
  m.arrived[turn] |= bit;
  if (m.arrived[turn] == mask) block->progress = true;
  while (m.arrived[turn] != mask) wait();  // for ever, where this lane is not of the mask
  std::memcpy(all, m.brought[turn], sizeof(all));
  m.left[turn] |= bit;
  // Nobody comes to the meeting after the next, which has this one's place, before all have left here for the next.
  if (m.left[turn] == mask) m.arrived[turn] = m.left[turn] = 0;
}

void run(dim3 blocks, dim3 threads, size_t shared_bytes, const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(launches);
  const size_t count = static_cast<size_t>(threads.x) * threads.y * threads.z;
  if (count == 0 || count > 1024 || blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.y > 65535 || blocks.z > 65535 ||
      shared_bytes > (227u << 10)) {
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
        b.shared.assign(shared_bytes, '\xff');
        b.warps.assign((count + kWarp - 1) / kWarp, {});
        b.alive = static_cast<int>(count);
        b.at_barrier = b.votes = 0;
        for (size_t i = 0; i < count; ++i) {
          Thread& t = b.threads[i];
          const auto n = static_cast<unsigned>(i);
          t.place = {{n % threads.x, n / threads.x % threads.y, n / threads.x / threads.y}, {x, y, z}, threads, blocks};
          t.started = t.ended = false;
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

cudaError_t cudaGetLastError() { return std::exchange(simulated::last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return simulated::last_error; }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "an error of the simulated GPU"; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? "threads wait for ever" : "see device.cpp";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// An H200's.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
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
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  *found = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
}
