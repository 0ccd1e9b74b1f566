// The host's part of rows.cuh: when its kernels serve a call, and how it is cut.
#include "causal_linear_decay/rows.h"

#include "causal_linear_decay/rows.cuh"
#include "core/with_type.cuh"

namespace leanfleet::causal_linear_decay {

namespace {

using rows::RowsPlan;

RowsPlan plan_of(const Args& args, int sm_count) {
  const RecurrenceSplit split = recurrence_split(shape_of(args.in, sm_count));
  RowsPlan plan = {};
  plan.column_blocks = static_cast<int>(ceil_div(args.in.value_width, split.columns));
  plan.segments = split.segments;
  return plan;
}

}  // namespace

bool rows_fit(const Args& args) {
  const Inputs& in = args.in;
  return !args.normalize && in.key_width <= kRecurrenceMaxKeyWidth && in.requests * in.heads > 0 &&
         !(args.carries_state && in.heads > in.v_heads);
}

int launch_rows(const Args& args, const CudaTarget& target, Workspace& ws) {
  const Inputs& in = args.in;
  RowsPlan plan = plan_of(args, target.sm_count);
  const int64_t slots = plan.segments > 1 ? in.requests * in.v_heads * plan.segments : 0;
  plan.slots = ws.scratch<float>(slots * in.key_width * in.value_width);
  plan.decays = ws.scratch<float>(slots);
  if (ws.counting()) return cudaSuccess;
  const auto stream = static_cast<cudaStream_t>(target.stream);
  return with_type(in.dtype, [&](auto type) { return rows::launch_typed<decltype(type)>(args, plan, stream); });
}

}  // namespace leanfleet::causal_linear_decay
