// Tests that the emulator finds the faults of the kernels in faulty_kernels.h,
// and reports nothing for correct kernels.
#include "kernels/emulation/emulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <unistd.h>

#include <cstdlib>
#include <numeric>

#include "kernels/emulation/testing/emulated_ops.h"
#include "kernels/emulation/testing/faulty_kernels.h"
#include "kernels/emulation/testing/left_out.h"

namespace kvasir::kernels::emulation {
namespace {

using emulated::FaultyArgs;
using emulated::Planted;

constexpr uint64_t kSeeds = 8;

// Runs a kernel that should copy 64 words; returns true if all of them were
// copied.
bool Arrives(EmulatedTest& test, Planted planted,
             void (*launch)(const FaultyArgs&,
                            Launcher&) = &emulated::LaunchFaulty) {
  std::vector<uint32_t> words(64);
  std::iota(words.begin(), words.end(), 1000);
  const DeviceBuffer in = test.Put(words);
  const DeviceBuffer out = test.Put(std::vector<uint32_t>(64, 0));
  const DeviceBuffer flag = test.Put(std::vector<uint32_t>(1, 0));
  launch(
      {in.as<uint32_t>().device_address(), out.as<uint32_t>().device_address(),
       flag.as<uint32_t>().device_address(), planted},
      test.launcher());
  return test.Get<uint32_t>(out) == words;
}

TEST(EmulatorTest, NoFaultIsReportedForACorrectKernel) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EmulatedTest test(seed);
    EXPECT_TRUE(Arrives(test, Planted::kNone));
    EXPECT_TRUE(Arrives(test, Planted::kOwnPartials));
    EXPECT_TRUE(Arrives(test, Planted::kNone, &emulated::LaunchFenced));
  }
  EXPECT_EQ(Judge([] {
              EmulatedTest test;
              return Arrives(test, Planted::kNone) &&
                     Arrives(test, Planted::kNone, &emulated::LaunchFenced);
            }),
            Verdict::kRight);
}

// Runs the kernel with several seeds and returns the first verdict that is not
// kRight.
Verdict Found(Planted planted) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const Verdict verdict = Judge([&] {
      EmulatedTest test(seed);
      return Arrives(test, planted);
    });
    if (verdict != Verdict::kRight) return verdict;
  }
  return Verdict::kRight;
}

TEST(EmulatorTest, AMissingBarrierCausesWrongResultsOrAReportedRace) {
  for (const Planted planted :
       {Planted::kMissingBarrier, Planted::kMissingWarpBarrier}) {
    EXPECT_EQ(Found(planted),
              kThreadSanitizer ? Verdict::kRace : Verdict::kWrong);
  }
  // A thread's own copy cannot be a race. If the thread reads the destination
  // before the copy has arrived, it reads poison.
  EXPECT_EQ(Found(Planted::kLateWait), Verdict::kWrong);
}

// This fault shows only if one warp runs far ahead of the others, which happens
// with even seeds.
TEST(EmulatorTest, AWarpThatOverwritesDataBeforeItIsReadIsDetected) {
  EXPECT_EQ(Found(Planted::kReusedPartial),
            kThreadSanitizer ? Verdict::kRace : Verdict::kWrong);
}

// Each thread polls 6000 times without a change of any value, but at changing
// addresses.
TEST(EmulatorTest, PollingOfChangingAddressesIsNotReportedAsADeadlock) {
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    EmulatedTest test(seed);
    EXPECT_TRUE(Arrives(test, Planted::kManyLooks));
  }
}

TEST(EmulatorTest, LoadOnceMayReadBytesNextToBytesThatTheLaunchStored) {
  EmulatedTest test;
  EXPECT_FALSE(Arrives(test, Planted::kLoadOnceBesideStored));
}

// Only ThreadSanitizer finds these faults: the emulator executes accesses in
// program order, so they cannot give wrong numbers.
TEST(EmulatorTest, AMissingOrWrongFenceIsReportedAsARace) {
  const Verdict expected = kThreadSanitizer ? Verdict::kRace : Verdict::kRight;
  for (const Planted planted :
       {Planted::kMissingFence, Planted::kMissingReaderFence,
        Planted::kFenceOfCta, Planted::kFenceBeforeTheWrite}) {
    EXPECT_EQ(Found(planted), expected) << static_cast<int>(planted);
  }
}

class EmulatorDeathTest : public ::testing::Test {
 protected:
  void ExpectDeath(Planted planted, const char* text) {
    EXPECT_DEATH(
        {
          EmulatedTest test;
          (void)Arrives(test, planted);
        },
        text);
  }
};

TEST_F(EmulatorDeathTest,
       InvalidBarriersInvalidShufflesAndDeadlocksAreReported) {
  ExpectDeath(Planted::kDivergentBarrier,
              "kernel faulty, CTA .0, 0., thread .*SyncCta at "
              "faulty_kernels.cu:.*divergent: other threads wait in SyncCta");
  ExpectDeath(Planted::kEndedThread,
              "kernel faulty: deadlock(.|\n)*63 threads from 0 on wait in "
              "SyncCta at faulty_kernels.cu(.|\n)*1 threads from 5 on have "
              "ended");
  ExpectDeath(Planted::kDivergentShuffle,
              "divergent: other threads wait in Shuffle");
  ExpectDeath(Planted::kStrangeMask, "is not in the mask ffff0000");
  ExpectDeath(Planted::kShuffleTooFar, "ShuffleXor .*32 lanes away");
  ExpectDeath(Planted::kHalfWarps,
              "SyncBarrier .*of warp [01] only 16 lanes have arrived");
  ExpectDeath(Planted::kTwiceAtABarrier,
              "ArriveBarrier .*barrier 1: the thread arrives again");
  ExpectDeath(Planted::kStuckPoll,
              "deadlock: threads poll for changes(.|\n)*LoadAtomic "
              "at faulty_kernels.cu");
  ExpectDeath(Planted::kStuckPolls, "deadlock: threads poll for changes");
}

TEST_F(EmulatorDeathTest, AnAsyncCopyThatIsNeverWaitedForIsReported) {
  for (const Planted planted :
       {Planted::kMissingWait, Planted::kMissingCommit}) {
    ExpectDeath(planted,
                "ended with 1 copies that it never waited for, the first from "
                "faulty_kernels.cu");
  }
}

TEST_F(EmulatorDeathTest, ALoadOnceOfDataThatTheLaunchStoredIsReported) {
  ExpectDeath(Planted::kLoadOnceOfStored,
              "LoadOnce at faulty_kernels.cu.*this launch has stored to ");
}

TEST_F(EmulatorDeathTest, AccessesOutOfBoundsAreReported) {
  ExpectDeath(Planted::kSharedLoadOutOfBounds,
              "thread 63, LoadShared .*byte 256 of shared memory, of which the "
              "CTA has 256 bytes");
  ExpectDeath(Planted::kSharedOutOfBounds,
              "thread 63.*byte 256 of 256 bytes of shared memory");
  ExpectDeath(Planted::kSharedBefore,
              "byte -[1-4] of 256 bytes of shared memory was");
  ExpectDeath(Planted::kGlobalLoadOutOfBounds,
              "thread 63, LoadGlobal .*byte 256 of an allocation of 256");
  ExpectDeath(Planted::kGlobalOutOfBounds,
              "thread 63.* is not in the device's memory");
  ExpectDeath(Planted::kHostMemory, "is not in the device's memory");
}

TEST_F(EmulatorDeathTest,
       StackOverflowsMisalignedAccessesAndTooNarrowScopesAreReported) {
  ExpectDeath(Planted::kMisalignedLoad, "LoadGlobal .*misaligned.*16 bytes");
  ExpectDeath(Planted::kMisalignedCopy, "CopyAsync .*misaligned.*16 bytes");
  ExpectDeath(Planted::kScopeTooNarrow, "AtomicAdd .*the scope of its CTA");
  ExpectDeath(Planted::kDeepStack, "stack is full");
}

TEST_F(EmulatorDeathTest, LaunchesThatNoGpuAcceptsAreRefused) {
  const auto launch = [](KernelLaunch shape) {
    EmulatorOptions options;
    options.multiprocessors = 2;
    Emulator emulator(options);
    shape.name = "toy";
    emulator.Run(shape);
  };
  EXPECT_DEATH(launch({.threads = 48}),
               "toy: threads of a CTA: 48, but must be a multiple of 32");
  EXPECT_DEATH(launch({.threads = 2048}), "toy: threads of a CTA: 2048");
  EXPECT_DEATH(
      launch({.threads = 32, .shared_bytes = (163u << 10) + 1}),
      "toy: bytes of shared memory: 166913, but must be at most 166912");
  EXPECT_DEATH(launch({.grid_x = 3, .threads = 32, .ctas_together = true}),
               "toy: CTAs that wait for each other: 3, but must be at most 2");
}

TEST(EmulatorTest, ListsTheSynchronizingLinesOfAKernel) {
  EmulatedTest test;
  EXPECT_TRUE(Arrives(test, Planted::kNone));
  std::vector<std::string> kinds;
  for (const SyncSite& site : test.emulator().SyncSites("faulty")) {
    EXPECT_EQ(site.file, "faulty_kernels.cu");
    EXPECT_EQ(site.passes, 64);
    kinds.push_back(site.kind);
  }
  EXPECT_THAT(kinds, ::testing::UnorderedElementsAre(
                         "SyncCta", "SyncCta", "SyncWarp", "SyncCta",
                         "CommitCopies", "WaitCopies"));
  EXPECT_TRUE(test.emulator().SyncSites("another").empty());
}

TEST(EmulatorTest, AKernelThatDoesNotWaitForItsCopiesIsStopped) {
  SyncSite wait;
  {
    EmulatedTest test;
    EXPECT_TRUE(Arrives(test, Planted::kNone));
    for (const SyncSite& site : test.emulator().SyncSites("faulty")) {
      if (site.kind == "WaitCopies") wait = site;
    }
  }
  EXPECT_EQ(Judge([&] {
              EmulatedTest test;
              test.emulator().LeaveOut("faulty", wait);
              return Arrives(test, Planted::kNone);
            }),
            Verdict::kStopped);
}

TEST(EmulatorTest, AChildProcessThatDiesForAnUnexpectedReasonFailsTheTest) {
  EXPECT_NONFATAL_FAILURE(
      EXPECT_EQ(Judge([]() -> bool { _exit(1); }), Verdict::kRight),
      "the child ended with status");
  EXPECT_NONFATAL_FAILURE(
      EXPECT_EQ(Judge([]() -> bool { std::abort(); }), Verdict::kRight),
      "the child ended with status");
}

TEST(EmulatorTest, AChildProcessThatDoesNotEndIsKilledAndJudgedEndless) {
  const Verdict verdict = Judge(
      [] {
        for (volatile bool on = true; on;) {
        }
        return true;
      },
      /*most_seconds=*/1);
  EXPECT_STREQ(VerdictName(verdict), "endless");
}

TEST(EmulatorTest, CountsGlobalMemorySectorsAndSharedMemoryPasses) {
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  EXPECT_TRUE(Arrives(test, Planted::kNone));
  int64_t shared_loads = 0;
  for (const AccessCount& count : test.emulator().Accesses("faulty")) {
    if (count.kind == "shared load") {
      ++shared_loads;
      EXPECT_EQ(count.requests, 2);  // one request per warp
      EXPECT_EQ(count.bytes, 256);
      EXPECT_EQ(count.passes, 2);
      EXPECT_EQ(count.least_passes, 2);
      // the loads of asynchronous copies
    } else if (count.kind == "global load") {
      EXPECT_EQ(count.requests, 2);
      EXPECT_EQ(count.sectors, 8);
      EXPECT_EQ(count.least_sectors, 8);
    }
  }
  EXPECT_EQ(shared_loads, 3);
}

// 32 lanes read 16 distinct words with a stride of 4 words. The words lie in 8
// banks (2 in each) and in 8 sectors. 4 sectors could hold the bytes that 32
// lanes read.
TEST(EmulatorTest, StridedAccessesAreCountedWithTheirBankConflictsAndSectors) {
  EmulatedTest test(1, 4, /*count_accesses=*/true);
  EXPECT_FALSE(Arrives(test, Planted::kStrided));
  const std::vector<AccessCount> counts = test.emulator().Accesses("faulty");
  ASSERT_EQ(counts.size(), 2u);
  for (const AccessCount& count : counts) {
    EXPECT_EQ(count.requests, 2);
    if (count.kind == "shared load") {
      EXPECT_EQ(count.passes, 2 * 2);
      EXPECT_EQ(count.least_passes, 2 * 1);
    } else {
      EXPECT_EQ(count.kind, "global load");
      EXPECT_EQ(count.sectors, 2 * 8);
      EXPECT_EQ(count.least_sectors, 2 * 4);
    }
  }
}

}  // namespace
}  // namespace kvasir::kernels::emulation
