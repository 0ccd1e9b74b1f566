leanfleet_op(linear
  CXX ${op_root}/linear/op.cpp
  CUDA ${op_root}/linear/plain.cu
  HOPPER ${op_root}/linear/few_rows.cu)
leanfleet_cpu_kernels(linear ${op_root}/linear/cpu_kernel.cpp)
