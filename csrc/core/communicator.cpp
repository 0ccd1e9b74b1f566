#include "core/communicator.h"

#include <map>
#include <mutex>
#include <utility>

namespace leanfleet {

namespace {

using Key = std::pair<std::string, Engine>;

struct Registry {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<Communicator>> all;
};

// Never destroyed: engines have threads, and what they stand on may be gone at the process's end.
Registry& registry() {
  static Registry* const made = new Registry;
  return *made;
}

// A world of one, in which nothing has to be exchanged: nodes copy.
struct Alone : Communicator {
  Status sum(const void*, void*, int64_t, DType, void*) override { return Status::internal("a world of one has no exchange"); }
  Status gather(const void*, void*, int64_t, DType, void*) override {
    return Status::internal("a world of one has no exchange");
  }
  void abort(const std::string&) override {}
};

Status check_setup(const CommunicatorSetup& setup) {
  const auto refuse = [&](const std::string& text) { return Status::invalid("communicator '" + setup.name + "': " + text); };
  if (setup.name.empty()) return Status::invalid("a communicator's name is empty; expected what its nodes say");
  if (setup.world < 1 || setup.world > kMaxRanks)
    return refuse("world is " + std::to_string(setup.world) + "; expected 1 to " + std::to_string(kMaxRanks));
  if (setup.rank < 0 || setup.rank >= setup.world)
    return refuse("rank is " + std::to_string(setup.rank) + "; expected 0 to world - 1 = " + std::to_string(setup.world - 1));
  if (static_cast<int>(setup.engine) < 0 || static_cast<int>(setup.engine) >= kNumEngines)
    return refuse("there is no engine " + std::to_string(static_cast<int>(setup.engine)));
  if (!(setup.timeout_s > 0.0)) return refuse("the time-out is not above 0 seconds");
  if (setup.world > 1 && setup.id.empty())
    return refuse("it has no id; expected the same bytes on all of its " + std::to_string(setup.world) + " ranks");
  return {};
}

Status refuse_twice(const std::string& name) {
  return Status::invalid("there is a communicator '" + name + "' already; destroy it first, or take another name");
}

bool known(const std::string& name, Engine engine) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().all.count({name, engine}) > 0;
}

}  // namespace

std::string Communicator::message(const std::string& text) const {
  return "communicator '" + name + "', rank " + std::to_string(rank) + " of " + std::to_string(world) + ": " + text;
}

Status create_communicator(const CommunicatorSetup& setup) {
  LEANFLEET_RETURN_IF_ERROR(check_setup(setup));
  if (known(setup.name, setup.engine)) return refuse_twice(setup.name);
  std::shared_ptr<Communicator> made;
  if (setup.world == 1) {
    made = std::make_shared<Alone>();
    made->name = setup.name;
    made->engine = setup.engine;
  } else if (setup.engine == Engine::kNccl) {
    LEANFLEET_RETURN_IF_ERROR(open_nccl(setup, &made));
  } else {
    LEANFLEET_RETURN_IF_ERROR(open_shared_memory(setup, &made));
  }
  return add_communicator(std::move(made));
}

Status add_communicator(std::shared_ptr<Communicator> communicator) {
  const Key key(communicator->name, communicator->engine);
  std::lock_guard<std::mutex> lock(registry().mutex);
  if (!registry().all.emplace(key, communicator).second) return refuse_twice(key.first);
  return {};
}

std::shared_ptr<Communicator> find_communicator(const std::string& name, Engine engine) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto& all = registry().all;
  auto found = all.find({name, engine});
  if (found != all.end()) return found->second;
  const Engine other = engine == Engine::kNccl ? Engine::kSharedMemory : Engine::kNccl;
  found = all.find({name, other});
  return found != all.end() && found->second->world == 1 ? found->second : nullptr;
}

Status communicator_of(const Call& call, const std::string& name, Engine engine, std::shared_ptr<Communicator>* found) {
  *found = find_communicator(name, engine);
  if (*found != nullptr) return {};
  const bool cuda = engine == Engine::kNccl;
  return call.invalid("there is no communicator '" + name + "' for tensors of " + (cuda ? "CUDA" : "the CPU") +
                      "; create it before the first call: leanfleet.communicators.create(\"" + name +
                      "\", rank, world, id=..., engine=\"" + (cuda ? "nccl" : "shared_memory") +
                      "\"), in a process of one rank create(\"" + name + "\")");
}

Status communicator_of(const Call& call, const std::string& name, int64_t world, Engine engine,
                       std::shared_ptr<Communicator>* found) {
  LEANFLEET_RETURN_IF_ERROR(communicator_of(call, name, engine, found));
  if ((*found)->world == world) return {};
  return call.invalid("world is " + std::to_string(world) + ", but communicator '" + name + "' has " +
                      std::to_string((*found)->world) + " ranks");
}

Status check_world(const Call& call, int64_t world) {
  if (world <= kMaxRanks) return {};
  return call.invalid("attribute world is " + std::to_string(world) + "; expected 1 to " + std::to_string(kMaxRanks));
}

Status with_node(const Call& call, const Status& status) {
  return status.ok() ? status : Status{status.code, call.invalid(status.message).message};
}

Status destroy_communicator(const std::string& name) {
  std::shared_ptr<Communicator> ended[kNumEngines];  // outside of the lock: to end may take a while
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (int i = 0; i < kNumEngines; ++i) {
      const auto found = registry().all.find({name, static_cast<Engine>(i)});
      if (found == registry().all.end()) continue;
      ended[i] = std::move(found->second);
      registry().all.erase(found);
    }
  }
  for (const auto& one : ended)
    if (one != nullptr) return {};
  return Status::invalid("there is no communicator '" + name + "'");
}

}  // namespace leanfleet
