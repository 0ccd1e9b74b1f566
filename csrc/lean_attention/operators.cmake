leanfleet_op(lean_attention
  CXX ${op_root}/lean_attention/op.cpp
  CUDA ${op_root}/lean_attention/kernel.cu ${op_root}/lean_attention/mma_float16.cu
       ${op_root}/lean_attention/mma_bfloat16.cu ${op_root}/lean_attention/wgmma_float16.cu
       ${op_root}/lean_attention/wgmma_bfloat16.cu ${op_root}/lean_attention/direct_float16.cu
       ${op_root}/lean_attention/direct_bfloat16.cu ${op_root}/lean_attention/rotate.cu)
leanfleet_cpu_kernels(lean_attention ${op_root}/lean_attention/cpu_kernel.cpp)
