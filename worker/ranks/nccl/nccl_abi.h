// Our own declarations of the part of NCCL's C interface that we use, so that
// the build does not need nccl.h. If the header is installed,
// nccl_header_test.cc compares it with these declarations.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

namespace kvasir::worker::nccl {

// Same values as NCCL's ncclResult_t.
enum class Result : int {
  kOk = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
enum class DataType : int {
  kUint8 = 1,
  kFloat16 = 6,
  kFloat32 = 7,
  kBfloat16 = 9,
};
enum class RedOp : int { kSum = 0 };

struct UniqueId {
  char bytes[128] = {};
};

using CommHandle = struct CommTag*;

// NCCL's ncclConfig_t as of release kLeastVersion. Later releases append
// members; they recognize this shorter struct by its `size` and `version`.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = INT_MIN;  // here and below: INT_MIN or null lets NCCL choose
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// The oldest release that we accept, as 10000 * major + 100 * minor + patch. It
// is the first with all members of Config.
inline constexpr int kLeastVersion = 21800;

// The functions that we load from the library. A `stream` parameter is a
// cudaStream_t.
struct Functions {
  Result (*ncclGetVersion)(int* version) = nullptr;
  const char* (*ncclGetErrorString)(Result result) = nullptr;
  const char* (*ncclGetLastError)(CommHandle comm) = nullptr;
  Result (*ncclGetUniqueId)(UniqueId* id) = nullptr;
  Result (*ncclCommInitRankConfig)(CommHandle* comm, int size, UniqueId id,
                                   int rank, Config* config) = nullptr;
  Result (*ncclCommGetAsyncError)(CommHandle comm, Result* error) = nullptr;
  Result (*ncclCommFinalize)(CommHandle comm) = nullptr;
  Result (*ncclCommDestroy)(CommHandle comm) = nullptr;
  Result (*ncclCommAbort)(CommHandle comm) = nullptr;
  Result (*ncclAllReduce)(const void* from, void* to, size_t count,
                          DataType type, RedOp op, CommHandle comm,
                          void* stream) = nullptr;
  Result (*ncclAllGather)(const void* from, void* to, size_t count_of_rank,
                          DataType type, CommHandle comm,
                          void* stream) = nullptr;
  Result (*ncclBroadcast)(const void* from, void* to, size_t count,
                          DataType type, int root, CommHandle comm,
                          void* stream) = nullptr;
};

// Calls visit(name, function) for each member of Functions.
template <typename F, typename Visit>
void ForFunctions(F& functions, const Visit& visit) {
#define KVASIR_VISIT(function) visit(#function, functions.function)
  KVASIR_VISIT(ncclGetVersion);
  KVASIR_VISIT(ncclGetErrorString);
  KVASIR_VISIT(ncclGetLastError);
  KVASIR_VISIT(ncclGetUniqueId);
  KVASIR_VISIT(ncclCommInitRankConfig);
  KVASIR_VISIT(ncclCommGetAsyncError);
  KVASIR_VISIT(ncclCommFinalize);
  KVASIR_VISIT(ncclCommDestroy);
  KVASIR_VISIT(ncclCommAbort);
  KVASIR_VISIT(ncclAllReduce);
  KVASIR_VISIT(ncclAllGather);
  KVASIR_VISIT(ncclBroadcast);
#undef KVASIR_VISIT
}

}  // namespace kvasir::worker::nccl
