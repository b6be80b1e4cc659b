#include "base/cli/flags.h"

#include "absl/strings/str_cat.h"
#include "base/cli/units.h"
#include "base/net/testing/certificates.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/flags/options.h"
#include "worker/load/model_options.h"

namespace kvasir::cli {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A program with some flags, for tests of parsing.
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

TEST(FlagsTest, TheEnvironmentVariableOfAFlagIsItsNameInCapitals) {
  EXPECT_EQ(EnvironmentName("--max-model-len"), "KVASIR_MAX_MODEL_LEN");
}

TEST(FlagsTest, AByteSizeMayHaveABinaryUnit) {
  Program program;
  int64_t bytes = 0;
  AddBytes(&program.app, "--size", bytes, "");
  EXPECT_EQ(program.Parse("--size 24MiB"), kExitOk);
  EXPECT_EQ(bytes, 24 << 20);
  EXPECT_EQ(program.Parse("--size 2G"), kExitOk);
  EXPECT_EQ(bytes, int64_t{2} << 30);
  EXPECT_EQ(program.Parse("--size 12parsecs"), kExitUsage);
  EXPECT_EQ(program.Parse("--size -5"), kExitUsage);
  EXPECT_EQ(bytes, int64_t{2} << 30);
}

TEST(FlagsTest, AByteSizeThatOverflowsAnIntegerIsRefused) {
  int64_t bytes = 7;
  for (const char* text : {"99999999999999999999", "9000000T", "8E"}) {
    EXPECT_THAT(ParseBytes(text, &bytes),
                base::StatusIs(absl::StatusCode::kInvalidArgument,
                               HasSubstr("limit of 9223372036854775807")))
        << text;
  }
  for (const char* text : {"", "-1", "G", "1.5G", "1 X", "1GiBs", "1bb"}) {
    EXPECT_THAT(
        ParseBytes(text, &bytes),
        base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("512MiB")))
        << text;
  }
  EXPECT_EQ(bytes, 7);
  KVASIR_EXPECT_OK(ParseBytes("7E", &bytes));
  EXPECT_EQ(bytes, int64_t{7} << 60);
}

TEST(FlagsTest, NumbersThatAreInvalidOrOutOfRangeAreRefused) {
  for (const char* text : {"nan", "inf", "-1", "x", "1e400"}) {
    EXPECT_NE(AtLeast(0)(std::string(text)), "") << text;
  }
  EXPECT_EQ(AtLeast(0)(std::string("0")), "");
  EXPECT_NE(Above(0)(std::string("0")), "");
  EXPECT_EQ(Between(0, 1)(std::string("1")), "");
  EXPECT_THAT(Between(0, 1)(std::string("1.5")), HasSubstr("from 0 to 1"));
}

// A program with the flags of `serve`. Tests print its configuration and read
// it again.
struct ConfiguredProgram {
  ConfiguredProgram() {
    AddConfigFile(&app);
    command = app.add_subcommand("serve", "");
    AddModelFlags(command, &model);
    AddEngineFlags(command, &engine);
    AddRouterFlags(command, &router, /*with_workers=*/false);
  }
  int Parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "program");
    return ParseAndRun(&app, static_cast<int>(arguments.size()),
                       const_cast<char**>(arguments.data()), kExitOk);
  }
  // Reads the flags from a file, as with --config.
  int ParseFile(const std::string& text) {
    const base::TempFolder folder;
    const std::string path = folder.Write("flags.toml", text);
    return Parse({"--config", path.c_str(), "serve"});
  }
  CLI::App app;
  CLI::App* command;
  ModelOptions model;
  EngineFlags engine;
  RouterFlags router;
};

TEST(ConfigTest, APrintedConfigurationCanBeReadAsAConfigFile) {
  ConfiguredProgram first;
  ASSERT_EQ(first.Parse({"serve",
                         "--no-prefix-caching",
                         "--deterministic",
                         "--cuda-graphs",
                         "--kv-cache-bytes",
                         "24MiB",
                         "--host-pool-bytes",
                         "6MiB",
                         "--served-model-name",
                         "a,b c",
                         "--model",
                         "a \"quoted\" folder, and more",
                         "--watchdog",
                         "90s",
                         "--eviction",
                         "h2o",
                         "--eviction-budget",
                         "256",
                         "--eviction-sinks",
                         "8",
                         "--eviction-min-budget",
                         "0.1"}),
            kExitOk);
  const std::string printed = EffectiveConfig(*first.command);
  ConfiguredProgram second;
  ASSERT_EQ(second.ParseFile(printed), kExitOk) << printed;
  EXPECT_FALSE(second.engine.prefix_caching);
  EXPECT_TRUE(second.model.deterministic);
  EXPECT_TRUE(second.engine.cuda_graphs);
  EXPECT_EQ(second.engine.kv_cache_bytes, 24 << 20);
  EXPECT_EQ(second.engine.host_pool_bytes, 6 << 20);
  EXPECT_EQ(second.engine.watchdog, absl::Seconds(90));
  EXPECT_EQ(second.model.eviction, first.model.eviction);
  EXPECT_EQ(second.model.eviction.method, "h2o");
  EXPECT_EQ(second.engine.eviction_min_budget, "0.1");
  EXPECT_EQ(second.model.eviction.settings.sinks, 8u);
  EXPECT_EQ(second.model.model, "a \"quoted\" folder, and more");
  EXPECT_THAT(second.router.served_model_names,
              ::testing::ElementsAre("a", "b c"));
  EXPECT_EQ(EffectiveConfig(*second.command), printed);
}

TEST(EvictionFlagsTest, EvictionSettingsWithoutTheEvictionFlagAreRefused) {
  for (const std::vector<const char*>& flag :
       {std::vector<const char*>{"--eviction-budget", "256"},
        {"--eviction-recent", "32"},
        {"--eviction-lambda", "0.25"},
        {"--eviction-half-friendliness"}}) {
    ConfiguredProgram program;
    std::vector<const char*> arguments = {"serve"};
    arguments.insert(arguments.end(), flag.begin(), flag.end());
    ASSERT_EQ(program.Parse(arguments), kExitOk);
    EXPECT_THAT(CheckFlagsAreUsed(program.model),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("have no effect without --eviction")))
        << flag[0];
  }
  ConfiguredProgram program;
  ASSERT_EQ(program.Parse({"serve", "--eviction", "streaming",
                           "--eviction-recent", "32"}),
            kExitOk);
  KVASIR_EXPECT_OK(CheckFlagsAreUsed(program.model));
  EXPECT_THAT(
      CheckFlagsAreUsed(program.model, "127.0.0.1:8001"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("keeps the eviction that it was started with")));
}

TEST(EvictionFlagsTest, InvalidValuesOfEvictionFlagsAreUsageErrors) {
  for (const std::vector<const char*>& flag :
       {std::vector<const char*>{"--eviction", "lru"},
        {"--eviction-budget", "1.5"},
        {"--eviction-min-budget", "none"},
        {"--eviction-every", "0"},
        {"--eviction-lambda", "nan"}}) {
    ConfiguredProgram program;
    EXPECT_EQ(program.Parse({"serve", flag[0], flag[1]}), kExitUsage)
        << flag[0];
  }
}

TEST(ConfigTest,
     ATextWithBothKindsOfQuotesIsACommentInThePrintedConfiguration) {
  ConfiguredProgram first;
  ASSERT_EQ(first.Parse({"serve", "--model", "a 'b' \"c\""}), kExitOk);
  const std::string printed = EffectiveConfig(*first.command);
  EXPECT_THAT(printed, HasSubstr("\n# model cannot be written here"));
  ConfiguredProgram second;
  ASSERT_EQ(second.ParseFile(printed), kExitOk) << printed;
}

TEST(ConfigTest, DefaultValuesArePrintedInTheConfiguration) {
  ConfiguredProgram program;
  ASSERT_EQ(program.Parse({"serve"}), kExitOk);
  const std::string printed = EffectiveConfig(*program.command);
  ConfiguredProgram second;
  ASSERT_EQ(second.ParseFile(printed), kExitOk) << printed;
  KVASIR_EXPECT_OK(CheckFlagsAreUsed(second.model));
  EXPECT_THAT(printed, HasSubstr("[serve]\n"));
  EXPECT_THAT(printed, HasSubstr("\nprefix-caching=true\n"));
  EXPECT_THAT(printed, HasSubstr("\nstream-buffer-bytes=\"16MiB\"\n"));
  EXPECT_THAT(printed, HasSubstr("\nhost-pool-bytes=\"auto\"\n"));
  EXPECT_THAT(printed, HasSubstr("# served-model-name is not set\n"));
}

TEST(ConfigTest, AnUnknownKeyInTheConfigFileIsAUsageError) {
  for (const char* text : {"[serve]\nmax-que = 9\n", "max-queue = 9\n",
                           "[serv]\nmax-queue = 9\n"}) {
    ConfiguredProgram program;
    EXPECT_EQ(program.ParseFile(text), kExitUsage) << text;
  }
}

TEST(ConfigTest, AnEnvironmentVariableOverridesTheConfigFile) {
  setenv("KVASIR_MAX_QUEUE", "17", 1);
  ConfiguredProgram program;
  EXPECT_EQ(program.ParseFile("[serve]\nmax-queue = 9\nmax-num-seqs = 3\n"),
            kExitOk);
  EXPECT_EQ(program.engine.max_queue, 17);
  EXPECT_EQ(program.engine.max_num_seqs, 3);
  unsetenv("KVASIR_MAX_QUEUE");
}

TEST(FlagsTest, StreamBufferSizesOutsideTheLimitsAreRefused) {
  Program program;
  RouterFlags flags;
  AddRouterFlags(&program.app, &flags, /*with_workers=*/false);
  EXPECT_EQ(program.Parse(""), kExitOk) << "the default is within the limits";
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 64KiB"), kExitOk);
  EXPECT_EQ(flags.stream_buffer_bytes, 64 << 10);
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 0"), kExitUsage);
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 63KiB"), kExitUsage);
  EXPECT_EQ(program.Parse("--stream-buffer-bytes 1025MiB"), kExitUsage);
}

TEST(FlagsTest, AByteSizeFlagMayBeAuto) {
  Program program;
  std::optional<int64_t> bytes;
  AddBytesOrAuto(&program.app, "--pool", bytes, "");
  EXPECT_EQ(program.Parse(""), kExitOk);
  EXPECT_EQ(bytes, std::nullopt);
  EXPECT_EQ(program.Parse("--pool 0"), kExitOk);
  EXPECT_EQ(bytes, 0);
  EXPECT_EQ(program.Parse("--pool 3MiB"), kExitOk);
  EXPECT_EQ(bytes, 3 << 20);
  EXPECT_EQ(program.Parse("--pool auto"), kExitOk);
  EXPECT_EQ(bytes, std::nullopt);
  EXPECT_EQ(program.Parse("--pool much"), kExitUsage);
}

TEST(FlagsTest, DurationsWithoutAUnitOrBelowZeroAreRefused) {
  Program program;
  absl::Duration duration = absl::Seconds(1);
  AddDuration(&program.app, "--wait", duration, "");
  EXPECT_EQ(program.Parse("--wait 250ms"), kExitOk);
  EXPECT_EQ(duration, absl::Milliseconds(250));
  EXPECT_EQ(program.Parse("--wait 30"), kExitUsage);
  EXPECT_EQ(program.Parse("--wait -1s"), kExitUsage);
}

TEST(FlagsTest, EnvironmentVariablesSetFlagsThatTheCommandLineOmits) {
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

TEST(FlagsTest, MaxNumSeqsMustBeAPositiveNumber) {
  Program program;
  EngineFlags flags;
  AddEngineFlags(&program.app, &flags);
  EXPECT_EQ(program.Parse("--max-num-seqs 0"), kExitUsage);
  EXPECT_EQ(program.Parse("--max-num-seqs x"), kExitUsage);
}

TEST(OptionsTest, ExactlyOneOfModelAndRandomWeightsMustBeGiven) {
  EXPECT_THAT(
      CheckModelOptions({}),
      base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--model")));
  EXPECT_THAT(CheckModelOptions({.model = "m", .random_weights = true}),
              base::StatusIs(absl::StatusCode::kInvalidArgument,
                             HasSubstr("cannot be given together")));
  EXPECT_THAT(
      CheckModelOptions({.random_weights = true}),
      base::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--shape")));
  KVASIR_EXPECT_OK(CheckModelOptions({.model = "m"}));
}

TEST(FlagsTest, ByteCountsArePrintedWithBinaryUnits) {
  EXPECT_EQ(HumanBytes(512), "512 B");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes(3.0 * (1 << 30)), "3.00 GiB");
}

base::ListenAddress Everywhere() {
  base::ListenAddress everywhere;
  everywhere.host = "0.0.0.0";
  everywhere.host_flag = "--listen";
  return everywhere;
}

TEST(TlsFlagsTest, PlainTextToOtherMachinesIsRefusedWithoutTheInsecureFlag) {
  base::TlsWatch watch;
  ListenFlags listen;
  for (const auto& refused :
       {ListenCredentials(listen, Everywhere(), &watch),
        WorkerListenCredentials(listen, Everywhere(), &watch)}) {
    EXPECT_THAT(
        refused.status(),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 AllOf(HasSubstr("--listen 0.0.0.0"), HasSubstr("--tls-cert"),
                       HasSubstr("--insecure"))));
  }
  listen.insecure = true;
  KVASIR_EXPECT_OK(ListenCredentials(listen, Everywhere(), &watch).status());
  KVASIR_EXPECT_OK(
      WorkerListenCredentials(listen, Everywhere(), &watch).status());

  RouterFlags router;
  router.workers = {"unix:/run/worker", "127.0.0.1:8100"};
  KVASIR_EXPECT_OK(WorkerCredentials(router, false, &watch).status());
  router.workers.push_back("worker-1:8100");
  EXPECT_THAT(
      WorkerCredentials(router, false, &watch).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("worker-1:8100"), HasSubstr("--worker-tls-ca"),
                     HasSubstr("--insecure"))));
  KVASIR_EXPECT_OK(WorkerCredentials(router, true, &watch).status());

  DialTlsFlags dial;
  KVASIR_EXPECT_OK(DialCredentials(dial, "localhost:8001").status());
  EXPECT_THAT(DialCredentials(dial, "router:8001").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("router:8001"), HasSubstr("--ca"),
                             HasSubstr("--insecure"))));
  dial.insecure = true;
  KVASIR_EXPECT_OK(DialCredentials(dial, "router:8001").status());
}

TEST(TlsFlagsTest, AClientIgnoresAndLogsExpiredAuthoritiesOfItsCaFile) {
  const base::TempFolder folder;
  const base::TestCertificate over =
      base::MakeAuthorityWith({.common_name = "old",
                               .valid_from = -absl::Hours(2),
                               .valid_until = -absl::Hours(1)});
  DialTlsFlags dial;
  dial.ca = folder.Write(
      "ca.pem", base::MakeAuthority("new").certificate + over.certificate);
  ::testing::internal::CaptureStderr();
  const auto credentials = DialCredentials(dial, "127.0.0.1:1");
  const std::string log = ::testing::internal::GetCapturedStderr();
  KVASIR_EXPECT_OK(credentials.status());
  EXPECT_THAT(log,
              AllOf(HasSubstr("expired authorities are left out"),
                    HasSubstr("role=server"), HasSubstr("--ca " + dial.ca)));
}

TEST(TlsFlagsTest, ATokenFileWithoutTlsIsRefused) {
  const base::TempFolder folder;
  const std::string path = folder.File("token");
  DialTlsFlags dial;
  dial.token_file = path;
  EXPECT_THAT(DialCredentials(dial, "127.0.0.1:1").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("--token-file " + path),
                             HasSubstr("give --ca"))));
  // With --tls-cert but without --admin-client-ca, an admin port on loopback
  // still uses plain text.
  base::TlsWatch watch;
  ListenFlags listen;
  listen.tls.certificate = "none.pem";
  listen.tls.key = "none.pem";
  EXPECT_EQ(*AdminCredentials(listen, {}, &watch, /*by_token=*/true), nullptr);
  base::ListenAddress everywhere;
  everywhere.host = "0.0.0.0";
  EXPECT_THAT(
      AdminCredentials(listen, everywhere, &watch, /*by_token=*/true).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("none.pem")))
      << "other machines can connect, so TLS must be used";
  EXPECT_THAT(AdminCredentials(listen, everywhere, &watch).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("--admin-client-ca")));
}

// Regression test: --insecure once opened the admin port too, so anybody who
// could connect to it could end the program.
TEST(TlsFlagsTest, TheInsecureFlagDoesNotOpenTheAdminPortToOtherMachines) {
  base::TlsWatch watch;
  ListenFlags listen;
  base::ListenAddress unix_socket;
  unix_socket.unix_path = "/run/admin";
  for (const bool insecure : {false, true}) {
    listen.insecure = insecure;
    EXPECT_THAT(AdminCredentials(listen, Everywhere(), &watch).status(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr("--listen 0.0.0.0"),
                               HasSubstr("--admin-client-ca"),
                               HasSubstr("127.0.0.1"))));
    KVASIR_EXPECT_OK(AdminCredentials(listen, {}, &watch).status());
    KVASIR_EXPECT_OK(AdminCredentials(listen, unix_socket, &watch).status());
  }
}

// Regression test: with TLS but without client certificates, a worker once
// accepted every program that could connect as a router.
TEST(TlsFlagsTest,
     AWorkerThatOtherMachinesReachRequiresClientCertificatesOrTlsAnyClient) {
  base::TlsWatch watch;
  ListenFlags listen;
  listen.tls.certificate = listen.tls.key = "/nowhere.pem";
  EXPECT_THAT(
      WorkerListenCredentials(listen, Everywhere(), &watch).status(),
      StatusIs(
          absl::StatusCode::kFailedPrecondition,
          AllOf(HasSubstr("--listen 0.0.0.0"), HasSubstr("--tls-client-ca"),
                HasSubstr("--tls-any-client"), HasSubstr("127.0.0.1"))));
  // --insecure allows plain text, but does not replace --tls-any-client.
  listen.insecure = true;
  EXPECT_THAT(WorkerListenCredentials(listen, Everywhere(), &watch).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("--tls-any-client")));
  const auto reads_files = StatusIs(absl::StatusCode::kInvalidArgument,
                                    HasSubstr("/nowhere.pem: No such file"));
  EXPECT_THAT(WorkerListenCredentials(listen, {}, &watch).status(),
              reads_files);
  listen.tls.any_client = true;
  EXPECT_THAT(WorkerListenCredentials(listen, Everywhere(), &watch).status(),
              reads_files);
  listen.tls.client_ca = "/nowhere.pem";
  EXPECT_THAT(WorkerListenCredentials(listen, Everywhere(), &watch).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--tls-any-client and --tls-client-ca")));
  listen.tls.any_client = false;
  EXPECT_THAT(WorkerListenCredentials(listen, Everywhere(), &watch).status(),
              reads_files);
}

TEST(TlsFlagsTest, ATlsFlagIsRefusedIfAnotherFlagThatItNeedsIsMissing) {
  base::TlsWatch watch;
  ListenFlags any;
  any.tls.any_client = true;
  EXPECT_THAT(WorkerListenCredentials(any, {}, &watch).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--tls-any-client: without --tls-cert")));
  ListenFlags listen;
  listen.tls.client_names = {"router"};
  EXPECT_THAT(ListenCredentials(listen, {}, &watch).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("without --tls-client-ca")));
  ListenFlags admin;
  admin.admin_client_names = {"operator"};
  EXPECT_THAT(AdminCredentials(admin, {}, &watch).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("--admin-client-names operator"),
                             HasSubstr("without --admin-client-ca"))));
  RouterFlags router;
  router.worker_tls.names = {"worker"};
  EXPECT_THAT(WorkerCredentials(router, true, &watch).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("without --worker-tls-ca")));
  DialTlsFlags dial;
  dial.key = "key.pem";
  EXPECT_THAT(
      DialCredentials(dial, "127.0.0.1:1").status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("needs --cert")));
}

// Regression test: an empty value once counted as a missing flag, so
// certificates were not required.
TEST(TlsFlagsTest, AnEmptyTlsFlagOrEnvironmentVariableIsAUsageError) {
  struct Servers {
    Servers() {
      AddConfigFile(&app);
      CLI::App* const router = app.add_subcommand("router", "");
      AddListenFlags(router, &listen, CalledBy::kClients);
      AddRouterFlags(router, &flags, /*with_workers=*/true);
      AddDialTlsFlags(app.add_subcommand("drain", ""), &dial);
    }
    std::pair<int, std::string> Parse(std::vector<const char*> arguments) {
      arguments.insert(arguments.begin(), "program");
      ::testing::internal::CaptureStderr();
      const int code =
          ParseAndRun(&app, static_cast<int>(arguments.size()),
                      const_cast<char**>(arguments.data()), kExitOk);
      return {code, ::testing::internal::GetCapturedStderr()};
    }
    CLI::App app;
    ListenFlags listen;
    RouterFlags flags;
    DialTlsFlags dial;
  };
  const auto is_wrong = [](const std::string& name) {
    return ::testing::Pair(kExitUsage,
                           AllOf(HasSubstr(name), HasSubstr("empty")));
  };
  for (const char* flag :
       {"--tls-cert", "--tls-key", "--tls-client-ca", "--tls-client-names",
        "--admin-client-ca", "--admin-client-names", "--worker-tls-ca",
        "--worker-tls-cert", "--worker-tls-key", "--worker-tls-names", "--host",
        "--admin-host", "--metrics-host", "--health-host"}) {
    EXPECT_THAT(Servers().Parse({"router", "--workers", "unix:/x", flag, ""}),
                is_wrong(flag));
    const std::string variable = EnvironmentName(flag);
    setenv(variable.c_str(), "", 1);
    EXPECT_THAT(Servers().Parse({"router", "--workers", "unix:/x"}),
                is_wrong(variable));
    // A command that does not have the flag ignores its environment variable.
    EXPECT_EQ(Servers().Parse({"drain"}).first, kExitOk);
    unsetenv(variable.c_str());
  }
  for (const char* flag : {"--ca", "--cert", "--key"}) {
    EXPECT_THAT(Servers().Parse({"drain", flag, ""}), is_wrong(flag));
  }
  // A list of names that is empty is refused too.
  EXPECT_EQ(
      Servers()
          .Parse({"router", "--workers", "unix:/x", "--tls-client-names", ","})
          .first,
      kExitUsage);
  setenv("KVASIR_TLS_CLIENT_NAMES", ",", 1);
  EXPECT_EQ(Servers().Parse({"router", "--workers", "unix:/x"}).first,
            kExitUsage);
  unsetenv("KVASIR_TLS_CLIENT_NAMES");
  const base::TempFolder folder;
  const std::string path = folder.Write(
      "flags.toml", "[router]\nworkers = \"unix:/x\"\ntls-client-ca = \"\"\n");
  EXPECT_THAT(Servers().Parse({"--config", path.c_str(), "router"}),
              is_wrong("--tls-client-ca"));
  Servers good;
  EXPECT_EQ(good.Parse({"router", "--workers", "unix:/x", "--tls-client-ca",
                        "ca.pem", "--tls-client-names", "a,b"})
                .first,
            kExitOk);
  EXPECT_EQ(good.listen.tls.client_ca, "ca.pem");
  EXPECT_THAT(good.listen.tls.client_names, ::testing::ElementsAre("a", "b"));
}

}  // namespace
}  // namespace kvasir::cli
