# leanfleet_cuda_architectures(<requested> <nvcc version> <result>): LEANFLEET_CUDA_ARCHS as CMAKE_CUDA_ARCHITECTURES.
#
# A number alone asks for machine code, and 80 alone for PTX as well; -real and -virtual ask for one of the two. From 9.0
# on the kernels use instructions that only the architecture-specific targets have (90a, 100a, 120a), whose code and PTX
# run on GPUs of exactly that number. The PTX of 80 runs on every GPU from 8.0 on.
function(leanfleet_cuda_architectures requested nvcc_version result)
  string(REGEX REPLACE "[ ,;]+" ";" requested "${requested}")
  set(architectures "")
  foreach(entry IN LISTS requested)
    if(NOT entry MATCHES "^(80|86|89|(90|100|120)a?)(-real|-virtual)?$")
      message(FATAL_ERROR "leanfleet: LEANFLEET_CUDA_ARCHS has '${entry}'; it takes 80, 86, 89, 90a, 100 and 120, each "
              "alone or with -real (machine code) or -virtual (PTX). Other GPUs from 8.0 on run the PTX of 80-virtual.")
    endif()
    set(kind "${CMAKE_MATCH_3}")
    string(REGEX MATCH "^[0-9]+" number ${entry})
    if(number GREATER_EQUAL 100 AND nvcc_version VERSION_LESS 12.8)
      message(FATAL_ERROR "leanfleet: LEANFLEET_CUDA_ARCHS has '${entry}', which needs nvcc 12.8 or later; found "
              "${nvcc_version}. Take a later one (LEANFLEET_NVCC), or leave '${entry}' out.")
    endif()
    if(number GREATER_EQUAL 90)
      string(APPEND number "a")
    endif()
    if(NOT kind AND NOT number STREQUAL "80")
      set(kind "-real")
    endif()
    list(APPEND architectures "${number}${kind}")
  endforeach()
  if(NOT architectures)
    message(FATAL_ERROR "leanfleet: LEANFLEET_CUDA_ARCHS is empty; it takes a list such as '90a;80-virtual'.")
  endif()
  list(REMOVE_DUPLICATES architectures)
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()
