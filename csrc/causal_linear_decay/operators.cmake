leanfleet_op(causal_linear_decay CXX ${op_root}/causal_linear_decay/op.cpp)
leanfleet_cpu_kernels(causal_linear_decay ${op_root}/causal_linear_decay/cpu_kernel.cpp)
