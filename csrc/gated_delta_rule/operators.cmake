# ONCE: mixed-precision products and conversions alone, for which the PTX of 8.0 does for 9.0 too. Steps wait for the launch before.
leanfleet_op(gated_delta_rule
  CXX ${op_root}/gated_delta_rule/op.cpp
  CUDA ${op_root}/gated_delta_rule/steps.cu
  HOPPER ${op_root}/gated_delta_rule/prepare.cu ${op_root}/gated_delta_rule/prepare_keys.cu
         ${op_root}/gated_delta_rule/prepare_steep_keys.cu ${op_root}/gated_delta_rule/states.cu
  ONCE ${op_root}/gated_delta_rule/recurrence.cu ${op_root}/gated_delta_rule/chunked.cu ${op_root}/gated_delta_rule/float_chunks.cu
       ${op_root}/gated_delta_rule/grad.cu ${op_root}/gated_delta_rule/grad_chunks.cu
       ${op_root}/gated_delta_rule/grad_key_chunks.cu)
leanfleet_cpu_kernels(gated_delta_rule ${op_root}/gated_delta_rule/cpu_kernel.cpp)
