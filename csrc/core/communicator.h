// Communicators: groups of processes whose nodes exchange tensors. A process holds its end of each under a name, which nodes
// give as an attribute. Engines: shared memory for tensors of the CPU, NCCL for those of CUDA.
#pragma once

#include <memory>
#include <string>

#include "core/merge_parts.h"

namespace leanfleet {

enum class Engine : int32_t { kSharedMemory, kNccl };
constexpr int kNumEngines = 2;
constexpr int kMaxRanks = 64;

// A rank's attention over its share of the keys, without sinks; a merge puts that over all ranks' keys in its place, with them.
struct PartialAttention {
  void* output;  // T [rows,width]
  float* lse;    // [rows]
  int64_t rows, width;
  DType dtype;  // T
  merge_parts::Sinks sinks;
};

// This process's end. The functions may be called from any thread; one runs at a time. All ranks must call them in one order.
// A failure is final: later calls report it again. Messages name the rank at fault; who calls puts the node before them.
struct Communicator {
  std::string name;
  int rank = 0, world = 1;
  Engine engine = Engine::kSharedMemory;

  virtual ~Communicator() = default;
  // The sum over the ranks of `count` numbers each; output may be input. With NCCL it is enqueued on `stream`.
  virtual Status sum(const void* input, void* output, int64_t count, DType dtype, void* stream) = 0;
  // The numbers of all ranks, `count` each, in the order of the ranks; output is not input.
  virtual Status gather(const void* input, void* output, int64_t count, DType dtype, void* stream) = 0;
  // Merges attention that all ranks have of the same rows; *done says whether this communicator does such, or who calls has to
  // gather.
  virtual Status merge(const PartialAttention& part, void* stream, bool* done) {
    static_cast<void>(part), static_cast<void>(stream);
    *done = false;
    return {};
  }
  // How many exchanges went through the memory of the other GPUs, without NCCL.
  virtual int64_t direct() { return 0; }
  // A failure known so far, without waiting.
  virtual Status health() { return {}; }
  // Makes calls under way, those on a stream too, and all later ones fail with `reason`.
  virtual void abort(const std::string& reason) = 0;

  // "communicator 'world', rank 0 of 2: " + text.
  std::string message(const std::string& text) const;
};

struct CommunicatorSetup {
  std::string name;
  int rank = 0, world = 1;
  Engine engine = Engine::kSharedMemory;
  std::string id;       // the same bytes on all ranks, and of this communicator alone
  std::string library;  // NCCL: what dlopen gets
  int device = -1;      // NCCL: the CUDA device; -1: the current one
  double timeout_s = 60.0;
};

// Waits until all ranks have come. A world of one needs no engine and serves tensors of both devices.
Status create_communicator(const CommunicatorSetup& setup);
// Puts a communicator into the registry; refuses a name that the engine has already.
Status add_communicator(std::shared_ptr<Communicator> communicator);
// Null: there is none.
std::shared_ptr<Communicator> find_communicator(const std::string& name, Engine engine);
// Refuses more ranks than a communicator has.
Status check_world(const Call& call, int64_t world);
// The one that a node names, or an error that names the node and says how to create it.
Status communicator_of(const Call& call, const std::string& name, Engine engine, std::shared_ptr<Communicator>* found);
// The same for a node that says how many ranks there are.
Status communicator_of(const Call& call, const std::string& name, int64_t world, Engine engine,
                       std::shared_ptr<Communicator>* found);
// A communicator's error with the node before it.
Status with_node(const Call& call, const Status& status);
// Ends this rank's part in all engines' communicators of the name. Calls under way end first.
Status destroy_communicator(const std::string& name);

// shared_memory.cpp and nccl.cpp.
Status open_shared_memory(const CommunicatorSetup& setup, std::shared_ptr<Communicator>* made);
Status open_nccl(const CommunicatorSetup& setup, std::shared_ptr<Communicator>* made);
// A fresh id for a communicator of NCCL.
Status make_nccl_id(const std::string& library, std::string* id);

}  // namespace leanfleet
