#include "kernels/latents/latent_tables.h"

#include <gmock/gmock.h>

#include <memory>
#include <vector>

#include "kernels/device/read_back.h"
#include "kernels/testing/op_test_util.h"
#include "kernels/testing/strict_device.h"

namespace kvasir::kernels {
namespace {

template <typename T>
std::vector<T> Get(Stream& stream, const T* device, int64_t count) {
  std::vector<T> host(static_cast<size_t>(count));
  KVASIR_EXPECT_OK(ReadBack(stream, host.data(), DevicePtr<const T>(device),
                            host.size() * sizeof(T)));
  return host;
}

// The part has a group with two runs, one with no run (its latents are not
// quantized) and one with one run.
TEST(LatentTablesTest, GroupsAndTheirRunsAreCopiedToTheDevice) {
  base::ThreadPool pool(1);
  const std::unique_ptr<Device> device = MakeStrictDevice(&pool);
  const std::unique_ptr<Stream> stream = device->MakeStream();
  std::vector<CodeRun> first = {{0, 5, 4}, {5, 3, 2}};
  std::vector<CodeRun> last = {{0, 9, 8}};
  std::vector<LatentGroup> groups(3);
  groups[0] = {8, 0, {16, 4, 0}, {80, 8, 0}, first.data(), 2};
  groups[1] = {6, 8, {144, 12, 0}, {}, nullptr, 0};
  groups[2] = {9, 14, {400, 16, 16}, {}, last.data(), 1};
  LatentPart part;
  part.page_bytes = 777;
  part.groups = groups.data();
  part.num_groups = 3;
  part.num_levels = 2;
  DeviceTables tables(device.get());
  const auto moved = AddLatentTables(part, &tables);
  KVASIR_ASSERT_OK(moved.status());
  // The result must not need the host's tables, so they are overwritten.
  const auto want = groups;
  const auto want_first = first;
  const auto want_last = last;
  first.assign(2, {});
  last.assign(1, {});
  groups.assign(3, {});

  EXPECT_EQ(moved->page_bytes, 777);
  EXPECT_EQ(moved->num_groups, 3);
  EXPECT_EQ(moved->num_levels, 2);
  const auto got = Get(*stream, moved->groups, 3);
  const auto same_region = [](const TileRegion& a, const TileRegion& b) {
    return a.offset_bytes == b.offset_bytes &&
           a.stride_bytes == b.stride_bytes &&
           a.granule_bytes == b.granule_bytes;
  };
  for (size_t g = 0; g < 3; ++g) {
    EXPECT_EQ(got[g].width, want[g].width);
    EXPECT_EQ(got[g].column, want[g].column);
    EXPECT_EQ(got[g].num_runs, want[g].num_runs);
    EXPECT_TRUE(same_region(got[g].codes, want[g].codes)) << g;
    EXPECT_TRUE(same_region(got[g].params, want[g].params)) << g;
  }
  const auto expect_runs = [&](size_t g, const std::vector<CodeRun>& runs) {
    const auto on_device = Get(*stream, got[g].runs, got[g].num_runs);
    ASSERT_EQ(on_device.size(), runs.size());
    for (size_t r = 0; r < runs.size(); ++r) {
      EXPECT_EQ(on_device[r].begin, runs[r].begin);
      EXPECT_EQ(on_device[r].width, runs[r].width);
      EXPECT_EQ(on_device[r].bits, runs[r].bits);
    }
  };
  expect_runs(0, want_first);
  expect_runs(2, want_last);
}

TEST(LatentTablesTest, PreparingTablesFailsIfDeviceMemoryDoesNotSuffice) {
  base::ThreadPool pool(1);
  CpuDevice device(&pool, CpuBackend::kReference, 64);
  std::vector<LatentGroup> groups(9);
  LatentPart part;
  part.groups = groups.data();
  part.num_groups = 9;
  DeviceTables tables(&device);
  EXPECT_THAT(AddLatentTables(part, &tables).status(),
              base::StatusIs(absl::StatusCode::kResourceExhausted,
                             ::testing::HasSubstr(
                                 "0 of the limit of 64 bytes are in use")));
}

}  // namespace
}  // namespace kvasir::kernels
