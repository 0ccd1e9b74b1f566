# The chunked scans of core/chunk_scan.h, included by the folders of the operators that use them.
if(LEANFLEET_HAS_CUDA AND NOT TARGET chunk_scan)
  set(chunk_scan_root ${CMAKE_CURRENT_LIST_DIR})
  leanfleet_op(chunk_scan CUDA ${chunk_scan_root}/chunk_scan.cu ${chunk_scan_root}/chunk_scan_float16.cu
    ${chunk_scan_root}/chunk_scan_bfloat16.cu ${chunk_scan_root}/chunk_scan_float32.cu)
endif()
