// Generated from ops.toml by csrc/generate.py: change that file and run the generator again.
// The most that an operator of the schema has of each; kMaxValueLength: characters of an attribute's value.
#pragma once

namespace leanfleet {

constexpr int kMaxInputs = 15;
constexpr int kMaxOutputs = 6;
constexpr int kMaxAttrs = 12;
constexpr int kMaxSymbols = 13;
constexpr int kMaxRank = 5;
constexpr int kMaxShapes = 6;
constexpr int kMaxConditions = 2;
constexpr int kMaxWhen = 2;
constexpr int kMaxRuleArgs = 4;
constexpr int kMaxValueLength = 18;

}  // namespace leanfleet
