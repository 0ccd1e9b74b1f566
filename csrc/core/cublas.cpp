// cuBLASLt is loaded at run time: what of its interface is used is declared here, as CUDA 12 and 13 have it.
#include "core/cublas.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <tuple>

#include "core/find_symbol.h"

namespace leanfleet {

namespace {

using Handle = void*;
using Descriptor = void*;

constexpr int kSuccess = 0, kNotSupported = 15;              // cublasStatus_t
constexpr int kComputeFloat32 = 68;                          // cublasComputeType_t
constexpr int kDescriptorEpilogue = 7, kDescriptorBias = 8;  // attributes
constexpr int kPreferenceWorkspace = 1, kPreferenceReduction = 3, kPreferenceAlignments[] = {5, 6, 7, 8};
constexpr uint32_t kReductionInFloat32 = 2;  // of parts of a sum: not in the output's type
constexpr uint32_t kAlignment = 16;          // of matrices and biases, in bytes
constexpr int32_t kEpilogueBias = 4;

int type_of(DType dtype) { return dtype == DType::kFloat16 ? 2 : dtype == DType::kBFloat16 ? 14 : 0; }  // cudaDataType

struct Algorithm {
  uint64_t words[8];
};
struct Found {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

struct Functions {
  int (*create)(Handle*);
  int (*make_product)(Descriptor*, int, int);
  int (*set_product)(Descriptor, int, const void*, size_t);
  int (*end_product)(Descriptor);
  int (*make_layout)(Descriptor*, int, uint64_t, uint64_t, int64_t);
  int (*end_layout)(Descriptor);
  int (*make_preference)(Descriptor*);
  int (*set_preference)(Descriptor, int, const void*, size_t);
  int (*end_preference)(Descriptor);
  int (*find)(Handle, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, int, Found*, int*);
  int (*multiply)(Handle, Descriptor, const void*, const void*, Descriptor, const void*, Descriptor, const void*, const void*,
                  Descriptor, void*, Descriptor, const Algorithm*, void*, size_t, void*);
};

bool load_from(const char* name, int flags, Functions* f) {
  void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags);  // stays loaded
  return library != nullptr && find_symbol(library, "cublasLtCreate", &f->create) &&
         find_symbol(library, "cublasLtMatmulDescCreate", &f->make_product) &&
         find_symbol(library, "cublasLtMatmulDescSetAttribute", &f->set_product) &&
         find_symbol(library, "cublasLtMatmulDescDestroy", &f->end_product) &&
         find_symbol(library, "cublasLtMatrixLayoutCreate", &f->make_layout) &&
         find_symbol(library, "cublasLtMatrixLayoutDestroy", &f->end_layout) &&
         find_symbol(library, "cublasLtMatmulPreferenceCreate", &f->make_preference) &&
         find_symbol(library, "cublasLtMatmulPreferenceSetAttribute", &f->set_preference) &&
         find_symbol(library, "cublasLtMatmulPreferenceDestroy", &f->end_preference) &&
         find_symbol(library, "cublasLtMatmulAlgoGetHeuristic", &f->find) &&
         find_symbol(library, "cublasLtMatmul", &f->multiply);
}

// Null: there is none. One that the process has already is taken first.
const Functions* functions() {
  static const auto loaded = [] {
    static Functions f;
    for (const int flags : {RTLD_NOLOAD, 0})
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
        if (load_from(name, flags, &f)) return &f;
    return static_cast<Functions*>(nullptr);
  }();
  return loaded;
}

// What ends with a scope.
struct Owned {
  Descriptor of = nullptr;
  int (*end)(Descriptor) = nullptr;
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (of != nullptr) end(of);
  }
};

// cuBLAS stores columns first: the transposed product, [columns,rows] = weight^T input^T, whose operands lie there untransposed.
class Product {
 public:
  Product(const Functions& f, const CublasProduct& of, DType dtype) : f_(f), of_(of), type_(type_of(dtype)) {}

  // A cublasStatus_t.
  int make() {
    product_.end = f_.end_product;
    int code = f_.make_product(&product_.of, kComputeFloat32, type_of(DType::kFloat32));
    if (code == kSuccess && of_.bias != nullptr)
      code = f_.set_product(product_.of, kDescriptorEpilogue, &kEpilogueBias, sizeof kEpilogueBias);
    if (code == kSuccess) code = make_layout(&weight_, of_.columns, of_.depth);
    if (code == kSuccess) code = make_layout(&input_, of_.depth, of_.rows);
    if (code == kSuccess) code = make_layout(&output_, of_.columns, of_.rows);
    return code;
  }
  // For any such product whose tensors begin at multiples of 16 bytes.
  int find(Handle handle, Found* found, int* count) {
    Owned preference;
    preference.end = f_.end_preference;
    const size_t most = kCublasWorkspace;
    int code = f_.make_preference(&preference.of);
    if (code == kSuccess) code = f_.set_preference(preference.of, kPreferenceWorkspace, &most, sizeof most);
    if (code == kSuccess)
      code = f_.set_preference(preference.of, kPreferenceReduction, &kReductionInFloat32, sizeof kReductionInFloat32);
    for (const int matrix : kPreferenceAlignments)
      if (code == kSuccess) code = f_.set_preference(preference.of, matrix, &kAlignment, sizeof kAlignment);
    // An address says how a bias is aligned.
    if (code == kSuccess) code = set_bias(reinterpret_cast<const void*>(uintptr_t{kAlignment}));
    if (code == kSuccess)
      code = f_.find(handle, product_.of, weight_.of, input_.of, output_.of, output_.of, preference.of, 1, found, count);
    return code;
  }
  int multiply(Handle handle, const Algorithm& algorithm, void* stream) {
    const float one = 1.0f, zero = 0.0f;
    const int code = set_bias(of_.bias);
    if (code != kSuccess) return code;
    return f_.multiply(handle, product_.of, &one, of_.weight, weight_.of, of_.input, input_.of, &zero, of_.output, output_.of,
                       of_.output, output_.of, &algorithm, of_.workspace, kCublasWorkspace, stream);
  }

 private:
  // Where the product has one.
  int set_bias(const void* bias) {
    return of_.bias == nullptr ? kSuccess : f_.set_product(product_.of, kDescriptorBias, &bias, sizeof bias);
  }
  int make_layout(Owned* layout, int64_t rows, int64_t columns) {
    layout->end = f_.end_layout;
    return f_.make_layout(&layout->of, type_, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), rows);
  }

  const Functions& f_;
  const CublasProduct& of_;
  int type_;
  Owned product_, weight_, input_, output_;
};

Status failed(const Call& call, const char* what, int code) {
  const Status told =
      call.invalid(std::string("cuBLASLt failed to ") + what + " (cublasStatus_t " + std::to_string(code) + ")");
  return {Code::kCuda, told.message};
}

struct Choice {
  Handle handle = nullptr;
  Algorithm algorithm = {};
  bool found = false;  // an algorithm
};

// Handles, one a device, and algorithms that were found: asking takes longer than a product of a few rows.
class Known {
 public:
  Status choose(const Call& call, const Functions& f, const CublasProduct& of, DType dtype, const CudaTarget& target,
                Product* product, Choice* choice) {
    const CallsDuringCapture allowed;
    std::lock_guard<std::mutex> lock(mutex_);
    Handle& of_device = handles_[target.device];
    int code = of_device == nullptr ? f.create(&of_device) : kSuccess;
    if (code != kSuccess) {
      of_device = nullptr;
      return unless_captured(call, target, failed(call, "begin", code));
    }
    choice->handle = of_device;
    const auto key = std::make_tuple(target.device, dtype, of.rows, of.depth, of.columns, of.bias != nullptr);
    const auto at = algorithms_.find(key);
    if (at == algorithms_.end()) {
      Found best = {};
      int count = 0;
      code = product->find(of_device, &best, &count);
      if (code == kNotSupported || (code == kSuccess && count == 0)) return {};
      if (code != kSuccess) return unless_captured(call, target, failed(call, "choose an algorithm", code));
      if (algorithms_.size() >= kMost) algorithms_.clear();
      choice->algorithm = algorithms_[key] = best.algorithm;
    } else {
      choice->algorithm = at->second;
    }
    choice->found = true;
    return {};
  }

 private:
  static constexpr size_t kMost = 4096;  // algorithms

  // What cuBLASLt does the first time some versions refuse while the stream is being captured: then there is no algorithm yet.
  static Status unless_captured(const Call& call, const CudaTarget& target, const Status& status) {
    bool captured = false;
    LEANFLEET_RETURN_IF_ERROR(is_captured(call, target.stream, &captured));
    return captured ? Status{} : status;
  }

  std::mutex mutex_;
  std::map<int, Handle> handles_;
  std::map<std::tuple<int, DType, int64_t, int64_t, int64_t, bool>, Algorithm> algorithms_;
};

}  // namespace

bool has_cublas() { return functions() != nullptr; }

Status multiply_by_cublas(const Call& call, const CublasProduct& of, DType dtype, const CudaTarget& target, bool* done) {
  static Known& known = *new Known;  // outlives threads of the process's end
  const Functions& f = *functions();
  *done = false;
  Product product(f, of, dtype);
  int code = product.make();
  if (code != kSuccess) return failed(call, "describe a product", code);
  Choice choice;
  LEANFLEET_RETURN_IF_ERROR(known.choose(call, f, of, dtype, target, &product, &choice));
  if (!choice.found) return {};
  code = product.multiply(choice.handle, choice.algorithm, target.stream);
  if (code != kSuccess) return failed(call, "multiply", code);
  *done = true;
  return {};
}

}  // namespace leanfleet
