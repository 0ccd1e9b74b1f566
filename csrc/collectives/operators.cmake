leanfleet_op(collectives CXX ${op_root}/collectives/op.cpp)
