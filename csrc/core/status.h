// The result of every call in the core: success, or a code and a message written for the person who made the call.
#pragma once

#include <string>
#include <utility>

namespace leanfleet {

enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,  // the caller can mend it
  kUnsupported = 2,      // right, but no kernel here does it
  kCuda = 3,             // a CUDA call failed; the message holds its name and cause
  kInternal = 4,         // our fault
  kPeer = 5,             // another rank of a communicator failed, or did not come in time
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status invalid(std::string text) { return {Code::kInvalidArgument, std::move(text)}; }
  static Status unsupported(std::string text) { return {Code::kUnsupported, std::move(text)}; }
  static Status internal(std::string text) { return {Code::kInternal, std::move(text)}; }
};

}  // namespace leanfleet

// Returns from the enclosing function when `expr`, a Status, is not ok.
#define LEANFLEET_RETURN_IF_ERROR(expr)                    \
  do {                                                     \
    ::leanfleet::Status leanfleet_status_ = (expr);        \
    if (!leanfleet_status_.ok()) return leanfleet_status_; \
  } while (0)
