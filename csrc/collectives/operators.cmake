leanfleet_op(collectives CXX ${op_root}/collectives/op.cpp ONCE ${op_root}/collectives/kernel.cu)
leanfleet_cpu_kernels(collectives ${op_root}/collectives/cpu_kernel.cpp)
