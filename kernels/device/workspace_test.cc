#include "kernels/device/workspace.h"

#include <gmock/gmock.h>

#include <vector>

#include "base/status_matchers.h"

namespace kvasir::kernels {
namespace {

using ::testing::HasSubstr;

// Takes memory in nested scopes, like an op that calls another op.
void Use(Workspace& workspace) {
  Workspace::Scope scope(&workspace);
  workspace.Take<float>(100);
  for (int64_t count : {1000, 10}) {
    Workspace::Scope inner(&workspace);
    workspace.Take<char>(count);
  }
}

TEST(WorkspaceTest, ACountingWorkspaceReportsTheBytesThatARealWorkspaceNeeds) {
  Workspace counter = Workspace::Counting();
  Use(counter);
  EXPECT_EQ(448u + 1024u, counter.peak_bytes());
  std::vector<char> memory(counter.peak_bytes() + Workspace::kAlignmentBytes);
  Workspace workspace(DevicePtr<char>(memory.data() + 1), memory.size() - 1);
  Use(workspace);
  KVASIR_EXPECT_OK(workspace.status());
  EXPECT_EQ(counter.peak_bytes(), workspace.peak_bytes());
}

TEST(WorkspaceTest, AllocationsAreAlignedAndDoNotOverlap) {
  std::vector<char> memory(1024);
  Workspace workspace(DevicePtr<char>(memory.data() + 3), memory.size() - 3);
  char* first = workspace.Take<char>(1).device_address();
  char* second = workspace.Take<char>(1).device_address();
  EXPECT_EQ(0u, reinterpret_cast<uintptr_t>(first) % 64);
  EXPECT_EQ(64, second - first);
}

TEST(WorkspaceTest, TheErrorOfAFullWorkspaceNamesTheSizesAndStays) {
  alignas(64) char memory[256];
  Workspace workspace(DevicePtr<char>(memory), sizeof(memory));
  EXPECT_TRUE(workspace.Take<char>(128));
  EXPECT_FALSE(workspace.Take<char>(129));
  EXPECT_FALSE(workspace.Take<char>(1));
  EXPECT_THAT(
      workspace.status(),
      base::StatusIs(
          absl::StatusCode::kResourceExhausted,
          HasSubstr(
              "192 bytes are needed, but only 128 of 256 bytes are free")));
}

TEST(WorkspaceTest, SizesThatOverflowAreRefused) {
  Workspace counter = Workspace::Counting();
  counter.Take<double>(int64_t{1} << 61);
  EXPECT_THAT(
      counter.status(),
      base::StatusIs(
          absl::StatusCode::kInvalidArgument,
          HasSubstr("elements of 8 bytes must be 0 to 1152921504606846975, but "
                    "is 2305843009213693952")));
}

}  // namespace
}  // namespace kvasir::kernels
