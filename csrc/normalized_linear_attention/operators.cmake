include(${CMAKE_CURRENT_SOURCE_DIR}/linear_scan/chunk_scan.cmake)
leanfleet_op(normalized_linear_attention
  CXX ${op_root}/normalized_linear_attention/op.cpp
  CUDA ${op_root}/normalized_linear_attention/kernel.cu
  ONCE ${op_root}/normalized_linear_attention/step.cu)
leanfleet_cpu_kernels(normalized_linear_attention ${op_root}/normalized_linear_attention/cpu_kernel.cpp)
