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

# leanfleet_hopper_architectures(<architectures> <result>): what files are compiled for whose kernels run on 9.0 alone. Without
# 9.0 among the architectures that is the first, since the launches are linked all the same.
function(leanfleet_hopper_architectures architectures result)
  set(of_hopper ${architectures})
  list(FILTER of_hopper INCLUDE REGEX "^90a")
  if(NOT of_hopper)
    list(GET architectures 0 of_hopper)
  endif()
  set(${result} "${of_hopper}" PARENT_SCOPE)
endfunction()

# leanfleet_once_architectures(<architectures> <result> <options>): the same for files that ask for no architecture, as
# architectures and compiler options. Machine code of 9.0 is made of the PTX of 8.0, if that is compiled anyway: it is the same
# code, and compiling to PTX takes half of the time. Of bfloat16, which has instructions of its own from 9.0 on, such files may
# only convert: that takes no more instructions in 8.0's way.
function(leanfleet_once_architectures architectures result options)
  set(others ${architectures})
  list(FILTER others EXCLUDE REGEX "^(80|80-virtual|90a-real)$")
  set(code compute_80 sm_90)
  if("80" IN_LIST architectures)
    list(APPEND code sm_80)
  elseif(NOT "80-virtual" IN_LIST architectures)
    set(code "")
  endif()
  if(code AND "90a-real" IN_LIST architectures)
    list(JOIN code "," code)
    set(${options} "--generate-code=arch=compute_80,code=[${code}]" PARENT_SCOPE)
    if(NOT others)
      set(others OFF)
    endif()
  else()
    set(${options} "" PARENT_SCOPE)
    set(others "${architectures}")
  endif()
  set(${result} "${others}" PARENT_SCOPE)
endfunction()
