// Compares NVIDIA's nccl.h with our declarations, and loads NVIDIA's library if
// it is installed. No GPU is needed.
#include <nccl.h>

#include <cstddef>
#include <string>
#include <type_traits>

#include "base/status_matchers.h"
#include "worker/ranks/nccl/nccl_group.h"
#include "worker/ranks/nccl/nccl_library.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

// Whether functions take values of the two types in the same way: both types
// are pointers, or both are numbers or structs of the same size.
template <typename Ours, typename Theirs>
constexpr bool kSamePassed =
    sizeof(Ours) == sizeof(Theirs) &&
    std::is_pointer_v<Ours> ==
        std::is_pointer_v<Theirs>&& std::is_class_v<Ours> ==
        std::is_class_v<Theirs>;
template <typename Ours, typename Theirs>
constexpr bool kSameFunction = false;
template <typename R, typename... A, typename S, typename... B>
constexpr bool kSameFunction<R (*)(A...), S (*)(B...)> = [] {
  if constexpr (sizeof...(A) == sizeof...(B)) {
    return kSamePassed<R, S> && (kSamePassed<A, B> && ...);
  }
  return false;
}();

#define KVASIR_SAME(name)                                      \
  static_assert(kSameFunction<decltype(nccl::Functions::name), \
                              std::decay_t<decltype(::name)>>)
KVASIR_SAME(ncclGetVersion);
KVASIR_SAME(ncclGetErrorString);
KVASIR_SAME(ncclGetLastError);
KVASIR_SAME(ncclGetUniqueId);
KVASIR_SAME(ncclCommInitRankConfig);
KVASIR_SAME(ncclCommGetAsyncError);
KVASIR_SAME(ncclCommFinalize);
KVASIR_SAME(ncclCommDestroy);
KVASIR_SAME(ncclCommAbort);
KVASIR_SAME(ncclAllReduce);
KVASIR_SAME(ncclAllGather);
KVASIR_SAME(ncclBroadcast);
#undef KVASIR_SAME
static_assert(!kSameFunction<decltype(nccl::Functions::ncclAllGather),
                             decltype(&::ncclAllReduce)>);

constexpr bool Is(auto ours, auto theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(Is(nccl::Result::kOk, ncclSuccess));
static_assert(Is(nccl::Result::kUnhandledCudaError, ncclUnhandledCudaError));
static_assert(Is(nccl::Result::kSystemError, ncclSystemError));
static_assert(Is(nccl::Result::kInternalError, ncclInternalError));
static_assert(Is(nccl::Result::kInvalidArgument, ncclInvalidArgument));
static_assert(Is(nccl::Result::kInvalidUsage, ncclInvalidUsage));
static_assert(Is(nccl::Result::kRemoteError, ncclRemoteError));
static_assert(Is(nccl::Result::kInProgress, ncclInProgress));
static_assert(Is(nccl::DataType::kUint8, ncclUint8));
static_assert(Is(nccl::DataType::kFloat16, ncclFloat16));
static_assert(Is(nccl::DataType::kFloat32, ncclFloat32));
static_assert(Is(nccl::DataType::kBfloat16, ncclBfloat16));
static_assert(Is(nccl::RedOp::kSum, ncclSum));
static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId));
static_assert(nccl::kLeastVersion == NCCL_VERSION(2, 18, 0));

#define KVASIR_SAME(ours, theirs)                     \
  static_assert(offsetof(nccl::Config, ours) ==       \
                    offsetof(ncclConfig_t, theirs) && \
                sizeof(nccl::Config::ours) == sizeof(ncclConfig_t::theirs))
KVASIR_SAME(size, size);
KVASIR_SAME(magic, magic);
KVASIR_SAME(version, version);
KVASIR_SAME(blocking, blocking);
KVASIR_SAME(cga_cluster_size, cgaClusterSize);
KVASIR_SAME(min_ctas, minCTAs);
KVASIR_SAME(max_ctas, maxCTAs);
KVASIR_SAME(net_name, netName);
KVASIR_SAME(split_share, splitShare);
#undef KVASIR_SAME

TEST(NcclHeaderTest, OurDefaultNcclConfigEqualsThatOfNvidiasHeader) {
  const nccl::Config ours;
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.version, static_cast<unsigned>(nccl::kLeastVersion));
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.cga_cluster_size, theirs.cgaClusterSize);
  EXPECT_EQ(ours.min_ctas, theirs.minCTAs);
  EXPECT_EQ(ours.max_ctas, theirs.maxCTAs);
  EXPECT_EQ(ours.net_name, theirs.netName);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
}

TEST(NcclHeaderTest, TheNcclLibraryOfNvidiaCanBeOpenedAndReportsItsVersion) {
  const auto library = Nccl::Open(Nccl::DefaultFiles());
  if (!library.ok()) GTEST_SKIP() << library.status();
  std::printf("NCCL %s\n", NcclVersionName((*library)->version()).c_str());
  EXPECT_GE((*library)->version(), nccl::kLeastVersion);
  EXPECT_THAT(
      (*library)->Error("NCCL: a call", nccl::Result::kRemoteError),
      StatusIs(absl::StatusCode::kUnavailable,
               HasSubstr("NCCL: a call: remote process exited or there was a "
                         "network error (6)")));
}

// Nothing more of the library can be tested without a GPU.
TEST(NcclHeaderTest, TheNcclLibraryOfNvidiaReportsThatThereIsNoGpu) {
  const auto library = Nccl::Open(Nccl::DefaultFiles());
  if (!library.ok()) GTEST_SKIP() << library.status();
  auto group = NcclGroup::Begin({.shard = {0, 1}, .interface = "lo"});
  if (!group.ok()) GTEST_SKIP() << group.status();
  auto connected = std::move(**group).Connect({(*group)->address()});
  if (connected.ok()) GTEST_SKIP() << "this host has a GPU";
  std::printf("%s\n", connected.status().ToString().c_str());
  EXPECT_THAT(connected.status(),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("NCCL: ncclCommInitRankConfig: unhandled cuda "
                                 "error")));
}

}  // namespace
}  // namespace kvasir::worker
