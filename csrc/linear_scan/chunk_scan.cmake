# The chunked scans of chunk_scan.h here, included by the folders of the operators that use them.
if(LEANFLEET_HAS_CUDA AND NOT TARGET chunk_scan)
  set(chunk_scan_root ${CMAKE_CURRENT_LIST_DIR})
  leanfleet_instances(chunk_scan_instances ${chunk_scan_root}/chunk_scan_launch.cu.in TYPE=float,__half,__nv_bfloat16)
  leanfleet_instances(chunk_scan_hopper ${chunk_scan_root}/chunk_scan_hopper_launch.cu.in
    TYPE=__half,__nv_bfloat16 WIDTH=64,128)
  leanfleet_instances(chunk_scan_hopper ${chunk_scan_root}/chunk_scan_hopper_float32_launch.cu.in WIDTH=64,128)
  leanfleet_op(chunk_scan
    CUDA ${chunk_scan_root}/chunk_scan.cu ${chunk_scan_root}/row_sums.cu
    HOPPER ${chunk_scan_hopper}
    ONCE ${chunk_scan_instances})
endif()
