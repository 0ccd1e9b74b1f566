// Generated from ops.toml by csrc/generate.py: change that file and run the generator again.
#pragma once

#include "core/op.h"

namespace leanfleet {

// What a tensor of type C may have besides T.
inline constexpr DType kNarrowTypes[] = {DType::kInt8, DType::kFloat8e4m3fn, DType::kUint8};

namespace lean_attention {
enum Input { kQuery, kKeyCache, kValueCache, kSeqLens, kQueryLens, kNewKey, kNewValue, kCuSeqlens, kBlockTable, kSinks, kCosCache, kSinCache, kCuQueryLens, kKeyScale, kValueScale };
enum Output { kOutOutput, kOutLse, kOutKeyCacheOut, kOutValueCacheOut, kOutKeyScaleOut, kOutValueScaleOut };
enum Attr { kAttrScale, kAttrCausal, kAttrWindow, kAttrSoftcap, kAttrAppend, kAttrLayout, kAttrRotaryInterleaved, kAttrPackedQkv, kAttrKeyPerToken, kAttrValuePerToken, kAttrWorld, kAttrCommunicator };
enum Dim { kDimH, kDimHkv, kDimNq, kDimD, kDimB, kDimP, kDimBlock, kDimTotal, kDimS, kDimDv, kDimM, kDimPositions, kDimHalf };
enum Layout { kLayoutBhnd, kLayoutBnhd };
inline constexpr const char* kLayoutValues[] = {"bhnd", "bnhd"};
inline constexpr TensorSpec kInputs[] = {
    {"query", TypeVar::kT, false, -1, -1, -1, 0, {}, 4, {{2, {{RefKind::kInput, 12}, {RefKind::kAttr, 7}}, 3, 0, {{0, 0, 1, 2}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 12}}, 3, 0, {{0, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kAttr, 7}}, 4, 1, {{4, 0, -1, 0}, {0, 0, 1, 2}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, 1, {{4, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"key_cache", TypeVar::kC, false, -1, -1, -1, 0, {}, 3, {{1, {{RefKind::kInput, 8}}, 4, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 3, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value_cache", TypeVar::kC, false, -1, -1, -1, 0, {}, 3, {{1, {{RefKind::kInput, 8}}, 4, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}, {9, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 3, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}, {9, 0, -1, 0}}}, {0, {}, 4, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}, {9, 0, -1, 0}}}}},
    {"seq_lens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{4, 0, -1, 0}}}}},
    {"query_lens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{4, 0, -1, 0}}}}},
    {"new_key", TypeVar::kT, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 12}}, 3, 0, {{1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, 1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"new_value", TypeVar::kT, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 12}}, 3, 0, {{1, 0, -1, 0}, {2, 0, -1, 0}, {9, 0, -1, 0}}}, {0, {}, 4, 1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {9, 0, -1, 0}}}}},
    {"cu_seqlens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{4, 1, -1, 0}}}}},
    {"block_table", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{4, 0, -1, 0}, {10, 0, -1, 0}}}}},
    {"sinks", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"cos_cache", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{11, 0, -1, 0}, {12, 0, -1, 0}}}}},
    {"sin_cache", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{11, 0, -1, 0}, {12, 0, -1, 0}}}}},
    {"cu_query_lens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{4, 1, -1, 0}}}}},
    {"key_scale", TypeVar::kF, true, -1, -1, -1, 0, {}, 5, {{2, {{RefKind::kAttr, 8}, {RefKind::kInput, 8}}, 3, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}}}, {2, {{RefKind::kAttr, 8}, {RefKind::kInput, 7}}, 2, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}}}, {1, {{RefKind::kAttr, 8}}, 3, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}}}, {0, {}, 3, -1, {{1, 0, -1, 0}, {-1, 1, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 1, -1, {{-1, 1, -1, 0}}}}},
    {"value_scale", TypeVar::kF, true, -1, -1, -1, 0, {}, 5, {{2, {{RefKind::kAttr, 9}, {RefKind::kInput, 8}}, 3, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}}}, {2, {{RefKind::kAttr, 9}, {RefKind::kInput, 7}}, 2, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}}}, {1, {{RefKind::kAttr, 9}}, 3, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}}}, {0, {}, 3, -1, {{1, 0, -1, 0}, {-1, 1, -1, 0}, {9, 0, -1, 0}}}, {0, {}, 1, -1, {{-1, 1, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 12}}, 3, 0, {{0, 0, -1, 0}, {2, 0, -1, 0}, {9, 0, -1, 0}}}, {0, {}, 4, 1, {{4, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}, {9, 0, -1, 0}}}}},
    {"lse", TypeVar::kF, false, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 12}}, 2, 0, {{0, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 3, 1, {{4, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"key_cache_out", TypeVar::kC, false, -1, 1, -1, 1, {4}, 3, {{1, {{RefKind::kInput, 8}}, 4, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 3, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value_cache_out", TypeVar::kC, false, -1, 2, -1, 1, {4}, 3, {{1, {{RefKind::kInput, 8}}, 4, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}, {9, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 3, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}, {9, 0, -1, 0}}}, {0, {}, 4, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}, {9, 0, -1, 0}}}}},
    {"key_scale_out", TypeVar::kF, false, -1, 13, -1, 2, {4, 8}, 3, {{2, {{RefKind::kAttr, 8}, {RefKind::kInput, 8}}, 3, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}}}, {2, {{RefKind::kAttr, 8}, {RefKind::kInput, 7}}, 2, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}}}, {1, {{RefKind::kAttr, 8}}, 3, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}}}}},
    {"value_scale_out", TypeVar::kF, false, -1, 14, -1, 2, {4, 9}, 3, {{2, {{RefKind::kAttr, 9}, {RefKind::kInput, 8}}, 3, -1, {{5, 0, -1, 0}, {6, 0, -1, 0}, {1, 0, -1, 0}}}, {2, {{RefKind::kAttr, 9}, {RefKind::kInput, 7}}, 2, -1, {{1, 0, -1, 0}, {7, 0, -1, 0}}}, {1, {{RefKind::kAttr, 9}}, 3, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"scale", AttrType::kFloat, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"causal", AttrType::kBool, 1, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"window", AttrType::kInt, -1, 0.0f, true, true, -1.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"softcap", AttrType::kFloat, 0, 0.0f, true, true, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"append", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"layout", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kLayoutValues, nullptr, -1, nullptr},
    {"rotary_interleaved", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"packed_qkv", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"key_per_token", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"value_per_token", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"world", AttrType::kInt, 1, 0.0f, false, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"communicator", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, "world"},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 0}, {RefKind::kSymbol, 1}}, 0},
    {RuleKind::kEqual, {RefKind::kAttr, 7}, 2, {{RefKind::kSymbol, 3}, {RefKind::kSymbol, 9}}, 0},
    {RuleKind::kTogether, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 5}, {RefKind::kInput, 6}}, 0},
    {RuleKind::kExclusive, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 7}, {RefKind::kInput, 8}}, 0},
    {RuleKind::kExclusive, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 12}, {RefKind::kInput, 4}}, 0},
    {RuleKind::kExclusive, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 7}, {RefKind::kInput, 5}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 3, {{RefKind::kAttr, 4}, {RefKind::kInput, 5}, {RefKind::kAttr, 7}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 5}, {RefKind::kAttr, 4}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 7}, {RefKind::kAttr, 4}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 2}, {RefKind::kAttr, 1}}, 0},
    {RuleKind::kTogether, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 10}, {RefKind::kInput, 11}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 6}, {RefKind::kInput, 10}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 8}, {RefKind::kInput, 13}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 9}, {RefKind::kInput, 14}}, 0},
};
inline constexpr const char* kSymbols[] = {"H", "Hkv", "Nq", "D", "B", "P", "block", "total", "S", "Dv", "M", "positions", "half"};
inline constexpr OpSpec kSpec = {"LeanAttention", 1, 15, 6, 12, 14, 13, kInputs, kOutputs, kAttrs, kRules, kSymbols, 5};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace lean_attention

namespace causal_linear_decay {
enum Input { kQuery, kKey, kValue, kLogDecay, kInitialState, kInitialNorm, kCuSeqlens, kStateIndex, kBeta };
enum Output { kOutOutput, kOutFinalState, kOutFinalNorm };
enum Attr { kAttrAlgorithm, kAttrScale, kAttrNormalize, kAttrEps, kAttrReturnState, kAttrLayout, kAttrStateVFirst };
enum Dim { kDimB, kDimHq, kDimN, kDimR, kDimHk, kDimHv, kDimDv, kDimP, kDimQ };
enum Algorithm { kAlgorithmAuto, kAlgorithmCausalDotProduct, kAlgorithmFleet, kAlgorithmLightning, kAlgorithmVanilla, kAlgorithmBlockBased, kAlgorithmRecursion };
inline constexpr const char* kAlgorithmValues[] = {"auto", "causal_dot_product", "fleet", "lightning", "vanilla", "block_based", "recursion"};
enum Layout { kLayoutBhnd, kLayoutBnhd };
inline constexpr const char* kLayoutValues[] = {"bhnd", "bnhd"};
inline constexpr TensorSpec kInputs[] = {
    {"query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"log_decay", TypeVar::kF, true, -1, -1, -1, 0, {}, 3, {{0, {}, 1, -1, {{5, 0, -1, 0}}}, {0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"initial_state", TypeVar::kS, true, -1, -1, -1, 0, {}, 6, {{2, {{RefKind::kInput, 7}, {RefKind::kAttr, 6}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {2, {{RefKind::kInput, 6}, {RefKind::kAttr, 6}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 6}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 6}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"initial_norm", TypeVar::kF, true, -1, -1, -1, 0, {}, 3, {{1, {{RefKind::kInput, 7}}, 3, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 6}}, 3, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"cu_seqlens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{8, 1, -1, 0}}}}},
    {"state_index", TypeVar::kI, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 6}}, 1, -1, {{8, 0, -1, 0}}}, {0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"beta", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, 5, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"final_state", TypeVar::kS, false, -1, 4, -1, 1, {4}, 6, {{2, {{RefKind::kInput, 7}, {RefKind::kAttr, 6}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {2, {{RefKind::kInput, 6}, {RefKind::kAttr, 6}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 6}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 6}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"final_norm", TypeVar::kF, false, -1, 5, -1, 2, {4, 2}, 3, {{1, {{RefKind::kInput, 7}}, 3, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 6}}, 3, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"algorithm", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 7, 4, kAlgorithmValues, nullptr, -1, nullptr},
    {"scale", AttrType::kFloat, 0, 1.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"normalize", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"eps", AttrType::kFloat, 0, 1e-06f, false, true, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"return_state", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"layout", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kLayoutValues, nullptr, -1, nullptr},
    {"state_v_first", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 5}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 1}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kFixed, {RefKind::kInput, 6}, 1, {{RefKind::kSymbol, 0}}, 1},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 7}, {RefKind::kInput, 4}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 5}, {RefKind::kAttr, 2}}, 0},
    {RuleKind::kTogether, {RefKind::kAttr, 2}, 2, {{RefKind::kInput, 4}, {RefKind::kInput, 5}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "Hq", "N", "R", "Hk", "Hv", "Dv", "P", "Q"};
inline constexpr OpSpec kSpec = {"CausalLinearDecay", 1, 9, 3, 7, 6, 9, kInputs, kOutputs, kAttrs, kRules, kSymbols, 5};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace causal_linear_decay

namespace causal_linear_decay_grad {
enum Input { kQuery, kKey, kValue, kLogDecay, kInitialState, kGradOutput, kGradFinalState, kCuSeqlens };
enum Output { kOutGradQuery, kOutGradKey, kOutGradValue, kOutGradLogDecay, kOutGradInitialState };
enum Attr { kAttrScale, kAttrGradDecay, kAttrGradState, kAttrLayout, kAttrStateVFirst, kAttrNormalize };
enum Dim { kDimB, kDimHq, kDimN, kDimR, kDimHk, kDimHv, kDimDv, kDimQ };
enum Layout { kLayoutBhnd, kLayoutBnhd };
inline constexpr const char* kLayoutValues[] = {"bhnd", "bnhd"};
inline constexpr TensorSpec kInputs[] = {
    {"query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"log_decay", TypeVar::kF, true, -1, -1, -1, 0, {}, 3, {{0, {}, 1, -1, {{5, 0, -1, 0}}}, {0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"initial_state", TypeVar::kF, true, -1, -1, -1, 0, {}, 4, {{2, {{RefKind::kInput, 7}, {RefKind::kAttr, 4}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 4}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"grad_output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, 5, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"grad_final_state", TypeVar::kF, true, -1, -1, -1, 0, {}, 4, {{2, {{RefKind::kInput, 7}, {RefKind::kAttr, 4}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 4}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"cu_seqlens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{7, 1, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"grad_query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"grad_key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"grad_value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"grad_log_decay", TypeVar::kF, false, 3, -1, -1, 1, {1}, 0, {}},
    {"grad_initial_state", TypeVar::kF, false, -1, -1, -1, 1, {2}, 4, {{2, {{RefKind::kInput, 7}, {RefKind::kAttr, 4}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 4}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"scale", AttrType::kFloat, 0, 1.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"grad_decay", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"grad_state", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"layout", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kLayoutValues, nullptr, -1, nullptr},
    {"state_v_first", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"normalize", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, "the normalised form is differentiated by composition: differentiate numerator and denominator, as leanfleet.export does in PyTorch", -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 5}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 1}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kFixed, {RefKind::kInput, 7}, 1, {{RefKind::kSymbol, 0}}, 1},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 1}, {RefKind::kInput, 3}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "Hq", "N", "R", "Hk", "Hv", "Dv", "Q"};
inline constexpr OpSpec kSpec = {"CausalLinearDecayGrad", 1, 8, 5, 6, 4, 8, kInputs, kOutputs, kAttrs, kRules, kSymbols, 3};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace causal_linear_decay_grad

namespace normalized_linear_attention {
enum Input { kQuery, kKey, kValue, kCoefficients, kInitialState, kInitialKeySum, kInitialValueSum, kInitialCount };
enum Output { kOutOutput, kOutNormalizer, kOutFinalState, kOutFinalKeySum, kOutFinalValueSum, kOutFinalCount };
enum Attr { kAttrCausal, kAttrNormalizeQk, kAttrEps, kAttrReturnState, kAttrLayout };
enum Dim { kDimB, kDimH, kDimN, kDimD, kDimHkv, kDimDv };
enum Layout { kLayoutBhnd, kLayoutBnhd };
inline constexpr const char* kLayoutValues[] = {"bhnd", "bnhd"};
inline constexpr TensorSpec kInputs[] = {
    {"query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"coefficients", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{-1, 2, -1, 0}}}}},
    {"initial_state", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 4, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"initial_key_sum", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"initial_value_sum", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"initial_count", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"normalizer", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"final_state", TypeVar::kF, false, -1, 4, -1, 1, {3}, 1, {{0, {}, 4, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"final_key_sum", TypeVar::kF, false, -1, 5, -1, 1, {3}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"final_value_sum", TypeVar::kF, false, -1, 6, -1, 1, {3}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"final_count", TypeVar::kI, false, -1, 7, -1, 1, {3}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"causal", AttrType::kBool, 1, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"normalize_qk", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"eps", AttrType::kFloat, 0, 1e-06f, false, true, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"return_state", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"layout", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kLayoutValues, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 1}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kTogether, {RefKind::kNone, -1}, 4, {{RefKind::kInput, 4}, {RefKind::kInput, 5}, {RefKind::kInput, 6}, {RefKind::kInput, 7}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 4}, {RefKind::kAttr, 0}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 3}, {RefKind::kAttr, 0}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "H", "N", "D", "Hkv", "Dv"};
inline constexpr OpSpec kSpec = {"NormalizedLinearAttention", 1, 8, 6, 5, 4, 6, kInputs, kOutputs, kAttrs, kRules, kSymbols, 4};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace normalized_linear_attention

namespace normalized_linear_attention_grad {
enum Input { kQuery, kKey, kValue, kCoefficients, kOutput, kNormalizer, kGradOutput };
enum Output { kOutGradQuery, kOutGradKey, kOutGradValue, kOutGradCoefficients };
enum Attr { kAttrCausal, kAttrNormalizeQk, kAttrEps, kAttrGradCoefficients, kAttrLayout, kAttrReturnState };
enum Dim { kDimB, kDimH, kDimN, kDimD, kDimHkv, kDimDv };
enum Layout { kLayoutBhnd, kLayoutBnhd };
inline constexpr const char* kLayoutValues[] = {"bhnd", "bnhd"};
inline constexpr TensorSpec kInputs[] = {
    {"query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"coefficients", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{-1, 2, -1, 0}}}}},
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"normalizer", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"grad_output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {5, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"grad_query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"grad_key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"grad_value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {5, 0, -1, 0}}}}},
    {"grad_coefficients", TypeVar::kF, false, -1, -1, -1, 1, {3}, 1, {{0, {}, 1, -1, {{-1, 2, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"causal", AttrType::kBool, 1, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"normalize_qk", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"eps", AttrType::kFloat, 0, 1e-06f, false, true, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"grad_coefficients", AttrType::kBool, 1, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"layout", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kLayoutValues, nullptr, -1, nullptr},
    {"return_state", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, "carried states have no gradient here: train on whole sequences", -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 1}, {RefKind::kSymbol, 4}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "H", "N", "D", "Hkv", "Dv"};
inline constexpr OpSpec kSpec = {"NormalizedLinearAttentionGrad", 1, 7, 4, 6, 1, 6, kInputs, kOutputs, kAttrs, kRules, kSymbols, 4};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace normalized_linear_attention_grad

namespace sample_tokens {
enum Input { kLogits, kTemperature, kTopK, kTopP, kMinP, kSeed, kPosition, kTokenCounts, kCountIndex, kRepetitionPenalty, kPresencePenalty, kFrequencyPenalty, kLogitBias, kAllowedTokens, kActive };
enum Output { kOutTokens, kOutLogprob, kOutTopLogprobs, kOutTopTokens, kOutTokenCountsOut };
enum Attr { kAttrCountTokens, kAttrLogprob, kAttrNumLogprobs };
enum Dim { kDimB, kDimV, kDimP, kDimW, kDimNumLogprobs };
inline constexpr TensorSpec kInputs[] = {
    {"logits", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}}}}},
    {"temperature", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"top_k", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"top_p", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"min_p", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"seed", TypeVar::kL, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"position", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"token_counts", TypeVar::kI, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 8}}, 2, -1, {{2, 0, -1, 0}, {1, 0, -1, 0}}}, {0, {}, 2, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}}}}},
    {"count_index", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"repetition_penalty", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"presence_penalty", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"frequency_penalty", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"logit_bias", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}}}}},
    {"allowed_tokens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{0, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"active", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"tokens", TypeVar::kL, false, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"logprob", TypeVar::kF, false, -1, -1, -1, 1, {1}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"top_logprobs", TypeVar::kF, false, -1, -1, -1, 1, {2}, 1, {{0, {}, 2, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}}}}},
    {"top_tokens", TypeVar::kL, false, -1, -1, -1, 1, {2}, 1, {{0, {}, 2, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}}}}},
    {"token_counts_out", TypeVar::kI, false, -1, 7, -1, 1, {0}, 2, {{1, {{RefKind::kInput, 8}}, 2, -1, {{2, 0, -1, 0}, {1, 0, -1, 0}}}, {0, {}, 2, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"count_tokens", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"logprob", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"num_logprobs", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, 4, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kTogether, {RefKind::kNone, -1}, 3, {{RefKind::kInput, 1}, {RefKind::kInput, 5}, {RefKind::kInput, 6}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 2}, {RefKind::kInput, 1}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 3}, {RefKind::kInput, 1}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 4}, {RefKind::kInput, 1}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 9}, {RefKind::kInput, 7}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 10}, {RefKind::kInput, 7}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 11}, {RefKind::kInput, 7}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 8}, {RefKind::kInput, 7}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 0}, {RefKind::kInput, 7}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "V", "P", "W", "num_logprobs"};
inline constexpr OpSpec kSpec = {"SampleTokens", 1, 15, 5, 3, 9, 5, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace sample_tokens

namespace gated_activation {
enum Input { kGateUp, kUp, kSkip, kSkipScale };
enum Output { kOutOutput };
enum Attr { kAttrActivation, kAttrColumns, kAttrFirstColumn };
enum Dim { kDimB, kDimN, kDimF, kDimW, kDimH };
enum Activation { kActivationSilu, kActivationGelu, kActivationGeluTanh, kActivationRelu, kActivationSigmoid };
inline constexpr const char* kActivationValues[] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid"};
inline constexpr TensorSpec kInputs[] = {
    {"gate_up", TypeVar::kT, false, -1, -1, -1, 0, {}, 3, {{0, {}, 4, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {-1, 2, -1, 0}, {2, 0, -1, 0}}}, {1, {{RefKind::kInput, 1}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}, {2, {{RefKind::kInput, 1}, {RefKind::kAttr, 1}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"up", TypeVar::kT, true, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"skip", TypeVar::kT, true, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"skip_scale", TypeVar::kF, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{4, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"activation", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 5, 5, kActivationValues, nullptr, -1, nullptr},
    {"columns", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"first_column", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kTogether, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 2}, {RefKind::kInput, 3}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 2}, {RefKind::kInput, 1}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 1}, {RefKind::kInput, 1}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 2}, {RefKind::kAttr, 1}}, 0},
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 2}, {RefKind::kSymbol, 4}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "N", "F", "W", "H"};
inline constexpr OpSpec kSpec = {"GatedActivation", 1, 4, 1, 3, 5, 5, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace gated_activation

namespace rms_norm {
enum Input { kInput, kWeight, kAddend, kGate };
enum Output { kOutOutput, kOutSum };
enum Attr { kAttrEpsilon, kAttrGroup, kAttrNormed, kAttrActivation, kAttrGateFirst, kAttrReturnSum, kAttrColumns, kAttrFirstColumn, kAttrGateColumns, kAttrFirstGateColumn };
enum Dim { kDimB, kDimN, kDimF, kDimC, kDimI };
enum Activation { kActivationSilu, kActivationSigmoid };
inline constexpr const char* kActivationValues[] = {"silu", "sigmoid"};
inline constexpr TensorSpec kInputs[] = {
    {"input", TypeVar::kT, false, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kAttr, 6}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"weight", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{3, 0, -1, 0}}}}},
    {"addend", TypeVar::kT, true, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"gate", TypeVar::kT, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kAttr, 8}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {4, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"sum", TypeVar::kT, false, -1, -1, -1, 1, {5}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"epsilon", AttrType::kFloat, 0, 1e-06f, false, true, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"group", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"normed", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"activation", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kActivationValues, nullptr, -1, nullptr},
    {"gate_first", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"return_sum", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"columns", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"first_column", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"gate_columns", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"first_gate_column", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 2}, {RefKind::kAttr, 1}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 5}, {RefKind::kInput, 2}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 4}, {RefKind::kInput, 3}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 7}, {RefKind::kAttr, 6}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 8}, {RefKind::kInput, 3}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 9}, {RefKind::kAttr, 8}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "N", "F", "C", "I"};
inline constexpr OpSpec kSpec = {"RmsNorm", 1, 4, 2, 10, 6, 5, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace rms_norm

namespace block_linear {
enum Input { kInput, kWeight, kScale, kShift, kBias };
enum Output { kOutOutput };
enum Attr { kAttrRoundInput };
enum Dim { kDimB, kDimN, kDimI, kDimO, kDimG };
inline constexpr TensorSpec kInputs[] = {
    {"input", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"weight", TypeVar::kC, false, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{3, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"scale", TypeVar::kS, false, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{3, 0, -1, 0}, {4, 0, -1, 0}}}}},
    {"shift", TypeVar::kS, true, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{3, 0, -1, 0}, {4, 0, -1, 0}}}}},
    {"bias", TypeVar::kT, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{3, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"round_input", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 2}, {RefKind::kSymbol, 4}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "N", "I", "O", "G"};
inline constexpr OpSpec kSpec = {"BlockLinear", 1, 5, 1, 1, 1, 5, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace block_linear

namespace linear {
enum Input { kInput, kWeight, kBias };
enum Output { kOutOutput };
enum Attr { kAttrGated, kAttrActivation, kAttrConstantWeight };
enum Dim { kDimB, kDimN, kDimI, kDimO };
enum Activation { kActivationSilu, kActivationGelu, kActivationGeluTanh, kActivationRelu, kActivationSigmoid };
inline constexpr const char* kActivationValues[] = {"silu", "gelu", "gelu_tanh", "relu", "sigmoid"};
inline constexpr TensorSpec kInputs[] = {
    {"input", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"weight", TypeVar::kT, false, -1, -1, -1, 0, {}, 2, {{0, {}, 2, -1, {{2, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kAttr, 0}}, 3, -1, {{2, 0, -1, 0}, {-1, 2, -1, 0}, {3, 0, -1, 0}}}}},
    {"bias", TypeVar::kT, true, -1, -1, -1, 0, {}, 2, {{0, {}, 1, -1, {{3, 0, -1, 0}}}, {1, {{RefKind::kAttr, 0}}, 2, -1, {{-1, 2, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"gated", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"activation", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 5, 5, kActivationValues, nullptr, -1, nullptr},
    {"constant_weight", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr const RuleSpec* kRules = nullptr;
inline constexpr const char* kSymbols[] = {"B", "N", "I", "O"};
inline constexpr OpSpec kSpec = {"Linear", 1, 3, 1, 3, 0, 4, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace linear

namespace gated_delta_rule {
enum Input { kQuery, kKey, kValue, kLogDecay, kBeta, kInitialState, kCuSeqlens, kStateIndex };
enum Output { kOutOutput, kOutFinalState };
enum Attr { kAttrScale, kAttrNormalizeQk, kAttrReturnState, kAttrLayout, kAttrStateVFirst };
enum Dim { kDimB, kDimHq, kDimN, kDimD, kDimHk, kDimHv, kDimDv, kDimP, kDimQ };
enum Layout { kLayoutBhnd, kLayoutBnhd };
inline constexpr const char* kLayoutValues[] = {"bhnd", "bnhd"};
inline constexpr TensorSpec kInputs[] = {
    {"query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"log_decay", TypeVar::kF, true, -1, -1, -1, 0, {}, 2, {{0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"beta", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"initial_state", TypeVar::kF, true, -1, -1, -1, 0, {}, 6, {{2, {{RefKind::kInput, 7}, {RefKind::kAttr, 4}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {2, {{RefKind::kInput, 6}, {RefKind::kAttr, 4}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 6}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 4}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"cu_seqlens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{8, 1, -1, 0}}}}},
    {"state_index", TypeVar::kI, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 6}}, 1, -1, {{8, 0, -1, 0}}}, {0, {}, 1, -1, {{0, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, 5, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"final_state", TypeVar::kF, false, -1, 5, -1, 1, {2}, 6, {{2, {{RefKind::kInput, 7}, {RefKind::kAttr, 4}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 7}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {2, {{RefKind::kInput, 6}, {RefKind::kAttr, 4}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 6}}, 4, -1, {{8, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 4}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"scale", AttrType::kFloat, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"normalize_qk", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"return_state", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"layout", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kLayoutValues, nullptr, -1, nullptr},
    {"state_v_first", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 5}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 1}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kFixed, {RefKind::kInput, 6}, 1, {{RefKind::kSymbol, 0}}, 1},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 7}, {RefKind::kInput, 5}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "Hq", "N", "D", "Hk", "Hv", "Dv", "P", "Q"};
inline constexpr OpSpec kSpec = {"GatedDeltaRule", 1, 8, 2, 5, 4, 9, kInputs, kOutputs, kAttrs, kRules, kSymbols, 3};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace gated_delta_rule

namespace gated_delta_rule_grad {
enum Input { kQuery, kKey, kValue, kLogDecay, kBeta, kInitialState, kGradOutput, kGradFinalState, kCuSeqlens };
enum Output { kOutGradQuery, kOutGradKey, kOutGradValue, kOutGradBeta, kOutGradLogDecay, kOutGradInitialState };
enum Attr { kAttrScale, kAttrNormalizeQk, kAttrGradDecay, kAttrGradState, kAttrLayout, kAttrStateVFirst };
enum Dim { kDimB, kDimHq, kDimN, kDimD, kDimHk, kDimHv, kDimDv, kDimQ };
enum Layout { kLayoutBhnd, kLayoutBnhd };
inline constexpr const char* kLayoutValues[] = {"bhnd", "bnhd"};
inline constexpr TensorSpec kInputs[] = {
    {"query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"log_decay", TypeVar::kF, true, -1, -1, -1, 0, {}, 2, {{0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"beta", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"initial_state", TypeVar::kF, true, -1, -1, -1, 0, {}, 4, {{2, {{RefKind::kInput, 8}, {RefKind::kAttr, 5}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 8}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 5}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"grad_output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, 5, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"grad_final_state", TypeVar::kF, true, -1, -1, -1, 0, {}, 4, {{2, {{RefKind::kInput, 8}, {RefKind::kAttr, 5}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 8}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 5}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"cu_seqlens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{7, 1, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"grad_query", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"grad_key", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"grad_value", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}, {6, 0, -1, 0}}}}},
    {"grad_beta", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, 1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"grad_log_decay", TypeVar::kF, false, 3, -1, -1, 1, {2}, 0, {}},
    {"grad_initial_state", TypeVar::kF, false, -1, -1, -1, 1, {3}, 4, {{2, {{RefKind::kInput, 8}, {RefKind::kAttr, 5}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 8}}, 4, -1, {{7, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}, {1, {{RefKind::kAttr, 5}}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {6, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 4, -1, {{0, 0, -1, 0}, {5, 0, -1, 0}, {3, 0, -1, 0}, {6, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"scale", AttrType::kFloat, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"normalize_qk", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"grad_decay", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"grad_state", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"layout", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kLayoutValues, nullptr, -1, nullptr},
    {"state_v_first", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 5}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kMultiple, {RefKind::kNone, -1}, 2, {{RefKind::kSymbol, 1}, {RefKind::kSymbol, 4}}, 0},
    {RuleKind::kFixed, {RefKind::kInput, 8}, 1, {{RefKind::kSymbol, 0}}, 1},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 2}, {RefKind::kInput, 3}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "Hq", "N", "D", "Hk", "Hv", "Dv", "Q"};
inline constexpr OpSpec kSpec = {"GatedDeltaRuleGrad", 1, 9, 6, 6, 4, 8, kInputs, kOutputs, kAttrs, kRules, kSymbols, 4};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace gated_delta_rule_grad

namespace causal_conv {
enum Input { kInput, kWeight, kBias, kInitialState, kQueryLens, kCuSeqlens, kStateIndex };
enum Output { kOutOutput, kOutFinalState, kOutOutput2, kOutOutput3 };
enum Attr { kAttrActivation, kAttrReturnState, kAttrColumns, kAttrFirstColumn, kAttrSplit, kAttrFirst, kAttrSecond, kAttrThird };
enum Dim { kDimB, kDimN, kDimW, kDimC, kDimK, kDimP, kDimQ, kDimFirst, kDimSecond, kDimThird };
enum Activation { kActivationNone, kActivationSilu };
inline constexpr const char* kActivationValues[] = {"none", "silu"};
inline constexpr TensorSpec kInputs[] = {
    {"input", TypeVar::kT, false, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kAttr, 2}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"weight", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 2, -1, {{4, 1, -1, 0}, {3, 0, -1, 0}}}}},
    {"bias", TypeVar::kT, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{3, 0, -1, 0}}}}},
    {"initial_state", TypeVar::kF, true, -1, -1, -1, 0, {}, 3, {{1, {{RefKind::kInput, 6}}, 3, -1, {{5, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 5}}, 3, -1, {{6, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"query_lens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
    {"cu_seqlens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{6, 1, -1, 0}}}}},
    {"state_index", TypeVar::kI, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kInput, 5}}, 1, -1, {{6, 0, -1, 0}}}, {0, {}, 1, -1, {{0, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kAttr, 4}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {7, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"final_state", TypeVar::kF, false, -1, 3, -1, 1, {1}, 3, {{1, {{RefKind::kInput, 6}}, 3, -1, {{5, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kInput, 5}}, 3, -1, {{6, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {4, 0, -1, 0}, {3, 0, -1, 0}}}}},
    {"output_2", TypeVar::kT, false, -1, -1, -1, 1, {4}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {8, 0, -1, 0}}}}},
    {"output_3", TypeVar::kT, false, -1, -1, -1, 1, {4}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {9, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"activation", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 2, 2, kActivationValues, nullptr, -1, nullptr},
    {"return_state", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"columns", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"first_column", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"split", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"first", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, 7, nullptr},
    {"second", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, 8, nullptr},
    {"third", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, 9, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kFixed, {RefKind::kInput, 5}, 1, {{RefKind::kSymbol, 0}}, 1},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 6}, {RefKind::kInput, 3}}, 0},
    {RuleKind::kExclusive, {RefKind::kNone, -1}, 2, {{RefKind::kInput, 5}, {RefKind::kInput, 4}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 3}, {RefKind::kAttr, 2}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 5}, {RefKind::kAttr, 4}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 6}, {RefKind::kAttr, 4}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 7}, {RefKind::kAttr, 4}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "N", "W", "C", "K", "P", "Q", "first", "second", "third"};
inline constexpr OpSpec kSpec = {"CausalConv", 1, 7, 4, 8, 7, 10, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace causal_conv

namespace decay_gates {
enum Input { kInput, kRate, kBias, kBetaInput, kQueryLens };
enum Output { kOutLogDecay, kOutStep, kOutBeta };
enum Attr { kAttrPerKey, kAttrStepMin, kAttrStepMax, kAttrBetaScale, kAttrReturnStep, kAttrReturnBeta, kAttrColumns, kAttrFirstColumn, kAttrFirstBetaColumn };
enum Dim { kDimB, kDimN, kDimH, kDimD, kDimF, kDimC };
inline constexpr TensorSpec kInputs[] = {
    {"input", TypeVar::kT, false, -1, -1, -1, 0, {}, 4, {{2, {{RefKind::kAttr, 0}, {RefKind::kAttr, 6}}, 4, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kAttr, 0}}, 4, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {1, {{RefKind::kAttr, 6}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {4, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"rate", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{2, 0, -1, 0}}}}},
    {"bias", TypeVar::kF, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kAttr, 0}}, 2, -1, {{2, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 1, -1, {{2, 0, -1, 0}}}}},
    {"beta_input", TypeVar::kT, true, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kAttr, 6}}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {5, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"query_lens", TypeVar::kI, true, -1, -1, -1, 0, {}, 1, {{0, {}, 1, -1, {{0, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"log_decay", TypeVar::kF, false, -1, -1, -1, 0, {}, 2, {{1, {{RefKind::kAttr, 0}}, 4, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"step", TypeVar::kF, false, -1, -1, -1, 1, {4}, 2, {{1, {{RefKind::kAttr, 0}}, 4, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}, {0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
    {"beta", TypeVar::kF, false, -1, -1, -1, 1, {5}, 1, {{0, {}, 3, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}}}}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"per_key", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"step_min", AttrType::kFloat, 0, 0.0f, false, true, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"step_max", AttrType::kFloat, 0, 0.0f, false, true, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"beta_scale", AttrType::kFloat, 0, 1.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"return_step", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"return_beta", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"columns", AttrType::kBool, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"first_column", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
    {"first_beta_column", AttrType::kInt, 0, 0.0f, true, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr RuleSpec kRules[] = {
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 5}, {RefKind::kInput, 3}}, 0},
    {RuleKind::kExclusive, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 7}, {RefKind::kAttr, 0}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 7}, {RefKind::kAttr, 6}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 8}, {RefKind::kAttr, 6}}, 0},
    {RuleKind::kNeeds, {RefKind::kNone, -1}, 2, {{RefKind::kAttr, 8}, {RefKind::kInput, 3}}, 0},
};
inline constexpr const char* kSymbols[] = {"B", "N", "H", "D", "F", "C"};
inline constexpr OpSpec kSpec = {"DecayGates", 1, 5, 3, 9, 5, 6, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace decay_gates

namespace all_reduce {
enum Input { kInput };
enum Output { kOutOutput };
enum Attr { kAttrCommunicator };
enum Dim { kDimN, kDimB, kDimC, kDimH, kDimW };
inline constexpr TensorSpec kInputs[] = {
    {"input", TypeVar::kT, false, -1, -1, -1, 0, {}, 5, {{0, {}, 1, -1, {{0, 0, -1, 0}}}, {0, {}, 2, -1, {{1, 0, -1, 0}, {0, 0, -1, 0}}}, {0, {}, 3, -1, {{1, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 4, -1, {{1, 0, -1, 0}, {3, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 5, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, 0, -1, -1, 0, {}, 0, {}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"communicator", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, "world"},
};
inline constexpr const RuleSpec* kRules = nullptr;
inline constexpr const char* kSymbols[] = {"N", "B", "C", "H", "W"};
inline constexpr OpSpec kSpec = {"AllReduce", 1, 1, 1, 1, 0, 5, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace all_reduce

namespace all_gather {
enum Input { kInput };
enum Output { kOutOutput };
enum Attr { kAttrCommunicator, kAttrWorld };
enum Dim { kDimN, kDimB, kDimC, kDimH, kDimW };
inline constexpr TensorSpec kInputs[] = {
    {"input", TypeVar::kT, false, -1, -1, -1, 0, {}, 5, {{0, {}, 1, -1, {{0, 0, -1, 0}}}, {0, {}, 2, -1, {{1, 0, -1, 0}, {0, 0, -1, 0}}}, {0, {}, 3, -1, {{1, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 4, -1, {{1, 0, -1, 0}, {3, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}}}, {0, {}, 5, -1, {{4, 0, -1, 0}, {1, 0, -1, 0}, {3, 0, -1, 0}, {0, 0, -1, 0}, {2, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, 0, -1, 1, 0, {}, 0, {}},
};
inline constexpr AttrSpec kAttrs[] = {
    {"communicator", AttrType::kString, 0, 0.0f, false, false, 0.0, 0.0, 0, 0, nullptr, nullptr, -1, "world"},
    {"world", AttrType::kInt, 1, 0.0f, false, true, 0.0, 1.0, 0, 0, nullptr, nullptr, -1, nullptr},
};
inline constexpr const RuleSpec* kRules = nullptr;
inline constexpr const char* kSymbols[] = {"N", "B", "C", "H", "W"};
inline constexpr OpSpec kSpec = {"AllGather", 1, 1, 1, 2, 0, 5, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace all_gather

namespace merge_attention {
enum Input { kPartialOutput, kPartialLse };
enum Output { kOutOutput, kOutLse };
enum Attr {  };
enum Dim { kDimW, kDimB, kDimH, kDimNq, kDimDv };
inline constexpr TensorSpec kInputs[] = {
    {"partial_output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 5, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}, {4, 0, -1, 0}}}}},
    {"partial_lse", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, -1, {{0, 0, -1, 0}, {1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr TensorSpec kOutputs[] = {
    {"output", TypeVar::kT, false, -1, -1, -1, 0, {}, 1, {{0, {}, 4, -1, {{1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}, {4, 0, -1, 0}}}}},
    {"lse", TypeVar::kF, false, -1, -1, -1, 0, {}, 1, {{0, {}, 3, -1, {{1, 0, -1, 0}, {2, 0, -1, 0}, {3, 0, -1, 0}}}}},
};
inline constexpr const AttrSpec* kAttrs = nullptr;
inline constexpr const RuleSpec* kRules = nullptr;
inline constexpr const char* kSymbols[] = {"W", "B", "H", "Nq", "Dv"};
inline constexpr OpSpec kSpec = {"MergeAttention", 1, 2, 2, 0, 0, 5, kInputs, kOutputs, kAttrs, kRules, kSymbols, -1};
extern const OpImpl kImpl;  // defined in the operator's folder
}  // namespace merge_attention

// The registry, in the order of the schema.
inline const Op kOps[] = {
    {&lean_attention::kSpec, &lean_attention::kImpl},
    {&causal_linear_decay::kSpec, &causal_linear_decay::kImpl},
    {&causal_linear_decay_grad::kSpec, &causal_linear_decay_grad::kImpl},
    {&normalized_linear_attention::kSpec, &normalized_linear_attention::kImpl},
    {&normalized_linear_attention_grad::kSpec, &normalized_linear_attention_grad::kImpl},
    {&sample_tokens::kSpec, &sample_tokens::kImpl},
    {&gated_activation::kSpec, &gated_activation::kImpl},
    {&rms_norm::kSpec, &rms_norm::kImpl},
    {&block_linear::kSpec, &block_linear::kImpl},
    {&linear::kSpec, &linear::kImpl},
    {&gated_delta_rule::kSpec, &gated_delta_rule::kImpl},
    {&gated_delta_rule_grad::kSpec, &gated_delta_rule_grad::kImpl},
    {&causal_conv::kSpec, &causal_conv::kImpl},
    {&decay_gates::kSpec, &decay_gates::kImpl},
    {&all_reduce::kSpec, &all_reduce::kImpl},
    {&all_gather::kSpec, &all_gather::kImpl},
    {&merge_attention::kSpec, &merge_attention::kImpl},
};

}  // namespace leanfleet
