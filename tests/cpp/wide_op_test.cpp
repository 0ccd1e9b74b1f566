// A call of an operator that has more of everything than the package's own, through the tables of its schema (test_contract.py
// writes it): the last of each is seen, checked and named.
#include <cstdio>
#include <string>

#include "core/op_specs.h"

namespace leanfleet {
namespace wide {
const OpImpl kImpl = {};
}
}  // namespace leanfleet

namespace {

using namespace leanfleet;

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::printf("wrong: %s\n", what.c_str());
  std::exit(1);
}

}  // namespace

int main() {
  const Op& op = kOps[0];
  const OpSpec& spec = *op.spec;
  const int attrs = spec.num_attrs, inputs = spec.num_inputs;
  Call call;
  call.spec = &spec;
  default_attrs(spec, call.attrs);
  for (int i = 0; i < attrs - 1; ++i) require(set_attr_int(spec, "", i, 1, call.attrs).ok(), "a bool attribute");
  const Status refused = set_attr_string(spec, "", attrs - 1, "short", call.attrs);
  require(refused.message.find("a_value_that_takes_many_more_characters_than_any_other_of_the_schema") != std::string::npos,
          "the values of the last attribute: " + refused.message);
  for (int i = 0; i < inputs; ++i) {
    Tensor& tensor = call.inputs[i];
    tensor.rank = i + 1 == inputs ? kMaxRank : 1;  // the last alternative of the last input's shapes: a symbol an axis
    for (int axis = 0; axis < tensor.rank; ++axis) tensor.shape[axis] = 2;
  }
  Status bound = bind_inputs(op, call);
  require(bound.ok(), bound.message);
  for (int i = 0; i < spec.num_symbols; ++i) require(call.dims[i] == 2, std::string("size of ") + spec.symbols[i]);
  for (int i = 0; i < spec.num_outputs; ++i) require(output_of(call, i).present(), "an output");
  call.attrs[attrs - 2].i = 0;
  require(!output_exists(spec, call.attrs, spec.num_outputs - 1), "an output whose last condition does not hold");
  call.inputs[inputs - 2].rank = -1;
  bound = bind_inputs(op, call);
  require(bound.message.find(spec.inputs[inputs - 2].name) != std::string::npos, "a missing partner: " + bound.message);
  std::printf("%d %d %d %d %d\n", inputs, spec.num_outputs, attrs, spec.num_symbols, kMaxRank);
  return 0;
}
