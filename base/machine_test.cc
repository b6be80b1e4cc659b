#include "base/machine.h"

#include <filesystem>
#include <string>

#include "base/temp_folder.h"
#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

// Test fixture: a temporary root folder for the files that the limits are
// read from.
class MachineTest : public ::testing::Test {
 protected:
  MachineTest() {
    Write("proc/meminfo",
          "MemTotal:       16000000 kB\nMemFree: 1 kB\n"
          "MemAvailable:    8000000 kB\n");
  }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(
        std::filesystem::path(root_.File(path)).parent_path());
    root_.Write(path, text);
  }
  MachineLimits Read(int affinity) {
    return ReadMachineLimitsAt(root_.path(), affinity);
  }

  const TempFolder root_;
};

TEST_F(MachineTest, WithoutCgroupsTheProcessMayUseTheWholeMachine) {
  const MachineLimits limits = Read(6);
  EXPECT_EQ(limits.cpus, 6);
  EXPECT_EQ(limits.memory_bytes, int64_t{16000000} * 1024);
  EXPECT_EQ(limits.available_bytes, int64_t{8000000} * 1024);
}

TEST_F(MachineTest, LimitsOfACgroupV2AndOfItsParentsApply) {
  Write("proc/self/cgroup", "0::/pods/a\n");
  Write("sys/fs/cgroup/pods/a/cpu.max", "max 100000\n");
  Write("sys/fs/cgroup/pods/cpu.max", "250000 100000\n");
  Write("sys/fs/cgroup/pods/a/memory.max", "2147483648\n");
  Write("sys/fs/cgroup/pods/a/memory.current", "1073741824\n");
  Write("sys/fs/cgroup/pods/memory.max", "max\n");
  const MachineLimits limits = Read(8);
  EXPECT_EQ(limits.cpus, 2);
  EXPECT_EQ(limits.memory_bytes, int64_t{2} << 30);
  EXPECT_EQ(limits.available_bytes, int64_t{1} << 30);
}

TEST_F(MachineTest, CgroupV1ControllersLimitCpusAndMemory) {
  Write("proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x\n");
  Write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "50000\n");
  Write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n");
  Write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1048576\n");
  Write("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "2097152\n");
  const MachineLimits limits = Read(8);
  EXPECT_EQ(limits.cpus, 1);  // a quota of half a CPU still allows one thread
  EXPECT_EQ(limits.memory_bytes, 1 << 20);
  EXPECT_EQ(limits.available_bytes, 0);
}

TEST_F(MachineTest, InactiveFilePagesOfACgroupV2CountAsAvailableMemory) {
  Write("proc/self/cgroup", "0::/a\n");
  Write("sys/fs/cgroup/a/memory.max", "1000000\n");
  Write("sys/fs/cgroup/a/memory.current", "900000\n");
  Write("sys/fs/cgroup/a/memory.stat",
        "anon 100000\nfile 800000\nactive_file 100000\n"
        "inactive_file 700000\n");
  EXPECT_EQ(Read(1).available_bytes, 800000);
}

TEST_F(MachineTest, InactiveFilePagesOfACgroupV1CountAsAvailableMemory) {
  Write("proc/self/cgroup", "5:memory:/x\n");
  Write("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "1000000\n");
  Write("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "900000\n");
  Write("sys/fs/cgroup/memory/x/memory.stat",
        "inactive_file 5\ntotal_inactive_file 700000\n");
  EXPECT_EQ(Read(1).available_bytes, 800000);
}

TEST_F(MachineTest, InactiveFilePagesNeverRaiseAvailableMemoryAboveTheLimit) {
  Write("proc/self/cgroup", "0::/a\n");
  Write("sys/fs/cgroup/a/memory.max", "1000\n");
  Write("sys/fs/cgroup/a/memory.current", "900\n");
  Write("sys/fs/cgroup/a/memory.stat", "inactive_file 5000\n");
  EXPECT_EQ(Read(1).available_bytes, 1000);
}

TEST_F(MachineTest, ACpuQuotaAboveTheAffinityMaskDoesNotRaiseTheCpuCount) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/cpu.max", "800000 100000\n");
  EXPECT_EQ(Read(2).cpus, 2);
}

TEST_F(MachineTest, CgroupFilesThatCannotBeParsedSetNoLimit) {
  Write("proc/self/cgroup", "0::/\nnonsense\n::::\n");
  Write("sys/fs/cgroup/cpu.max", "many\n");
  Write("sys/fs/cgroup/memory.max", "-1\n");
  EXPECT_EQ(Read(3).cpus, 3);
  EXPECT_EQ(Read(3).memory_bytes, int64_t{16000000} * 1024);
}

TEST(MachineNowTest, ReportsTheCpusAndTheMemoryOfThisProcess) {
  EXPECT_GE(ReadMachineLimits().cpus, 1);
  EXPECT_GT(ReadMachineLimits().memory_bytes, 0);
  const ResidentMemory before = ReadResidentMemory();
  EXPECT_GT(before.bytes, 0);
  std::string touched(64 << 20, 'x');
  EXPECT_GE(ReadResidentMemory().bytes, before.bytes + (60 << 20));
  EXPECT_NE(touched[touched.size() / 2], 'y');
}

}  // namespace
}  // namespace kvasir::base
