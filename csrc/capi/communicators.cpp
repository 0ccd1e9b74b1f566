// Communicators in the C interface. Every library is built with this file.
#include <cstdio>
#include <cstring>

#include "capi/guarded.h"
#include "capi/leanfleet.h"
#include "core/communicator.h"

namespace {

using namespace leanfleet;
using capi::guarded;

constexpr size_t kNcclIdBytes = 128;

Status find(const char* name, int32_t engine, std::shared_ptr<Communicator>* found) {
  if (engine < 0 || engine >= kNumEngines) return Status::invalid("there is no engine " + std::to_string(engine));
  *found = find_communicator(name, static_cast<Engine>(engine));
  return *found != nullptr ? Status{} : Status::invalid(std::string("there is no communicator '") + name + "'");
}

// ---- A communicator that another library of the process has

using Exchange = int (*)(void*, const void*, void*, int64_t, int32_t, void*, char*, size_t);

struct Borrowed : Communicator {
  explicit Borrowed(const leanfleet_lent& lent) : lent(lent) {}
  ~Borrowed() override { lent.release(lent.self); }

  Status run(Exchange exchange, const void* input, void* output, int64_t count, DType dtype, void* stream) const {
    char error[1024] = {};
    const int code = exchange(lent.self, input, output, count, static_cast<int32_t>(dtype), stream, error, sizeof error);
    return {static_cast<Code>(code), error};
  }
  Status sum(const void* input, void* output, int64_t count, DType dtype, void* stream) override {
    return run(lent.sum, input, output, count, dtype, stream);
  }
  Status gather(const void* input, void* output, int64_t count, DType dtype, void* stream) override {
    return run(lent.gather, input, output, count, dtype, stream);
  }
  Status merge(const PartialAttention& part, void* stream, bool* done) override {
    char error[1024] = {};
    int32_t merged = 0;
    const int code = lent.merge(lent.self, &part, stream, &merged, error, sizeof error);
    *done = merged != 0;
    return {static_cast<Code>(code), error};
  }
  void abort(const std::string&) override {}  // its owner does

  const leanfleet_lent lent;
};

using Shared = std::shared_ptr<Communicator>;

template <Status (Communicator::*function)(const void*, void*, int64_t, DType, void*)>
int lent_exchange(void* self, const void* input, void* output, int64_t count, int32_t dtype, void* stream, char* error,
                  size_t error_bytes) {
  const int code = guarded("a communicator", [&] {
    return ((**static_cast<Shared*>(self)).*function)(input, output, count, static_cast<DType>(dtype), stream);
  });
  if (code != 0) std::snprintf(error, error_bytes, "%s", leanfleet_last_error());
  return code;
}

int lent_merge(void* self, const void* part, void* stream, int32_t* done, char* error, size_t error_bytes) {
  bool merged = false;
  const int code = guarded("a communicator", [&] {
    return (**static_cast<Shared*>(self)).merge(*static_cast<const PartialAttention*>(part), stream, &merged);
  });
  *done = merged ? 1 : 0;
  if (code != 0) std::snprintf(error, error_bytes, "%s", leanfleet_last_error());
  return code;
}

}  // namespace

extern "C" {

const char* leanfleet_last_error() { return capi::thrown[0] != '\0' ? capi::thrown : capi::last_error.c_str(); }

int leanfleet_communicator_create(const leanfleet_communicator* given) {
  return guarded("a communicator", [&] {
    CommunicatorSetup setup;
    setup.name = given->name;
    setup.rank = given->rank;
    setup.world = given->world;
    setup.engine = static_cast<Engine>(given->engine);
    if (given->id != nullptr) setup.id.assign(static_cast<const char*>(given->id), given->id_bytes);
    if (given->library != nullptr) setup.library = given->library;
    setup.device = given->device;
    setup.timeout_s = given->timeout_s;
    return create_communicator(setup);
  });
}

int leanfleet_communicator_destroy(const char* name) {
  return guarded("a communicator", [&] { return destroy_communicator(name); });
}

int leanfleet_communicator_check(const char* name, int32_t engine, int32_t* rank, int32_t* world) {
  return guarded("a communicator", [&]() -> Status {
    Shared found;
    LEANFLEET_RETURN_IF_ERROR(find(name, engine, &found));
    if (rank != nullptr) *rank = found->rank;
    if (world != nullptr) *world = found->world;
    return found->health();
  });
}

int leanfleet_communicator_direct(const char* name, int32_t engine, int64_t* exchanges) {
  return guarded("a communicator", [&]() -> Status {
    Shared found;
    LEANFLEET_RETURN_IF_ERROR(find(name, engine, &found));
    *exchanges = found->direct();
    return {};
  });
}

int leanfleet_communicator_abort(const char* name, int32_t engine, const char* reason) {
  return guarded("a communicator", [&]() -> Status {
    Shared found;
    LEANFLEET_RETURN_IF_ERROR(find(name, engine, &found));
    found->abort(reason);
    return {};
  });
}

int leanfleet_nccl_id(const char* library, void* id) {
  return guarded("a communicator", [&]() -> Status {
    std::string made;
    LEANFLEET_RETURN_IF_ERROR(make_nccl_id(library != nullptr ? library : "", &made));
    std::memcpy(id, made.data(), kNcclIdBytes);
    return {};
  });
}

int leanfleet_communicator_lend(const char* name, int32_t engine, leanfleet_lent* lent) {
  return guarded("a communicator", [&]() -> Status {
    Shared found;
    LEANFLEET_RETURN_IF_ERROR(find(name, engine, &found));
    *lent = {};
    lent->rank = found->rank;
    lent->world = found->world;
    lent->engine = static_cast<int32_t>(found->engine);
    lent->sum = lent_exchange<&Communicator::sum>;
    lent->gather = lent_exchange<&Communicator::gather>;
    lent->merge = lent_merge;
    lent->release = [](void* self) { delete static_cast<Shared*>(self); };
    lent->self = new Shared(std::move(found));
    return {};
  });
}

int leanfleet_communicator_adopt(const char* name, const leanfleet_lent* lent) {
  return guarded("a communicator", [&] {
    auto borrowed = std::make_shared<Borrowed>(*lent);
    borrowed->name = name;
    borrowed->rank = lent->rank;
    borrowed->world = lent->world;
    borrowed->engine = static_cast<Engine>(lent->engine);
    return add_communicator(std::move(borrowed));
  });
}

}  // extern "C"
