#include <cstring>
#include <iterator>

#include "core/op_specs.h"

namespace leanfleet {

int num_ops() { return static_cast<int>(std::size(kOps)); }

const Op& op_at(int index) { return kOps[index]; }

const Op* find_op(const std::string& name) {
  for (const Op& op : kOps)
    if (name == op.spec->name) return &op;
  return nullptr;
}

}  // namespace leanfleet
