// The types of the tables that csrc/generate.py writes into op_specs.h. ops.toml explains their meaning.
#pragma once

#include <cstdint>

#include "core/op_sizes.h"

namespace leanfleet {

enum class TypeVar : int8_t { kT, kF, kI, kL, kC, kS };

enum class RefKind : int8_t { kNone, kInput, kAttr, kSymbol };

struct Ref {
  RefKind kind;
  int8_t index;
};

// An axis of symbol + offset + times x plus; times 0 with a plus: the larger of the two symbols,
// which tells neither of them.
struct AxisSpec {
  int8_t symbol;  // index into OpSpec::symbols, -1: the axis is the constant `offset`
  int8_t offset;
  int8_t plus;  // a symbol that another input tells, -1: none
  int8_t times;
};

struct ShapeSpec {
  int8_t num_conditions;
  Ref conditions[kMaxConditions];  // the inputs that must be present and the bool attributes that must be on
  int8_t rank;
  int8_t swap;  // with layout bnhd axes `swap` and `swap + 1` change places; -1: none
  AxisSpec axes[kMaxRank];
};

struct TensorSpec {
  const char* name;
  TypeVar type;
  bool optional;
  int8_t like;     // outputs: the input whose shape it has, -1: see shapes
  int8_t takes;    // outputs: the input whose buffer it may take, -1: none
  int8_t repeats;  // outputs with `like`: the attribute by which the first axis is multiplied, -1: none
  int8_t num_when;
  int8_t when[kMaxWhen];  // outputs: attributes that must be on
  int8_t num_shapes;
  ShapeSpec shapes[kMaxShapes];
};

enum class AttrType : int8_t { kBool, kInt, kFloat, kString };

struct AttrSpec {
  const char* name;
  AttrType type;
  int64_t default_int;  // kBool, kInt; kString with values: index into them
  float default_float;
  bool has_off, has_min;
  double off, min;
  int8_t num_values, num_served;  // the first num_served values have kernels, the others only the reference
  const char* const* values;
  const char* refuse;        // why the attribute cannot be switched on; null: it can
  int8_t symbol;             // kInt: the symbol of outputs' axes that has the attribute's value, -1: none
  const char* default_text;  // kString without values, which takes any text but the empty one; else null
};

enum class RuleKind : int8_t { kMultiple, kFixed, kEqual, kTogether, kExclusive, kNeeds };

struct RuleSpec {
  RuleKind kind;
  Ref condition;
  int8_t num_args;
  Ref args[kMaxRuleArgs];
  int64_t value;  // kFixed
};

struct OpSpec {
  const char* name;
  int version;
  int num_inputs, num_outputs, num_attrs, num_rules, num_symbols;
  const TensorSpec* inputs;
  const TensorSpec* outputs;
  const AttrSpec* attrs;
  const RuleSpec* rules;
  const char* const* symbols;
  int8_t layout;  // index of the attribute `layout`, -1: none
};

}  // namespace leanfleet
