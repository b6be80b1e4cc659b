#include "cli/flags.h"

#include "base/status_matchers.h"
#include "cli/options.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

// Parses "--x ..." as the arguments of a fresh program.
struct Program {
  CLI::App app;
  int Parse(const std::string& arguments) {
    try {
      app.parse(arguments);
    } catch (const CLI::ParseError& error) {
      return error.get_exit_code() == 0 ? 0 : kExitUsage;
    }
    return kExitOk;
  }
};

TEST(FlagsTest, EnvironmentNamesAreTheFlagsInCapitals) {
  EXPECT_EQ(EnvironmentName("--max-model-len"), "KVASIR_MAX_MODEL_LEN");
}

TEST(FlagsTest, BytesTakeBinaryUnits) {
  Program program;
  int64_t bytes = 0;
  AddBytes(&program.app, "--size", bytes, "");
  EXPECT_EQ(program.Parse("--size 24MiB"), kExitOk);
  EXPECT_EQ(bytes, 24 << 20);
  EXPECT_EQ(program.Parse("--size 2G"), kExitOk);
  EXPECT_EQ(bytes, int64_t{2} << 30);
  EXPECT_EQ(program.Parse("--size 12parsecs"), kExitUsage);
  EXPECT_EQ(program.Parse("--size -5"), kExitUsage);
}

TEST(FlagsTest, AStreamBufferHasBoundsSoThatNoClientIsSlowByIt) {
  Program program;
  RouterFlags flags;
  AddRouterFlags(&program.app, &flags, /*with_workers=*/false);
  EXPECT_EQ(program.Parse(""), kExitOk) << "the default is in bounds";
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 64KiB"), kExitOk);
  EXPECT_EQ(flags.stream_buffer_bytes, 64 << 10);
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 0"), kExitUsage);
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 63KiB"), kExitUsage);
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 2GiB"), kExitUsage);
}

TEST(FlagsTest, DurationsNeedAUnitAndAreNotNegative) {
  Program program;
  absl::Duration duration = absl::Seconds(1);
  AddDuration(&program.app, "--wait", duration, "");
  EXPECT_EQ(program.Parse("--wait 250ms"), kExitOk);
  EXPECT_EQ(duration, absl::Milliseconds(250));
  EXPECT_EQ(program.Parse("--wait 30"), kExitUsage);
  EXPECT_EQ(program.Parse("--wait -1s"), kExitUsage);
}

TEST(FlagsTest, TheEnvironmentSetsWhatTheCommandLineDoesNot) {
  setenv("KVASIR_MAX_QUEUE", "17", 1);
  Program program;
  EngineFlags flags;
  AddEngineFlags(&program.app, &flags);
  EXPECT_EQ(program.Parse("--max-num-seqs 3"), kExitOk);
  EXPECT_EQ(flags.max_queue, 17);
  EXPECT_EQ(flags.max_num_seqs, 3);
  EXPECT_EQ(program.Parse("--max-queue 4"), kExitOk);
  EXPECT_EQ(flags.max_queue, 4);
  unsetenv("KVASIR_MAX_QUEUE");
}

TEST(FlagsTest, ValuesOutOfRangeAreRefused) {
  Program program;
  EngineFlags flags;
  AddEngineFlags(&program.app, &flags);
  EXPECT_EQ(program.Parse("--max-num-seqs 0"), kExitUsage);
  EXPECT_EQ(program.Parse("--max-num-seqs x"), kExitUsage);
}

TEST(OptionsTest, AModelComesFromAFolderOrFromAShapeNotBoth) {
  EXPECT_THAT(CheckModelOptions({}),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             ::testing::HasSubstr("--model")));
  EXPECT_THAT(CheckModelOptions({.model = "m", .random_weights = true}),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             ::testing::HasSubstr("exclude")));
  EXPECT_THAT(CheckModelOptions({.random_weights = true}),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             ::testing::HasSubstr("--shape")));
  KVASIR_EXPECT_OK(CheckModelOptions({.model = "m"}));
}

TEST(FlagsTest, HumanBytesUseBinaryUnits) {
  EXPECT_EQ(HumanBytes(512), "512 B");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes(3.0 * (1 << 30)), "3.00 GiB");
}

}  // namespace
}  // namespace kvasir::cli
