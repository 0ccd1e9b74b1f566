leanfleet_op(gated_delta_rule CXX ${op_root}/gated_delta_rule/op.cpp CUDA ${op_root}/gated_delta_rule/recurrence.cu ${op_root}/gated_delta_rule/chunked.cu)
leanfleet_cpu_kernels(gated_delta_rule ${op_root}/gated_delta_rule/cpu_kernel.cpp)
