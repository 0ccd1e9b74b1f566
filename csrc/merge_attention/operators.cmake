leanfleet_op(merge_attention CXX ${op_root}/merge_attention/op.cpp)
