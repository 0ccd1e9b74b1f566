leanfleet_instances(lean_attention_instances ${op_root}/lean_attention/mma_launch.cu.in WIDTH=64,128,256)
leanfleet_instances(lean_attention_hopper ${op_root}/lean_attention/wgmma_launch.cu.in TYPE=__half,__nv_bfloat16)
leanfleet_instances(lean_attention_instances ${op_root}/lean_attention/direct_launch.cu.in TYPE=__half,__nv_bfloat16 WIDTH=64,128,256 BLOCKS=1)
leanfleet_instances(lean_attention_instances ${op_root}/lean_attention/direct_launch.cu.in TYPE=__half,__nv_bfloat16 WIDTH=64,128 BLOCKS=2)
leanfleet_instances(lean_attention_instances ${op_root}/lean_attention/direct_narrow_launch.cu.in WIDTH=64,128,256 BLOCKS=1)
leanfleet_instances(lean_attention_instances ${op_root}/lean_attention/direct_narrow_launch.cu.in WIDTH=64,128 BLOCKS=2)
leanfleet_instances(lean_attention_instances ${op_root}/lean_attention/one_segment_launch.cu.in TYPE=__half,__nv_bfloat16)
leanfleet_instances(lean_attention_instances ${op_root}/lean_attention/one_segment_narrow_launch.cu.in WIDTH=64,128,256)
leanfleet_op(lean_attention
  CXX ${op_root}/lean_attention/op.cpp
  CUDA ${op_root}/lean_attention/kernel.cu ${op_root}/lean_attention/rotate.cu ${op_root}/lean_attention/merge.cu
    ${op_root}/lean_attention/narrow.cu ${op_root}/lean_attention/append_narrow.cu ${lean_attention_instances}
  HOPPER ${lean_attention_hopper})
leanfleet_cpu_kernels(lean_attention ${op_root}/lean_attention/cpu_kernel.cpp)
