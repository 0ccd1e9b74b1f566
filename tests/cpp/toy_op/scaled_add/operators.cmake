leanfleet_op(scaled_add
  CXX ${op_root}/scaled_add/op.cpp
  CUDA ${op_root}/scaled_add/kernel.cu)
leanfleet_cpu_kernels(scaled_add ${op_root}/scaled_add/cpu_kernel.cpp)
