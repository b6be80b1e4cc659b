#include "worker/ranks/nccl/nccl_address.h"

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "worker/ranks/nccl/nccl_library.h"
#include "worker/testing/nccl_ranks.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

nccl::UniqueId TestId() {
  nccl::UniqueId id;
  for (size_t i = 0; i < sizeof(id.bytes); ++i) {
    id.bytes[i] = static_cast<char>(7 * i);
  }
  return id;
}

NcclAddress Address(int64_t rank, int64_t size, int version = 22809) {
  NcclAddress address = {.shard = {rank, size}, .version = version};
  if (rank == 0) address.id = TestId();
  return address;
}

std::vector<std::string> Addresses(int64_t size) {
  std::vector<std::string> addresses;
  for (int64_t rank = 0; rank < size; ++rank) {
    addresses.push_back(FormatNcclAddress(Address(rank, size)));
  }
  return addresses;
}

TEST(NcclAddressTest, EachRankReadsTheNcclIdFromTheAddressesOfAllRanks) {
  EXPECT_EQ(FormatNcclAddress(Address(1, 3)), "kvasir-nccl-1 1 3 22809 -");
  for (int64_t rank = 0; rank < 3; ++rank) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const nccl::UniqueId id,
        ReadNcclAddresses(Address(rank, 3), Addresses(3)));
    EXPECT_EQ(std::memcmp(id.bytes, TestId().bytes, sizeof(id.bytes)), 0);
  }
}

TEST(NcclAddressTest, InvalidAddressesAreRefusedWithoutShowingTheId) {
  const std::string good = FormatNcclAddress(Address(0, 2));
  const std::string id = good.substr(good.size() - 256);
  const auto refused = [&](const std::string& text, const char* why) {
    EXPECT_THAT(ParseNcclAddress(text).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(why), Not(HasSubstr(id.substr(9))))))
        << text;
  };
  KVASIR_EXPECT_OK(ParseNcclAddress(good));
  refused("", "does not begin with kvasir-nccl-1");
  refused("kvasir-gloo-1 0 2 3 4", "does not begin with kvasir-nccl-1");
  refused("kvasir-nccl-1", "want a rank, the number of ranks");
  refused(absl::StrCat(good, " 1"), "want a rank, the number of ranks");
  refused(absl::StrCat("kvasir-nccl-1 x 2 22809 ", id),
          "want a rank, the number of ranks");
  refused(absl::StrCat("kvasir-nccl-1 0 y 22809 ", id),
          "want a rank, the number of ranks");
  refused(absl::StrCat("kvasir-nccl-1 0 2 z ", id),
          "want a rank, the number of ranks");
  refused("kvasir-nccl-1 2 2 22809 -", "says rank 2 of 2;");
  refused("kvasir-nccl-1 -1 2 22809 -", "says rank -1 of 2;");
  refused("kvasir-nccl-1 1 257 22809 -", "says rank 1 of 257;");
  refused("kvasir-nccl-1 0 2 22809 -",
          "rank 0 must have an id, and every other rank");
  refused(absl::StrCat("kvasir-nccl-1 1 2 22809 ", id),
          "rank 0 must have an id, and every other rank");
  refused(good.substr(0, good.size() - 1),
          "the id is not 256 lowercase hex digits");
  refused(absl::StrCat("kvasir-nccl-1 0 2 22809 ", id.substr(1), "G"),
          "the id is not 256 lowercase hex digits");
  refused(std::string(2000, 'a'), "is 2000 bytes long");
}

TEST(NcclAddressTest,
     TheErrorForAnAddressOfAnotherGroupOrNcclVersionNamesItsRank) {
  const auto refused = [](std::vector<std::string> addresses, const char* why) {
    EXPECT_THAT(ReadNcclAddresses(Address(0, 3), addresses).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)));
  };
  refused(Addresses(2),
          "the addresses of 2 ranks were given, but the group has 3 ranks");
  std::vector<std::string> wrong = Addresses(3);
  std::swap(wrong[1], wrong[2]);
  refused(wrong,
          "address of rank 1: belongs to rank 2 of 3, not to rank 1 of 3");
  wrong = Addresses(3);
  wrong[2] = FormatNcclAddress(Address(2, 4));
  refused(wrong,
          "address of rank 2: belongs to rank 2 of 4, not to rank 2 of 3");
  wrong[2] = FormatNcclAddress(Address(2, 3, 22803));
  refused(wrong,
          "address of rank 2: says that it has NCCL 2.28.3, this rank has "
          "2.28.9");
  wrong[2] = "no address";
  refused(wrong, "address of rank 2: does not begin");
}

TEST(NcclLibraryTest, TheErrorForAMissingLibraryNamesEveryFileThatWasTried) {
  EXPECT_THAT(
      Nccl::Open({"libnone.so.2", "/none/libnone.so", "libm.so.6"}).status(),
      StatusIs(
          absl::StatusCode::kNotFound,
          AllOf(HasSubstr("libnone.so.2: cannot open"),
                HasSubstr("/none/libnone.so: cannot open"),
                HasSubstr("libm.so.6: has no ncclGetVersion"),
                HasSubstr("Install libnccl2"), HasSubstr("LD_LIBRARY_PATH"))));
}

TEST(NcclLibraryTest, TheErrorForAnOldLibraryStatesItsVersion) {
  setenv("KVASIR_FAKE_NCCL_VERSION", "21799", 1);
  EXPECT_THAT(Nccl::Open(FakeNcclLibraries()).status(),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("is NCCL 2.17.99, want 2.18.0 or later")));
  setenv("KVASIR_FAKE_NCCL_VERSION", "2708", 1);
  EXPECT_THAT(Nccl::Open(FakeNcclLibraries()).status(),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("is NCCL 2.7.8, want 2.18.0 or later")));
  unsetenv("KVASIR_FAKE_NCCL_VERSION");
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto library,
                              Nccl::Open(FakeNcclLibraries()));
  EXPECT_EQ(library->version(), 22809);
}

}  // namespace
}  // namespace kvasir::worker
