// Shape binding: what the sizes of a call's inputs say about the symbols of its schema, and the sizes of axes that follow
// from the symbols. One template serves sizes that are numbers (op.cpp), numbers or names (ort/shape_inference.cpp) and
// expressions of TensorRT (trt/plugin.cpp).
//
// A kind of sizes is a class with
//   Size                                the type of a size
//   int rank(int input)                 of an input, -1: absent or not known
//   Size size(int input, int index)     of an axis of an input, in numbers, of which an element of uint8 has two
//   Size symbol(int symbol)             the value bound so far
//   bool known(Size)                    whether a value can be calculated with
//   Size constant(int64_t)
//   Size moved(Size, int64_t offset)    size + offset
//   Size sum(Size, int64_t times, Size) size + times x other
//   Size divided(Size, int64_t times)   size / times
//   Size larger(Size, Size)             the larger of two
//   Status wrong_rank(int input)        the schema has no shape of this rank
//   Status bind(const Axis&, int symbol, Size value)
//                                       the axis says that the symbol has this value; symbol -1: the axis tells none,
//                                       and value, its size less the one it should have, should be 0
#pragma once

#include <type_traits>

#include "core/op.h"

namespace leanfleet {

// Axis `index` of an input.
struct Axis {
  int input, index;
  const ShapeSpec* shape;
  AxisSpec spec;
};

// Calls visit(axis), which returns a Status, for every axis of every input whose rank the schema knows.
template <class Sizes, class Visit>
Status for_each_axis(const OpSpec& spec, Given given, bool bnhd, Sizes&& sizes, Visit&& visit) {
  for (int i = 0; i < spec.num_inputs; ++i) {
    const int rank = sizes.rank(i);
    if (rank < 0) continue;
    const ShapeSpec* const shape = choose_shape(spec.inputs[i], given, rank);
    if (shape == nullptr) {
      LEANFLEET_RETURN_IF_ERROR(sizes.wrong_rank(i));
      continue;
    }
    for (int k = 0; k < rank; ++k) LEANFLEET_RETURN_IF_ERROR(visit(Axis{i, k, shape, axis_at(*shape, k, bnhd)}));
  }
  return {};
}

// Axes of one symbol come first: an axis that is the sum of two tells the first, given the second, or the second where
// only the first is known. One that is the larger of two is checked against them.
template <class Sizes>
Status bind_symbols(const OpSpec& spec, Given given, bool bnhd, Sizes&& sizes) {
  LEANFLEET_RETURN_IF_ERROR(for_each_axis(spec, given, bnhd, sizes, [&](const Axis& axis) -> Status {
    if (axis.spec.plus >= 0) return {};
    return sizes.bind(axis, axis.spec.symbol, sizes.moved(sizes.size(axis.input, axis.index), -axis.spec.offset));
  }));
  return for_each_axis(spec, given, bnhd, sizes, [&](const Axis& axis) -> Status {
    const auto [symbol, offset, plus, times] = axis.spec;
    if (plus < 0) return {};
    const auto size = sizes.moved(sizes.size(axis.input, axis.index), -offset);
    if (times == 0) {
      if (!sizes.known(sizes.symbol(symbol)) || !sizes.known(sizes.symbol(plus))) return {};
      return sizes.bind(axis, -1, sizes.sum(size, -1, sizes.larger(sizes.symbol(symbol), sizes.symbol(plus))));
    }
    if (sizes.known(sizes.symbol(plus))) return sizes.bind(axis, symbol, sizes.sum(size, -times, sizes.symbol(plus)));
    if (!sizes.known(sizes.symbol(symbol))) return {};
    return sizes.bind(axis, plus, sizes.divided(sizes.sum(size, -1, sizes.symbol(symbol)), times));
  });
}

// Calls set(symbol, size) for the symbols that have the value of an attribute.
template <class Set>
void for_each_attr_size(const OpSpec& spec, const AttrValue* attrs, Set&& set) {
  for (int i = 0; i < spec.num_attrs; ++i)
    if (spec.attrs[i].symbol >= 0) set(spec.attrs[i].symbol, attrs[i].i);
}

// The size of an axis once its symbols are bound.
template <class Sizes>
typename std::decay_t<Sizes>::Size axis_size(AxisSpec axis, Sizes&& sizes) {
  if (axis.symbol < 0) return sizes.constant(axis.offset);
  const auto size = sizes.moved(sizes.symbol(axis.symbol), axis.offset);
  if (axis.plus < 0) return size;
  if (axis.times == 0) return sizes.larger(size, sizes.symbol(axis.plus));
  return sizes.sum(size, axis.times, sizes.symbol(axis.plus));
}

// Sizes that are numbers, those of `inputs`; symbols below 0 are not known. Who binds symbols adds bind().
struct NumberSizes {
  using Size = int64_t;
  const Tensor* inputs;
  const int64_t* symbols;

  int rank(int input) const { return inputs[input].rank; }
  int64_t numbers_each(int input, int index) const {
    return index == inputs[input].rank - 1 ? leanfleet::numbers_each(inputs[input].dtype) : 1;
  }
  int64_t size(int input, int index) const { return inputs[input].shape[index] * numbers_each(input, index); }
  int64_t symbol(int symbol) const { return symbols[symbol]; }
  static bool known(int64_t size) { return size >= 0; }
  static int64_t constant(int64_t value) { return value; }
  static int64_t moved(int64_t size, int64_t offset) { return size + offset; }
  static int64_t sum(int64_t size, int64_t times, int64_t other) { return size + times * other; }
  static int64_t divided(int64_t size, int64_t times) { return size / times; }
  static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  static Status wrong_rank(int /*input*/) { return {}; }
};

}  // namespace leanfleet
