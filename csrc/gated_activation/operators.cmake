leanfleet_op(gated_activation CXX ${op_root}/gated_activation/op.cpp CUDA ${op_root}/gated_activation/kernel.cu)
leanfleet_cpu_kernels(gated_activation ${op_root}/gated_activation/cpu_kernel.cpp)
