// What the parts of the ONNX Runtime library share: statuses of both worlds, and attributes of a node.
#pragma once

#include <onnxruntime_c_api.h>

#include <exception>
#include <new>
#include <string>

#include "core/op.h"

namespace leanfleet::ort {

// One operator, for one type T, one type of each tensor that has its own and one execution provider. ONNX Runtime holds the
// address while any session lives.
struct CustomOp : OrtCustomOp {
  const OrtApi* ort;
  const Op* op;
  DType dtype;
  DType own[kMaxInputs];  // of inputs with a type of their own
  bool cuda;
};

inline DType input_type(const CustomOp& op, int i) {
  const TypeVar type = op.op->spec->inputs[i].type;
  return has_own_type(type) ? op.own[i] : dtype_of(type, op.dtype);
}

// Takes a status from ONNX Runtime.
inline Status from_ort(const OrtApi& ort, OrtStatus* status) {
  if (status == nullptr) return {};
  Status result = Status::internal(std::string("onnxruntime: ") + ort.GetErrorMessage(status));
  ort.ReleaseStatus(status);
  return result;
}

inline OrtStatus* to_ort(const OrtApi& ort, const Status& status) {
  switch (status.code) {
    case Code::kOk: return nullptr;
    case Code::kInvalidArgument: return ort.CreateStatus(ORT_INVALID_ARGUMENT, status.message.c_str());
    case Code::kUnsupported: return ort.CreateStatus(ORT_NOT_IMPLEMENTED, status.message.c_str());
    case Code::kCuda: return ort.CreateStatus(ORT_EP_FAIL, status.message.c_str());
    case Code::kInternal:
    case Code::kPeer: break;
  }
  return ort.CreateStatus(ORT_FAIL, status.message.c_str());
}

// Returns from the enclosing function, which returns a Status, when a call to ONNX Runtime failed.
#define LEANFLEET_TRY_ORT(api, call) LEANFLEET_RETURN_IF_ERROR(::leanfleet::ort::from_ort(api, call))

// Runs `body`, which returns a Status. No exception crosses the library's boundary.
template <class F>
OrtStatus* guarded(const OrtApi& ort, F&& body) {
  try {
    return to_ort(ort, body());
  } catch (const std::bad_alloc&) {
    return ort.CreateStatus(ORT_FAIL, "out of memory");
  } catch (const std::exception& error) {
    return ort.CreateStatus(ORT_FAIL, error.what());
  }
}

// Reads a text through `query(buffer, size)`, which tells the size with its terminator when the buffer is
// null.
template <class F>
Status read_text(const OrtApi& ort, F&& query, std::string* text) {
  size_t size = 0;
  LEANFLEET_TRY_ORT(ort, query(nullptr, &size));
  text->resize(size);
  LEANFLEET_TRY_ORT(ort, query(&(*text)[0], &size));
  text->resize(size > 0 ? size - 1 : 0);
  return {};
}

// Attributes of a node by name. read_int and the like are false where the attribute is absent or of another
// type. Neither interface lists a node's attributes, so that one with an unknown name goes unnoticed.
class KernelAttributes {
 public:
  KernelAttributes(const OrtApi& ort, const OrtKernelInfo* info) : ort_(ort), info_(info) {}

  bool read_int(const char* name, int64_t* value) const {
    return from_ort(ort_, ort_.KernelInfoGetAttribute_int64(info_, name, value)).ok();
  }
  bool read_float(const char* name, float* value) const {
    return from_ort(ort_, ort_.KernelInfoGetAttribute_float(info_, name, value)).ok();
  }
  bool read_string(const char* name, std::string* value) const {
    return read_text(
               ort_, [&](char* buffer, size_t* size) { return ort_.KernelInfoGetAttribute_string(info_, name, buffer, size); },
               value)
        .ok();
  }
  bool is_list(const char* name) const {
    size_t size = 0;
    return from_ort(ort_, ort_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size)).ok() ||
           from_ort(ort_, ort_.KernelInfoGetAttributeArray_float(info_, name, nullptr, &size)).ok();
  }

 private:
  const OrtApi& ort_;
  const OrtKernelInfo* info_;
};

class InferenceAttributes {
 public:
  InferenceAttributes(const OrtApi& ort, const OrtShapeInferContext* context) : ort_(ort), context_(context) {}

  bool read_int(const char* name, int64_t* value) const { return read(name, ORT_OP_ATTR_INT, value, sizeof *value) > 0; }
  bool read_float(const char* name, float* value) const { return read(name, ORT_OP_ATTR_FLOAT, value, sizeof *value) > 0; }
  bool read_string(const char* name, std::string* value) const {
    char buffer[kMaxValueLength + 2] = {};  // longer than every value in the schema
    const bool found = read(name, ORT_OP_ATTR_STRING, buffer, sizeof buffer - 1) > 0;
    *value = buffer;  // newer runtimes write no terminator
    return found;
  }
  bool is_list(const char*) const { return false; }

 private:
  // Bytes read; 0: absent or of another type.
  size_t read(const char* name, OrtOpAttrType type, void* value, size_t capacity) const {
    const OrtOpAttr* attr = nullptr;
    size_t size = 0;
    if (!from_ort(ort_, ort_.ShapeInferContext_GetAttribute(context_, name, &attr)).ok()) return 0;
    return from_ort(ort_, ort_.ReadOpAttr(attr, type, value, capacity, &size)).ok() ? size : 0;
  }

  const OrtApi& ort_;
  const OrtShapeInferContext* context_;
};

// The attributes of a node, checked; those that it leaves out have their default. The order of the attempts
// matters: ONNX Runtime reads any attribute as a string during shape inference.
template <class Attributes>
Status read_attributes(const OpSpec& spec, const char* node, const Attributes& from, AttrValue* attrs) {
  default_attrs(spec, attrs);
  for (int i = 0; i < spec.num_attrs; ++i) {
    const char* name = spec.attrs[i].name;
    int64_t integer = 0;
    float real = 0.0f;
    std::string text;
    if (from.read_int(name, &integer)) {
      LEANFLEET_RETURN_IF_ERROR(set_attr_int(spec, node, i, integer, attrs));
    } else if (from.read_float(name, &real)) {
      LEANFLEET_RETURN_IF_ERROR(set_attr_float(spec, node, i, real, attrs));
    } else if (from.read_string(name, &text)) {
      LEANFLEET_RETURN_IF_ERROR(set_attr_string(spec, node, i, text, attrs));
    } else if (from.is_list(name)) {
      return Status::invalid(std::string(spec.name) + " '" + node + "': attribute " + name +
                             " is a list; expected a single value");
    }
  }
  return {};
}

// cuda.cpp, in builds with CUDA. `stream` is a cudaStream_t.
Status zero_on_stream(const Call& call, void* memory, size_t bytes, void* stream);
Status is_capturing(const Call& call, void* stream, bool* capturing);
// Memory of the device beside the provider's arena.
Status allocate_apart(const Call& call, size_t bytes, void** memory);
void free_apart(void* memory);

// shape_inference.cpp: OrtCustomOp::InferOutputShapeFn.
OrtStatus* ORT_API_CALL infer_output_shapes(const OrtCustomOp* op, OrtShapeInferContext* context);

}  // namespace leanfleet::ort
