// libleanfleet_ort.so: every operator of the registry as a custom operator of ONNX Runtime, for the CPU and
// the CUDA provider. Nothing here knows an operator: names, types, attributes and shapes come from the
// schema's tables.
//
// Written against API 18 in C: the library loads in every runtime since 1.18.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "core/op_specs.h"
#include "core/thread_pool.h"
#include "ort/ort_common.h"
#ifdef LEANFLEET_CUDA
#include "core/cuda_target.h"
#endif

namespace leanfleet::ort {

namespace {

constexpr uint32_t kApiVersion = 18;  // the first with GetMayInplace
constexpr const char* kDomain = "leanfleet";
constexpr const char* kOldestRuntime = "1.18";
// Before it ONNX Runtime crashes in shape inference of a node that leaves out an input between others (mended
// in 1.24) or an output at the end (1.28); there the shapes that the model itself declares have to do.
constexpr int kFirstMinorWithSafeInference = 28;

size_t aligned(size_t bytes) { return round_up(bytes, kWorkspaceAlignment); }

// ---- Memory and threads of one invocation

// Memory of the provider's allocator. On CUDA the stream-aware arena gives it: once freed it serves other
// launches on the same stream only, so that it may be freed while the kernel still runs.
class Buffer {
 public:
  explicit Buffer(OrtAllocator* allocator) : allocator_(allocator) {}
  Buffer(Buffer&& other) noexcept : allocator_(other.allocator_), memory_(std::exchange(other.memory_, nullptr)) {}
  ~Buffer() {
    if (memory_ != nullptr) allocator_->Free(allocator_, memory_);
  }

  // GetScratchBuffer crashes for the CPU on 1.20, which has no stream.
  Status allocate(const CustomOp& op, OrtKernelContext* context, size_t bytes) {
    if (bytes == 0) return {};
    bytes += kWorkspaceAlignment;
    if (op.cuda) {
      LEANFLEET_TRY_ORT(*op.ort,
                        op.ort->KernelContext_GetScratchBuffer(context, allocator_->Info(allocator_), bytes, &memory_));
    } else {
      memory_ = allocator_->Alloc(allocator_, bytes);
    }
    return memory_ != nullptr ? Status{} : Status::internal("out of memory: " + std::to_string(bytes) + " bytes");
  }

  char* data() const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_);
    return reinterpret_cast<char*>(aligned(address));
  }

 private:
  OrtAllocator* allocator_;
  void* memory_ = nullptr;
};

// The session's threads.
class OrtThreads : public Threads {
 public:
  OrtThreads(const OrtApi& ort, OrtKernelContext* context) : ort_(ort), context_(context), count_(available_processors()) {}

  int count() const override { return count_; }

  void run(int64_t tasks, void (*task)(void*, int64_t), void* task_context) override {
    std::pair<void (*)(void*, int64_t), void*> job{task, task_context};
    const auto run_one = [](void* data, size_t index) {
      const auto& [function, argument] = *static_cast<decltype(job)*>(data);
      function(argument, static_cast<int64_t>(index));
    };
    const Status status =
        from_ort(ort_, ort_.KernelContext_ParallelFor(context_, run_one, static_cast<size_t>(tasks), 0, &job));
    if (!status.ok()) status_ = status;
  }

  const Status& status() const { return status_; }

 private:
  const OrtApi& ort_;
  OrtKernelContext* context_;
  const int count_;
  Status status_;
};

#ifdef LEANFLEET_CUDA

// Sync words of one node: zeroed once, and left zero by every launch. A launch has them to itself while it is
// being enqueued and returns them for later launches on the same stream, which run after it. They are none of the arena's memory:
// what a captured graph uses of that is free again for the arena, and each replay overwrites it.
class SyncWords {
 public:
  struct Words {
    void* stream;
    size_t bytes;
    std::unique_ptr<void, void (*)(void*)> memory;
    bool busy, zero;
  };

  // Null during a capture in which none are free: nothing is allocated then.
  Status take(const Call& call, void* stream, size_t bytes, Words** taken) {
    std::lock_guard<std::mutex> lock(mutex_);
    *taken = nullptr;
    for (const std::unique_ptr<Words>& words : all_)
      if (!words->busy && words->stream == stream && words->bytes >= bytes) *taken = words.get();
    if (*taken == nullptr) {
      bool capturing = false;
      LEANFLEET_RETURN_IF_ERROR(is_capturing(call, stream, &capturing));
      if (capturing) return {};
      size_t capacity = 4096;  // doubled, so that slowly growing shapes do not leave a trail of buffers
      while (capacity < bytes) capacity *= 2;
      void* memory = nullptr;
      LEANFLEET_RETURN_IF_ERROR(allocate_apart(call, capacity, &memory));
      all_.push_back(std::make_unique<Words>(Words{stream, capacity, {memory, free_apart}, false, false}));
      *taken = all_.back().get();
    }
    if (!(*taken)->zero) LEANFLEET_RETURN_IF_ERROR(zero_on_stream(call, (*taken)->memory.get(), (*taken)->bytes, stream));
    (*taken)->busy = (*taken)->zero = true;
    return {};
  }

  void give_back(Words* words, bool zero) {
    std::lock_guard<std::mutex> lock(mutex_);
    words->busy = false;
    words->zero = zero;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Words>> all_;
};

#endif

// ---- A node of a session

struct Kernel {
  explicit Kernel(const CustomOp& custom_op) : op(custom_op), allocator(nullptr, custom_op.ort->ReleaseAllocator) {}

  const CustomOp& op;
  std::string node;
  AttrValue attrs[kMaxAttrs];
  bool connected[kMaxOutputs] = {};  // outputs that the node has a name for
  std::unique_ptr<OrtAllocator, void(ORT_API_CALL*)(OrtAllocator*)> allocator;
#ifdef LEANFLEET_CUDA
  SyncWords sync_words;
#endif
};

// The outputs that a node may have follow from its attributes.
Status check_connected(const Kernel& kernel) {
  const OpSpec& spec = *kernel.op.op->spec;
  for (int i = 0; i < spec.num_outputs; ++i) {
    if (!kernel.connected[i] || output_exists(spec, kernel.attrs, i)) continue;
    std::string needed;
    for (int k = 0; k < spec.outputs[i].num_when; ++k)
      needed += (needed.empty() ? "" : " and ") + std::string(spec.attrs[spec.outputs[i].when[k]].name) + " = 1";
    return Status::invalid(std::string(spec.name) + " '" + kernel.node + "': output " + spec.outputs[i].name +
                           " is connected, but exists only with " + needed + "; set that on the node, or leave the output out");
  }
  return {};
}

Status create_kernel(const CustomOp& op, const OrtKernelInfo* info, std::unique_ptr<Kernel>* created) {
  const OrtApi& ort = *op.ort;
  const OpSpec& spec = *op.op->spec;
  auto kernel = std::make_unique<Kernel>(op);
  LEANFLEET_RETURN_IF_ERROR(read_text(
      ort, [&](char* buffer, size_t* size) { return ort.KernelInfo_GetNodeName(info, buffer, size); }, &kernel->node));
  LEANFLEET_RETURN_IF_ERROR(read_attributes(spec, kernel->node.c_str(), KernelAttributes(ort, info), kernel->attrs));
  size_t num_outputs = 0;
  LEANFLEET_TRY_ORT(ort, ort.KernelInfo_GetOutputCount(info, &num_outputs));
  for (size_t i = 0; i < num_outputs && i < static_cast<size_t>(spec.num_outputs); ++i) {
    std::string name;
    LEANFLEET_RETURN_IF_ERROR(
        read_text(ort, [&](char* buffer, size_t* size) { return ort.KernelInfo_GetOutputName(info, i, buffer, size); }, &name));
    kernel->connected[i] = !name.empty();
  }
  LEANFLEET_RETURN_IF_ERROR(check_connected(*kernel));
  OrtAllocator* allocator = nullptr;
  LEANFLEET_TRY_ORT(ort, ort.KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator));
  kernel->allocator.reset(allocator);
  *created = std::move(kernel);
  return {};
}

Status read_input(const OrtApi& ort, const Call& call, int index, const OrtValue* value, Tensor* tensor) {
  OrtTensorTypeAndShapeInfo* created = nullptr;
  LEANFLEET_TRY_ORT(ort, ort.GetTensorTypeAndShape(value, &created));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(ort.ReleaseTensorTypeAndShapeInfo)> info(
      created, ort.ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  LEANFLEET_TRY_ORT(ort, ort.GetDimensionsCount(created, &rank));
  if (rank > kMaxRank)
    return call.invalid(std::string(call.spec->inputs[index].name) + " has rank " + std::to_string(rank) +
                        "; no input of an operator has more than " + std::to_string(kMaxRank));
  LEANFLEET_TRY_ORT(ort, ort.GetDimensions(created, tensor->shape, rank));
  tensor->rank = static_cast<int32_t>(rank);
  return from_ort(ort, ort.GetTensorMutableData(const_cast<OrtValue*>(value), &tensor->data));
}

Status read_inputs(const Kernel& kernel, const OrtKernelContext* context, Call* call) {
  const OrtApi& ort = *kernel.op.ort;
  size_t num_inputs = 0;
  LEANFLEET_TRY_ORT(ort, ort.KernelContext_GetInputCount(context, &num_inputs));
  for (int i = 0; i < call->spec->num_inputs && static_cast<size_t>(i) < num_inputs; ++i) {
    const OrtValue* value = nullptr;
    LEANFLEET_TRY_ORT(ort, ort.KernelContext_GetInput(context, i, &value));
    call->inputs[i].dtype = input_type(kernel.op, i);
    if (value != nullptr) LEANFLEET_RETURN_IF_ERROR(read_input(ort, *call, i, value, &call->inputs[i]));
  }
  return {};
}

Status create_outputs(const Kernel& kernel, OrtKernelContext* context, Call* call) {
  const OrtApi& ort = *kernel.op.ort;
  for (int i = 0; i < call->spec->num_outputs; ++i) {
    Tensor& output = call->outputs[i];
    if (!output.present() || !kernel.connected[i]) continue;
    OrtValue* value = nullptr;
    LEANFLEET_TRY_ORT(ort, ort.KernelContext_GetOutput(context, i, output.shape, static_cast<size_t>(output.rank), &value));
    LEANFLEET_TRY_ORT(ort, ort.GetTensorMutableData(value, &output.data));
  }
  return {};
}

// Outputs that the attributes ask for and nobody reads are buffers of the workspace.
void place_unread_outputs(const Kernel& kernel, Call* call, Workspace& ws) {
  for (int i = 0; i < call->spec->num_outputs; ++i) {
    Tensor& output = call->outputs[i];
    if (output.present() && !kernel.connected[i])
      output.data = ws.scratch<char>(output.elements() * element_size(output.dtype));
  }
}

Status launch_on_cpu(Kernel& kernel, OrtKernelContext* context, Call& call) {
  OrtThreads threads(*kernel.op.ort, context);
  const CpuTarget target{&threads};
  Workspace needed;
  place_unread_outputs(kernel, &call, needed);
  LEANFLEET_RETURN_IF_ERROR(run_cpu(*kernel.op.op, call, target, needed));
  Buffer buffer(kernel.allocator.get());
  LEANFLEET_RETURN_IF_ERROR(buffer.allocate(kernel.op, context, needed.sync_bytes() + needed.scratch_bytes()));
  char* const sync = buffer.data();
  char* const scratch = sync + needed.sync_bytes();
  if (needed.sync_bytes() > 0) std::memset(sync, 0, needed.sync_bytes());
  Workspace ws(scratch, needed.scratch_bytes(), sync, needed.sync_bytes());
  place_unread_outputs(kernel, &call, ws);
  LEANFLEET_RETURN_IF_ERROR(run_cpu(*kernel.op.op, call, target, ws));
  return threads.status();
}

#ifdef LEANFLEET_CUDA
Status launch_on_cuda(Kernel& kernel, OrtKernelContext* context, Call& call) {
  const OrtApi& ort = *kernel.op.ort;
  void* stream = nullptr;
  LEANFLEET_TRY_ORT(ort, ort.KernelContext_GetGPUComputeStream(context, &stream));
  CudaTarget target;
  LEANFLEET_RETURN_IF_ERROR(current_cuda_target(stream, &target));
  Workspace needed;
  place_unread_outputs(kernel, &call, needed);
  LEANFLEET_RETURN_IF_ERROR(run_cuda(*kernel.op.op, call, target, needed));

  SyncWords::Words* words = nullptr;
  const size_t sync_bytes = needed.sync_bytes();
  if (sync_bytes > 0) LEANFLEET_RETURN_IF_ERROR(kernel.sync_words.take(call, stream, sync_bytes, &words));
  // Without words of its own the node takes scratch, zeroed by a memset that a replay of a capture repeats.
  const size_t own_sync_bytes = words == nullptr ? sync_bytes : 0;
  const Status status = [&]() -> Status {
    Buffer buffer(kernel.allocator.get());
    LEANFLEET_RETURN_IF_ERROR(buffer.allocate(kernel.op, context, own_sync_bytes + needed.scratch_bytes()));
    char* const scratch = buffer.data() + own_sync_bytes;
    if (own_sync_bytes > 0) LEANFLEET_RETURN_IF_ERROR(zero_on_stream(call, buffer.data(), own_sync_bytes, stream));
    Workspace ws(scratch, needed.scratch_bytes(), words == nullptr ? buffer.data() : words->memory.get(), sync_bytes);
    place_unread_outputs(kernel, &call, ws);
    return run_cuda(*kernel.op.op, call, target, ws);
  }();
  if (words != nullptr) kernel.sync_words.give_back(words, status.ok());
  return status;
}
#endif

Status compute(Kernel& kernel, OrtKernelContext* context) {
  Call call;
  call.spec = kernel.op.op->spec;
  call.node = kernel.node.c_str();
  std::copy(std::begin(kernel.attrs), std::end(kernel.attrs), call.attrs);
  LEANFLEET_RETURN_IF_ERROR(read_inputs(kernel, context, &call));
  LEANFLEET_RETURN_IF_ERROR(bind_inputs(*kernel.op.op, call));
  for (int i = 0; i < call.spec->num_outputs; ++i) call.outputs[i] = output_of(call, i);
  LEANFLEET_RETURN_IF_ERROR(create_outputs(kernel, context, &call));
#ifdef LEANFLEET_CUDA
  if (kernel.op.cuda) return launch_on_cuda(kernel, context, call);
#endif
  return launch_on_cpu(kernel, context, call);
}

// ---- The description that ONNX Runtime asks for

const CustomOp& self(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }

ONNXTensorElementDataType onnx_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case DType::kFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
    case DType::kBFloat16: return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
    case DType::kInt32: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
    case DType::kInt64: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    case DType::kInt8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case DType::kFloat8e4m3fn: return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN;
    case DType::kUint8: return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  }
  return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
}

// Pairs of an input and the output that may take its buffer. The callback has no argument that says which
// operator is asked, so there is one function for each. (Never GetAliasMap: it forces the sharing, even where
// the input is read later or belongs to the caller.)
template <size_t kIndex>
size_t ORT_API_CALL may_inplace(int** inputs, int** outputs) {
  const OpSpec& spec = *kOps[kIndex].spec;
  size_t count = 0;
  *inputs = new (std::nothrow) int[kMaxOutputs];
  *outputs = new (std::nothrow) int[kMaxOutputs];
  for (int i = 0; i < spec.num_outputs && *inputs != nullptr && *outputs != nullptr; ++i) {
    if (spec.outputs[i].takes < 0) continue;
    (*inputs)[count] = spec.outputs[i].takes;
    (*outputs)[count++] = i;
  }
  if (count == 0) {  // ONNX Runtime would not release them
    delete[] std::exchange(*inputs, nullptr);
    delete[] std::exchange(*outputs, nullptr);
  }
  return count;
}

void ORT_API_CALL release_may_inplace(int* inputs, int* outputs) {
  delete[] inputs;
  delete[] outputs;
}

using MayInplace = size_t(ORT_API_CALL*)(int**, int**);

template <size_t... kIndices>
std::array<MayInplace, sizeof...(kIndices)> may_inplace_functions(std::index_sequence<kIndices...>) {
  return {may_inplace<kIndices>...};
}

// choice: which of the types that it may have each tensor with a type of its own has, a digit each.
CustomOp make_custom_op(const OrtApi& ort, size_t index, DType dtype, int choice, bool cuda, bool infers_shapes) {
  static const auto may_inplace_of = may_inplace_functions(std::make_index_sequence<std::size(kOps)>());
  CustomOp op = {};
  op.ort = &ort;
  op.op = &kOps[index];
  op.dtype = dtype;
  for (int i = 0; i < op.op->spec->num_inputs; ++i) {
    const OwnTypes own = own_types(op.op->spec->inputs[i].type, dtype);
    if (own.count == 0) continue;
    op.own[i] = own.types[choice % own.count];
    choice /= own.count;
  }
  op.cuda = cuda;
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp* op) { return self(op).op->spec->name; };
  op.GetExecutionProviderType = [](const OrtCustomOp* op) {
    return self(op).cuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  };
  op.GetInputTypeCount = [](const OrtCustomOp* op) { return static_cast<size_t>(self(op).op->spec->num_inputs); };
  op.GetInputType = [](const OrtCustomOp* op, size_t i) { return onnx_type(input_type(self(op), static_cast<int>(i))); };
  op.GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    return self(op).op->spec->inputs[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetOutputTypeCount = [](const OrtCustomOp* op) { return static_cast<size_t>(self(op).op->spec->num_outputs); };
  op.GetOutputType = [](const OrtCustomOp* op, size_t i) {
    const TensorSpec& output = self(op).op->spec->outputs[i];
    return onnx_type(has_own_type(output.type) ? input_type(self(op), output.takes) : dtype_of(output.type, self(op).dtype));
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    return self(op).op->spec->outputs[i].num_when > 0 ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  };
  op.GetStartVersion = [](const OrtCustomOp* op) { return self(op).op->spec->version; };
  op.GetEndVersion = [](const OrtCustomOp*) { return std::numeric_limits<int>::max(); };
  op.GetMayInplace = may_inplace_of[index];
  op.ReleaseMayInplace = release_may_inplace;
  op.InferOutputShapeFn = infers_shapes ? infer_output_shapes : nullptr;
  op.CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    return guarded(*self(op).ort, [&]() -> Status {
      std::unique_ptr<Kernel> created;
      LEANFLEET_RETURN_IF_ERROR(create_kernel(self(op), info, &created));
      *kernel = created.release();
      return {};
    });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return guarded(*static_cast<Kernel*>(kernel)->op.ort, [&] { return compute(*static_cast<Kernel*>(kernel), context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

// ---- Registration

// What one copy of ONNX Runtime in the process holds pointers to.
struct Registration {
  std::vector<CustomOp> ops;
  std::unique_ptr<OrtCustomOpDomain, void(ORT_API_CALL*)(OrtCustomOpDomain*)> domain;
};

Status create_registration(const OrtApi& ort, bool infers_shapes, Registration* registration) {
  for (size_t i = 0; i < std::size(kOps); ++i) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      int choices = 1;  // of the types of tensors that have their own
      for (int k = 0; k < kOps[i].spec->num_inputs; ++k)
        choices *= std::max(1, own_types(kOps[i].spec->inputs[k].type, dtype).count);
      for (int choice = 0; choice < choices; ++choice) {
        registration->ops.push_back(make_custom_op(ort, i, dtype, choice, false, infers_shapes));
        if (kOps[i].impl->run_cuda != nullptr)
          registration->ops.push_back(make_custom_op(ort, i, dtype, choice, true, infers_shapes));
      }
    }
  }
  OrtCustomOpDomain* domain = nullptr;
  LEANFLEET_TRY_ORT(ort, ort.CreateCustomOpDomain(kDomain, &domain));
  registration->domain.reset(domain);
  for (const CustomOp& op : registration->ops) LEANFLEET_TRY_ORT(ort, ort.CustomOpDomain_Add(domain, &op));
  return {};
}

// Whether the runtime's shape inference can be trusted with any node.
bool infers_shapes(const char* version) {
  int major = 0, minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || minor >= kFirstMinorWithSafeInference);
}

Status register_ops(OrtSessionOptions* options, const OrtApi& ort, const char* version) {
  static std::mutex mutex;
  static std::map<const OrtApi*, Registration> registrations;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = registrations.find(&ort);
  if (found == registrations.end()) {
    Registration created{{}, {nullptr, ort.ReleaseCustomOpDomain}};
    LEANFLEET_RETURN_IF_ERROR(create_registration(ort, infers_shapes(version), &created));
    found = registrations.emplace(&ort, std::move(created)).first;
  }
  return from_ort(ort, ort.AddCustomOpDomain(options, found->second.domain.get()));
}

}  // namespace

}  // namespace leanfleet::ort

// The entry point that ONNX Runtime looks for.
extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                            const OrtApiBase* base) {
  using namespace leanfleet;
  using namespace leanfleet::ort;
  const char* version = base->GetVersionString();
  if (const OrtApi* ort = base->GetApi(kApiVersion)) return guarded(*ort, [&] { return register_ops(options, *ort, version); });
  const OrtApi& oldest = *base->GetApi(1);  // every runtime has it, and CreateStatus in it
  return guarded(oldest, [&] {
    return Status::unsupported(std::string("leanfleet needs onnxruntime ") + kOldestRuntime + " or newer; this is " + version +
                               ". Install a newer onnxruntime");
  });
}
