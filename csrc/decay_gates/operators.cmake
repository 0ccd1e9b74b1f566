leanfleet_op(decay_gates CXX ${op_root}/decay_gates/op.cpp CUDA ${op_root}/decay_gates/kernel.cu)
leanfleet_cpu_kernels(decay_gates ${op_root}/decay_gates/cpu_kernel.cpp)
