# The functions that declare our targets: one target per concept. The link law below is
# checked when a target is declared, so a forbidden dependency fails to configure.
#
#   kvasir_library(cache_layout SRCS layout.cc HDRS layout.h DEPS base_status)
#   kvasir_test(cache_layout_test SRCS layout_test.cc DEPS cache_layout)
#   kvasir_proto(proto_kv_plan kvasir/v1/kv_plan.proto [GRPC] [DEPS ...])
#
# A target is named <folder>_<concept>. Its folder decides which folders it may link.

# The link law: folder -> folders that it may link (ARCHITECTURE.md, Folders).
set(KVASIR_MAY_LINK_base "base")
set(KVASIR_MAY_LINK_proto "proto;base")
set(KVASIR_MAY_LINK_plan "plan;proto;base")
set(KVASIR_MAY_LINK_kernels "kernels;base")
set(KVASIR_MAY_LINK_cache "cache;plan;proto;base")
set(KVASIR_MAY_LINK_model "model;plan;proto;base")
set(KVASIR_MAY_LINK_worker "worker;model;cache;plan;kernels;proto;base")
set(KVASIR_MAY_LINK_router "router;model_tokenizer;model_file;cache_prefix_hash;proto;base")
set(KVASIR_MAY_LINK_summary "summary;model;cache_layout;plan;proto;base")
set(KVASIR_MAY_LINK_compress
    "compress;summary;model;cache_layout;cache_eviction_schedule;cache_eviction_reference;plan;proto;base")
# kvasir-bench writes random checkpoints with the only part of compress/ without libtorch.
set(KVASIR_MAY_LINK_bench
    "bench;compress_checkpoint_files;worker;router;model;cache;plan;kernels;proto;base")
set(KVASIR_MAY_LINK_server
    "server;summary;worker;router;model;cache;plan;kernels;proto;base")
set(KVASIR_MAY_LINK_tests
    "tests;server;worker;router;model;cache;plan;kernels;proto;base")
set(KVASIR_FOLDERS base proto plan kernels cache model summary worker router compress bench
    server tests)

function(_kvasir_check_layer target)
  string(REGEX MATCH "^[a-z]+" folder "${target}")
  if(NOT folder IN_LIST KVASIR_FOLDERS)
    message(FATAL_ERROR "target ${target}: '${folder}' is no known folder")
  endif()
  foreach(dep IN LISTS ARGN)
    string(REGEX MATCH "^[a-z]+" dep_folder "${dep}")
    if(NOT dep_folder IN_LIST KVASIR_FOLDERS OR NOT dep MATCHES "^[a-z]+_[a-z0-9_]+$"
       OR dep MATCHES "::")
      continue()  # third party
    endif()
    if(KVASIR_ONLY AND NOT dep_folder IN_LIST KVASIR_ONLY)
      message(FATAL_ERROR
        "${target} links ${dep}: add '${dep_folder}' to KVASIR_ONLY")
    endif()
    if(NOT dep_folder IN_LIST KVASIR_MAY_LINK_${folder}
       AND NOT dep IN_LIST KVASIR_MAY_LINK_${folder})
      message(FATAL_ERROR
        "link law: ${target} may not link ${dep} "
        "(${folder} may link: ${KVASIR_MAY_LINK_${folder}})")
    endif()
  endforeach()
endfunction()

add_library(kvasir_options INTERFACE)
target_compile_features(kvasir_options INTERFACE cxx_std_20)
target_include_directories(kvasir_options INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(kvasir_options INTERFACE
  -Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor -Wundef -Werror
  # Designated initializers may leave members at their defaults.
  -Wno-missing-field-initializers
  # The compiler must not fuse multiply-adds by itself: equal bits depend on it.
  -ffp-contract=off
  # clang includes sign changes in -Wconversion and g++ does not. Both use one list.
  "$<$<CXX_COMPILER_ID:Clang>:-Wthread-safety;-Wno-sign-conversion>")

# Declares a static library, or an interface library if it has no sources. Reading
# headers takes two thirds of a file's compile time, so the sources of a library are
# compiled together. Exceptions: kernels/, whose files are compiled once per instruction
# set, and libraries that say APART.
function(kvasir_library target)
  cmake_parse_arguments(A "APART" "" "SRCS;HDRS;DEPS;PRIVATE_DEPS" ${ARGN})
  _kvasir_check_layer(${target} ${A_DEPS} ${A_PRIVATE_DEPS})
  if(A_SRCS)
    add_library(${target} STATIC ${A_SRCS} ${A_HDRS})
    if(KVASIR_UNITY AND NOT A_APART AND NOT target MATCHES "^kernels_")
      set_target_properties(${target} PROPERTIES UNITY_BUILD ON
                            UNITY_BUILD_BATCH_SIZE 8)
    endif()
    # Sanitized tests spend most of their time in these libraries, so they are optimised.
    if(KVASIR_SANITIZE AND target MATCHES "^(base|cache|kernels|model|worker)_")
      target_compile_options(${target} PRIVATE -O1)
    endif()
    # Fuzzers are guided by coverage. Code that they never run is not instrumented.
    if(KVASIR_FUZZ AND (target STREQUAL worker_rank_group OR
       NOT target MATCHES "^(kernels|worker|compress|bench|server)_"))
      target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
    endif()
    target_link_libraries(${target} PUBLIC kvasir_options ${A_DEPS}
                          PRIVATE ${A_PRIVATE_DEPS})
  else()
    add_library(${target} INTERFACE ${A_HDRS})
    target_link_libraries(${target} INTERFACE kvasir_options ${A_DEPS})
  endif()
endfunction()

# Tests run once, so optimising their code takes longer than it saves.
set(KVASIR_TEST_OPTIONS)
if(NOT KVASIR_SANITIZE)
  set(KVASIR_TEST_OPTIONS -O1)
endif()
# Compile options of tests. They must come after -fsanitize. The three checks are made
# at every use of a pointer and take about a sixth of a test's compile time. Libraries
# keep them, except in inline functions whose copy the linker takes from a test.
# AddressSanitizer also reports null pointers.
add_library(kvasir_test_options INTERFACE)
if(KVASIR_SANITIZE MATCHES "undefined")
  target_compile_options(kvasir_test_options INTERFACE
    -fno-sanitize=alignment,null,vptr)
endif()

# Reading gmock's and Abseil's headers takes half of a test's compile time, so all tests
# share one precompiled header. It needs the same flags and macros as the tests, and some
# tests get -pthread from a library. A folder with its own precompiled header sets
# KVASIR_OWN_HEADERS.
function(_kvasir_precompile_test target)
  if(KVASIR_OWN_HEADERS)
    return()
  endif()
  if(NOT TARGET kvasir_test_headers)
    # It is an executable because tests are, too: CMake compiles both with -fPIE.
    file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/gen/test_headers.cc CONTENT "")
    add_executable(kvasir_test_headers EXCLUDE_FROM_ALL
      ${PROJECT_BINARY_DIR}/gen/test_headers.cc)
    target_link_libraries(kvasir_test_headers PRIVATE kvasir_options
      kvasir_test_options GTest::gmock_main absl::status absl::statusor absl::time)
    target_precompile_headers(kvasir_test_headers PRIVATE
      <string> <vector> <gmock/gmock.h> <gtest/gtest.h>
      <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/time/time.h>)
    target_compile_options(kvasir_test_headers PRIVATE -pthread
      ${KVASIR_TEST_OPTIONS})
  endif()
  # If a macro differs nevertheless, the compiler reads the headers instead.
  target_compile_options(${target} PRIVATE -pthread -Wno-error=invalid-pch)
  target_precompile_headers(${target} REUSE_FROM kvasir_test_headers)
endfunction()

# Registers a gtest program with ctest. LABELS is "unit" by default; others are scenario,
# process, golden, gpu and bench. A label for its folder ("in-router") is added.
# THREADS marks a test of code with several threads: ThreadSanitizer runs only these, and
# of their cases only those that TSAN_FILTER selects. If a test has many similar cases
# that all run without sanitizers as well, SANITIZED_SHARDS 4 makes a sanitized build run
# every fourth of them; scripts/soak runs them all. TIMEOUT is in seconds.
function(kvasir_test target)
  cmake_parse_arguments(A "THREADS" "TIMEOUT;TSAN_FILTER;SANITIZED_SHARDS"
    "SRCS;DEPS;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT KVASIR_BUILD_TESTS)
    return()
  endif()
  if(A_SANITIZED_SHARDS AND KVASIR_SANITIZE)
    list(APPEND A_ENVIRONMENT GTEST_TOTAL_SHARDS=${A_SANITIZED_SHARDS} GTEST_SHARD_INDEX=0)
  endif()
  _kvasir_check_layer(${target} ${A_DEPS})
  add_executable(${target} ${A_SRCS})
  target_link_libraries(${target} PRIVATE kvasir_options kvasir_test_options ${A_DEPS}
                        GTest::gmock GTest::gtest_main)
  target_compile_options(${target} PRIVATE ${KVASIR_TEST_OPTIONS})
  _kvasir_precompile_test(${target})
  if(NOT A_LABELS)
    set(A_LABELS unit)
  endif()
  string(REGEX MATCH "^[a-z]+" folder ${target})
  list(APPEND A_LABELS "in-${folder}")
  if(A_THREADS)
    list(APPEND A_LABELS threads)
  endif()
  # Tests that may take longest start first, so that no core waits for them at the end.
  set(cost)
  if(A_TIMEOUT)
    set(cost COST ${A_TIMEOUT})
  else()
    set(A_TIMEOUT 120)
  endif()
  set(filter)
  if(A_TSAN_FILTER AND KVASIR_SANITIZE MATCHES thread)
    set(filter --gtest_filter=${A_TSAN_FILTER})
  endif()
  add_test(NAME ${target} COMMAND ${target} ${filter})
  set_tests_properties(${target} PROPERTIES LABELS "${A_LABELS}"
    TIMEOUT ${A_TIMEOUT} ${cost}
    ENVIRONMENT "KVASIR_SOURCE_DIR=${PROJECT_SOURCE_DIR};${A_ENVIRONMENT}")
  if(filter)
    set_tests_properties(${target} PROPERTIES
      FAIL_REGULAR_EXPRESSION "Running 0 tests")
  endif()
endfunction()

# Registers tests a second time as <test>_<AS> with the label <AS> and with additional
# variables in their environment.
function(kvasir_run_again)
  cmake_parse_arguments(A "" "AS" "ENVIRONMENT" ${ARGN})
  if(NOT KVASIR_BUILD_TESTS)
    return()
  endif()
  foreach(test IN LISTS A_UNPARSED_ARGUMENTS)
    get_test_property(${test} LABELS labels)
    get_test_property(${test} TIMEOUT timeout)
    add_test(NAME ${test}_${A_AS} COMMAND ${test})
    set_tests_properties(${test}_${A_AS} PROPERTIES LABELS "${labels};${A_AS}"
      TIMEOUT ${timeout} COST ${timeout}
      ENVIRONMENT "KVASIR_SOURCE_DIR=${PROJECT_SOURCE_DIR};${A_ENVIRONMENT}"
      # scripts/test passes a folder for results. The name keeps both runs apart.
      ENVIRONMENT_MODIFICATION "GTEST_OUTPUT=string_append:${test}_${A_AS}.xml")
  endforeach()
endfunction()

# Declares test support that several tests link, compiled with the options of tests.
function(kvasir_test_library target)
  if(NOT KVASIR_BUILD_TESTS)
    return()
  endif()
  kvasir_library(${target} ${ARGN})
  target_compile_options(${target} PRIVATE ${KVASIR_TEST_OPTIONS})
  target_link_libraries(${target} PUBLIC GTest::gmock)
endfunction()

function(kvasir_executable target)
  cmake_parse_arguments(A "" "OUTPUT" "SRCS;DEPS" ${ARGN})
  _kvasir_check_layer(${target} ${A_DEPS})
  add_executable(${target} ${A_SRCS})
  if(KVASIR_UNITY)
    # Small batches, so that two cores have work.
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON
                          UNITY_BUILD_BATCH_SIZE 5)
  endif()
  target_link_libraries(${target} PRIVATE kvasir_options ${A_DEPS})
  if(A_OUTPUT)
    set_target_properties(${target} PROPERTIES OUTPUT_NAME ${A_OUTPUT}
      RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  endif()
endfunction()

# Declares a fuzz target that also runs as a test for SECONDS (5 by default), beginning
# with the inputs in SEEDS. scripts/soak runs it longer.
set(KVASIR_FUZZ_SECONDS "" CACHE STRING "Seconds of each fuzz target, instead of its own")
function(kvasir_fuzz target)
  cmake_parse_arguments(A "" "SECONDS" "SRCS;DEPS;SEEDS" ${ARGN})
  if(NOT KVASIR_FUZZ)
    return()
  endif()
  add_executable(${target} ${A_SRCS})
  target_link_libraries(${target} PRIVATE kvasir_options ${A_DEPS})
  target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  target_link_options(${target} PRIVATE -fsanitize=fuzzer)
  if(NOT TARGET fuzz_targets)
    add_custom_target(fuzz_targets)
  endif()
  add_dependencies(fuzz_targets ${target})
  set(corpus ${CMAKE_CURRENT_BINARY_DIR}/${target}_corpus)
  file(MAKE_DIRECTORY ${corpus})
  if(KVASIR_BUILD_TESTS)
    if(KVASIR_FUZZ_SECONDS)
      set(A_SECONDS ${KVASIR_FUZZ_SECONDS})
    elseif(NOT A_SECONDS)
      set(A_SECONDS 5)
    endif()
    math(EXPR timeout "${A_SECONDS} + 60")
    add_test(NAME ${target} COMMAND ${target} -max_total_time=${A_SECONDS}
      -rss_limit_mb=1024 -timeout=10 ${corpus} ${A_SEEDS})
    set_tests_properties(${target} PROPERTIES LABELS fuzz TIMEOUT ${timeout}
      COST ${A_SECONDS})
  endif()
endfunction()

# Generates C++ from one .proto below proto/ into the build tree. Include the result as
# "proto/kvasir/v1/kv_plan.pb.h". Our warnings are off for generated code.
function(kvasir_proto target file)
  cmake_parse_arguments(A "GRPC" "" "DEPS" ${ARGN})
  _kvasir_check_layer(${target} ${A_DEPS})
  set(gen ${PROJECT_BINARY_DIR}/gen)
  string(REGEX REPLACE "\\.proto$" "" stem "proto/${file}")
  set(out ${gen}/${stem}.pb.cc ${gen}/${stem}.pb.h)
  set(plugin)
  if(A_GRPC)
    list(APPEND out ${gen}/${stem}.grpc.pb.cc ${gen}/${stem}.grpc.pb.h)
    set(plugin --grpc_out=${gen}
        --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin>)
  endif()
  add_custom_command(OUTPUT ${out}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${gen}
    COMMAND protobuf::protoc -I ${PROJECT_SOURCE_DIR} --cpp_out=${gen} ${plugin}
            ${PROJECT_SOURCE_DIR}/proto/${file}
    DEPENDS ${PROJECT_SOURCE_DIR}/proto/${file} VERBATIM)
  add_library(${target} STATIC ${out})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} SYSTEM PUBLIC ${gen})
  target_link_libraries(${target} PUBLIC protobuf::libprotobuf ${A_DEPS})
  if(A_GRPC)
    target_link_libraries(${target} PUBLIC gRPC::grpc++)
  endif()
endfunction()
