leanfleet_op(normalized_linear_attention CXX ${op_root}/normalized_linear_attention/op.cpp)
leanfleet_cpu_kernels(normalized_linear_attention ${op_root}/normalized_linear_attention/cpu_kernel.cpp)
