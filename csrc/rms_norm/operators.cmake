leanfleet_op(rms_norm CXX ${op_root}/rms_norm/op.cpp CUDA ${op_root}/rms_norm/kernel.cu)
leanfleet_cpu_kernels(rms_norm ${op_root}/rms_norm/cpu_kernel.cpp)
