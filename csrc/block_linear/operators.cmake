leanfleet_op(block_linear CXX ${op_root}/block_linear/op.cpp CUDA ${op_root}/block_linear/kernel.cu ${op_root}/block_linear/panels.cu)
leanfleet_cpu_kernels(block_linear ${op_root}/block_linear/cpu_kernel.cpp)
