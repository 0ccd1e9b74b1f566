leanfleet_op(sample_tokens CXX ${op_root}/sample_tokens/op.cpp CUDA ${op_root}/sample_tokens/kernel.cu)
leanfleet_cpu_kernels(sample_tokens ${op_root}/sample_tokens/cpu_kernel.cpp)
# Weights have the same bits everywhere: no multiplication may be merged with an addition.
set_source_files_properties(${op_root}/sample_tokens/cpu_kernel.cpp ${op_root}/sample_tokens/op.cpp
  PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
