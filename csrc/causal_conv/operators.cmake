leanfleet_op(causal_conv CXX ${op_root}/causal_conv/op.cpp CUDA ${op_root}/causal_conv/kernel.cu)
leanfleet_cpu_kernels(causal_conv ${op_root}/causal_conv/cpu_kernel.cpp)
