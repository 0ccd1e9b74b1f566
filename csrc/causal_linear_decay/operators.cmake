include(${CMAKE_CURRENT_SOURCE_DIR}/linear_scan/chunk_scan.cmake)
leanfleet_instances(decay_rows ${op_root}/causal_linear_decay/rows_launch.cu.in TYPE=float,__half,__nv_bfloat16)
leanfleet_op(causal_linear_decay
  CXX ${op_root}/causal_linear_decay/op.cpp
  CUDA ${op_root}/causal_linear_decay/rows.cu ${op_root}/causal_linear_decay/lightning.cu ${op_root}/causal_linear_decay/grad.cu
       ${op_root}/causal_linear_decay/decode.cu
  ONCE ${op_root}/causal_linear_decay/recurrence.cu
       ${op_root}/causal_linear_decay/plain_states.cu ${op_root}/causal_linear_decay/without_rule.cu
       ${decay_rows})
leanfleet_cpu_kernels(causal_linear_decay ${op_root}/causal_linear_decay/cpu_kernel.cpp)
