# Finds the nvcc that compiles kernels for a GPU: the one that KVASIR_NVCC names, the
# one that scripts/setup cuda has installed, or the first in PATH. Reads its version once.
#
# kvasir_find_nvcc() sets in its caller's scope:
#   KVASIR_FOUND_NVCC    the program, or empty
#   KVASIR_WITHOUT_NVCC  the reason if there is none: "nvcc 11.8, want 13.0 or a later 13"

set(KVASIR_CUDA AUTO CACHE STRING
  "Compile kernels with nvcc: ON (fail without nvcc), OFF, or AUTO (if there is a suitable nvcc)")
set(KVASIR_NVCC "" CACHE FILEPATH
  "Path of nvcc; empty: in build/cuda-toolkit (scripts/setup cuda), else on PATH")

function(kvasir_find_nvcc)
  set(KVASIR_FOUND_NVCC "" PARENT_SCOPE)
  if(NOT KVASIR_CUDA STREQUAL "AUTO" AND NOT KVASIR_CUDA)
    set(KVASIR_WITHOUT_NVCC "KVASIR_CUDA is ${KVASIR_CUDA}" PARENT_SCOPE)
    return()
  endif()
  set(nvcc ${KVASIR_NVCC})
  if(NOT nvcc)
    find_program(nvcc_on_path nvcc NO_CACHE
      HINTS ${PROJECT_SOURCE_DIR}/build/cuda-toolkit/nvidia/cu13/bin)
    set(nvcc ${nvcc_on_path})
  endif()
  if(nvcc)
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE said ERROR_QUIET)
    set(why "${nvcc} --version says no release, want 13.0 or a later 13")
    if(said MATCHES "release ([0-9]+)\\.([0-9]+)")
      set(why "nvcc ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}, want 13.0 or a later 13")
      if(CMAKE_MATCH_1 EQUAL 13)
        set(why)
      endif()
    endif()
  else()
    set(why "nvcc is not on PATH; scripts/setup cuda gets it")
  endif()
  if(NOT why)
    set(KVASIR_FOUND_NVCC ${nvcc} PARENT_SCOPE)
  elseif(NOT KVASIR_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "KVASIR_CUDA=${KVASIR_CUDA}: ${why}")
  endif()
  set(KVASIR_WITHOUT_NVCC "${why}" PARENT_SCOPE)
endfunction()
