#include "server/ranks/rank_flags.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/ranks/child_arguments.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// The commands serve and rank with all their flags, as in `kvasir`.
struct Commands {
  Commands() {
    for (CLI::App* command : {serve, rank}) {
      AddModelFlags(command, &model);
      AddListenFlags(
          command, &listen,
          command == serve ? CalledBy::kClients : CalledBy::kOperators);
      AddCommonFlags(command, &common);
    }
    AddEngineFlags(serve, &engine);
    AddStepFlags(rank, &engine);
    AddLeaderFlags(serve, &leader);
    AddFollowerFlags(rank, &follower);
  }
  void Parse(const std::string& text) { app.parse(text); }

  CLI::App app;
  CLI::App* serve = app.add_subcommand("serve", "");
  CLI::App* rank = app.add_subcommand("rank", "");
  ModelOptions model;
  ListenFlags listen;
  CommonFlags common;
  EngineFlags engine;
  RankFlags leader;
  RankFlags follower;
};

absl::Status Leader(const std::string& flags) {
  Commands commands;
  commands.Parse("serve " + flags);
  return CheckLeaderFlags(commands.leader);
}

absl::Status Follower(const std::string& flags) {
  Commands commands;
  commands.Parse("rank " + flags);
  return CheckFollowerFlags(commands.follower);
}

auto Refuses(const std::string& text) {
  return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
}

TEST(RankFlagsTest, ALeaderWhoseRanksAreOnOneHostNeedsOnlyTheNumberOfRanks) {
  KVASIR_EXPECT_OK(Leader(""));
  KVASIR_EXPECT_OK(Leader("--tp 4"));
  KVASIR_EXPECT_OK(Leader("--tp 4 --local-ranks 4"));
}

TEST(RankFlagsTest, ALeaderOfRanksOnSeveralHostsNeedsMoreFlags) {
  const std::string several = "--tp 4 --local-ranks 2 ";
  EXPECT_THAT(Leader(several), Refuses("--rank-listen HOST:PORT"));
  EXPECT_THAT(Leader(several + "--rank-listen 0.0.0.0:8200"),
              Refuses("--rank-interface"));
  EXPECT_THAT(
      Leader(several + "--rank-listen 0.0.0.0:8200 --rank-interface eth0"),
      Refuses("--rank-secret-file"));
  KVASIR_EXPECT_OK(Leader(several +
                          "--rank-listen 0.0.0.0:8200 --rank-interface eth0 "
                          "--rank-secret-file s"));
  EXPECT_THAT(Leader("--tp 2 --rank-listen 0.0.0.0:8200"),
              Refuses("all ranks of --tp 2 are started on this host"));
  EXPECT_THAT(Leader("--tp 2 --local-ranks 3"),
              Refuses("--local-ranks 3 must not be more than the number of all "
                      "ranks, --tp 2"));
}

TEST(RankFlagsTest, RankFlagsWithoutTheFlagsThatTheyNeedAreRefused) {
  EXPECT_THAT(
      Leader("--tp 2 --nccl-library x"),
      Refuses("--nccl-library x has an effect only with --collective nccl"));
  EXPECT_THAT(Leader("--tp 2 --rank-tls-cert c"),
              Refuses("must be given together"));
  EXPECT_THAT(Leader("--tp 2 --rank-tls-cert c --rank-tls-ca a"),
              Refuses("must be given together"));
  EXPECT_THAT(Leader("--tp 2 --rank-tls-names n"),
              Refuses("must be given together"));
  EXPECT_THAT(Leader("--tp 2 --rank-heartbeat-timeout 1ms"),
              Refuses("must be 100ms to 1h"));
  EXPECT_THAT(
      Leader("--tp 2 --rank-secret-file s"),
      Refuses(
          "--rank-secret-file has an effect only for ranks on other hosts"));
  EXPECT_THAT(
      Leader("--tp 2 --rank-tls-cert c --rank-tls-key k --rank-tls-ca a"),
      Refuses("--rank-tls-cert has an effect only for ranks on other hosts"));
  EXPECT_THAT(
      Leader("--rank-interface lo"),
      Refuses("--rank-interface has an effect only with several ranks"));
  EXPECT_THAT(Leader("--collective gloo"),
              Refuses("--collective has an effect only with several ranks"));
}

// Regression test: --print-config once printed rank=0 and tp=1, which
// --config refused.
TEST(RankFlagsTest, ThePrintedConfigOfAFollowerHasNoDefaultRankOrGroupSize) {
  Commands commands;
  EXPECT_THAT(
      EffectiveConfig(*commands.rank),
      AllOf(HasSubstr("# rank is not set\n"), HasSubstr("# tp is not set\n")));
}

TEST(RankFlagsTest, AFollowerNeedsItsLeadersAddressAndItsOwnRank) {
  EXPECT_THAT(Follower("--rank 1 --tp 2"), Refuses("--leader HOST:PORT"));
  // Regression test: if the address had no port, the rank once waited for an
  // answer until --rank-join-timeout.
  EXPECT_THROW((void)Follower("--leader a --rank 1 --tp 2"),
               CLI::ValidationError);
  EXPECT_THAT(Follower("--leader a:1 --rank 1"), Refuses("give --tp"));
  EXPECT_THAT(Follower("--leader a:1 --rank 2 --tp 2"),
              Refuses("--rank 2 with --tp 2 must be 1 to 1"));
  EXPECT_THAT(Follower("--leader a:1 --rank 2 --tp 4 --local-ranks 3"),
              Refuses("the last rank of --tp 4 is 3"));
  EXPECT_THAT(Follower("--leader a:1 --rank 1 --tp 2"),
              Refuses("--rank-interface"));
  KVASIR_EXPECT_OK(Follower("--leader 127.0.0.1:1 --rank 1 --tp 2"));
  KVASIR_EXPECT_OK(
      Follower("--leader a:1 --rank 2 --tp 4 --local-ranks 2 --rank-interface "
               "eth0"));
}

TEST(RankFlagsTest, TheDefaultCollectiveDependsOnTheDevice) {
  EXPECT_EQ(CollectiveOf({}, {.device = "cpu"}), "gloo");
  EXPECT_EQ(CollectiveOf({}, {.device = "cuda:2"}), "nccl");
  RankFlags flags;
  flags.tp = 2;
  flags.collective = "gloo";
  KVASIR_EXPECT_OK(CheckCollective(flags, {.device = "cpu"}));
  EXPECT_THAT(CheckCollective(flags, {.device = "cuda"}),
              Refuses("--collective gloo with --device cuda does not work: "
                      "give --collective nccl"));
  EXPECT_THAT(CheckCollective(flags, {.device = "auto"}),
              Refuses("--device auto with --tp 2"));
  flags.collective = "nccl";
  EXPECT_THAT(CheckCollective(flags, {.device = "cpu"}),
              Refuses("--collective nccl with --device cpu does not work: give "
                      "--collective gloo"));
  KVASIR_EXPECT_OK(CheckCollective({}, {.device = "auto"}));
}

TEST(RankFlagsTest, PlainTextBetweenMachinesNeedsTheInsecureFlag) {
  base::TlsWatch watch;
  base::ListenAddress everywhere;
  everywhere.host = "0.0.0.0";
  everywhere.host_flag = "--rank-listen";
  EXPECT_THAT(
      RankListenCredentials({}, everywhere, false, &watch).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("--rank-listen"), HasSubstr("--rank-tls-ca"))));
  KVASIR_EXPECT_OK(
      RankListenCredentials({}, everywhere, true, &watch).status());
  KVASIR_EXPECT_OK(RankListenCredentials({}, {}, false, &watch).status());
  EXPECT_THAT(RankDialCredentials({}, "leader:1", false, &watch).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("to leader:1 would not be encrypted")));
  KVASIR_EXPECT_OK(RankDialCredentials({}, "leader:1", true, &watch).status());
}

TEST(RankFlagsTest, ARankSecretFileWithMoreThanOneWordIsRefused) {
  const base::TempFolder folder;
  const std::string path = folder.Write("secret", "  hush\n");
  const auto secret = ReadSecret(path);
  KVASIR_ASSERT_OK(secret.status());
  EXPECT_EQ(*secret, "hush");
  folder.Write("secret", "two words\n");
  EXPECT_THAT(ReadSecret(path).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("--rank-secret-file"),
                             Not(HasSubstr("words")))));
  EXPECT_EQ(*ReadSecret(""), "");
  EXPECT_NE(NewSecret(), NewSecret());
}

TEST(ChildArgumentsTest, AChildRankGetsOnlyTheFlagsThatConcernIt) {
  Commands commands;
  commands.Parse(
      "serve --model /m --tp 3 --threads 2 --deterministic --cuda-graphs "
      "--kv-cache-bytes 1MiB --max-queue 7 --log-format json "
      "--metrics-port 9000 --admin-port 9001 --ready-file /r "
      "--rank-metrics-port 9100 --rank-heartbeat-timeout 1s --watchdog 9m "
      "--json");
  EXPECT_THAT(
      ChildArguments(*commands.serve, *commands.rank, commands.leader,
                     commands.listen, 2),
      AllOf(Contains("--rank=2"), Contains("--local-ranks=1"),
            Contains("--tp=3"), Contains("--model=/m"), Contains("--threads=2"),
            Contains("--deterministic=true"), Contains("--cuda-graphs=true"),
            Contains("--kv-cache-bytes=1MiB"), Contains("--log-format=json"),
            Contains("--metrics-port=9102"),
            Contains("--rank-heartbeat-timeout=1s"),
            // Regression test: the ranks' watchdog was once shorter than the
            // leader's, so ranks aborted steps while the leader still waited.
            Contains("--watchdog=9m"),
            Not(Contains(StartsWith("--ready-file"))),
            Not(Contains(StartsWith("--admin-port"))),
            Not(Contains(StartsWith("--json"))),
            Not(Contains(StartsWith("--max-queue")))));
  // The child's arguments must parse to the same flags.
  Commands child;
  std::string line;
  for (const std::string& argument :
       ChildArguments(*commands.serve, *commands.rank, commands.leader,
                      commands.listen, 1)) {
    absl::StrAppend(&line, argument, " ");
  }
  child.Parse(line + "--join-fd=3");
  KVASIR_EXPECT_OK(CheckFollowerFlags(child.follower));
  EXPECT_EQ(child.follower.rank, 1);
  EXPECT_EQ(child.engine.kv_cache_bytes, 1 << 20);
  EXPECT_TRUE(child.model.deterministic);
}

TEST(ChildArgumentsTest, ChildRanksUseFreeMetricsPortsIfTheirParentDoes) {
  Commands commands;
  commands.Parse("serve --model /m --tp 2 --metrics-port 0");
  EXPECT_THAT(ChildArguments(*commands.serve, *commands.rank, commands.leader,
                             commands.listen, 1),
              Contains("--metrics-port=0"));
}

TEST(ChildArgumentsTest, ChildRanksOnAnotherHostGetTheTlsFlagsOfTheirParent) {
  Commands commands;
  commands.Parse(
      "rank --model /m --tp 4 --rank 2 --local-ranks 2 --leader a:1 "
      "--rank-interface eth0 --rank-tls-cert c --rank-tls-key k --rank-tls-ca "
      "a --rank-secret-file /s");
  EXPECT_THAT(ChildArguments(*commands.rank, *commands.rank, commands.follower,
                             commands.listen, 1),
              AllOf(Contains("--rank=3"), Contains("--rank-tls-cert=c"),
                    Contains("--rank-interface=eth0"),
                    Not(Contains(StartsWith("--rank-secret-file"))),
                    Not(Contains(StartsWith("--leader")))));
  Commands leader;
  leader.Parse(
      "serve --model /m --tp 4 --local-ranks 2 --rank-listen h:1 "
      "--rank-interface eth0 --rank-tls-cert c --rank-tls-key k --rank-tls-ca "
      "a");
  EXPECT_THAT(ChildArguments(*leader.serve, *leader.rank, leader.leader,
                             leader.listen, 1),
              Not(Contains(StartsWith("--rank-tls"))));
}

}  // namespace
}  // namespace kvasir::cli
