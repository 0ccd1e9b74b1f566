leanfleet_op(merge_attention CXX ${op_root}/merge_attention/op.cpp ONCE ${op_root}/merge_attention/kernel.cu)
leanfleet_cpu_kernels(merge_attention ${op_root}/merge_attention/cpu_kernel.cpp)
