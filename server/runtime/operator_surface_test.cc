#include "server/runtime/operator_surface.h"

#include <dirent.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "base/cli/exit_code.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

class OperatorSurfaceTest : public ::testing::Test {
 protected:
  SurfaceOptions OnFreePorts() const {
    SurfaceOptions options;
    options.program = "worker";
    options.listen.metrics_port = 0;
    options.listen.admin_port = 0;
    options.listen.health_port = 0;
    options.listen.ready_file = folder_.File("ready");
    options.tls = std::make_shared<base::TlsWatch>();
    return options;
  }

 private:
  const base::TempFolder folder_;
};

// Returns the number of listening sockets of this process.
int NumListeners() {
  int listeners = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (const dirent* const entry = readdir(folder)) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (getsockopt(std::atoi(entry->d_name), SOL_SOCKET, SO_ACCEPTCONN,
                   &listens, &size) == 0) {
      listeners += listens;
    }
  }
  closedir(folder);
  return listeners;
}

class FakeNode final : public Node {
 public:
  explicit FakeNode(std::function<void()> on_drain = [] {})
      : on_drain_(std::move(on_drain)) {}

  NodeReport Report() const override { return {.grpc = "x:1"}; }
  std::string model_name() const override { return "model"; }
  MetricsSources Metrics() const override { return {}; }
  DrainOutcome Drain(absl::Duration) override {
    on_drain_();
    return {};
  }

 private:
  const std::function<void()> on_drain_;
};

TEST_F(OperatorSurfaceTest, ADrainedProgramEndsWithSuccess) {
  const SurfaceOptions options = OnFreePorts();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  FakeNode node;
  surface->SetServing(true);
  KVASIR_ASSERT_OK(surface->Ready(node));
  EXPECT_TRUE(std::filesystem::remove(options.listen.ready_file));
  surface->RequestDrain();
  EXPECT_EQ(surface->WaitAndDrain(&node), kExitOk);
}

// Regression test: a group that failed just after its leader had loaded was
// once reported as ready.
TEST_F(OperatorSurfaceTest, AProgramThatHasFailedNeverWritesTheReadyFile) {
  const SurfaceOptions options = OnFreePorts();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  FakeNode node;
  surface->Fail("a rank is gone");
  surface->SetServing(true);
  KVASIR_ASSERT_OK(surface->Ready(node));
  EXPECT_FALSE(std::filesystem::exists(options.listen.ready_file));
  EXPECT_FALSE(surface->serving());
  EXPECT_EQ(surface->WaitAndDrain(&node), kExitFailed);
}

TEST_F(OperatorSurfaceTest, AFailureDuringTheDrainSetsTheExitCodeToFailed) {
  const SurfaceOptions options = OnFreePorts();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  FakeNode failing([&] { surface->Fail("a rank is gone"); });
  surface->RequestDrain();
  EXPECT_EQ(surface->WaitAndDrain(&failing), kExitFailed);
}

// Regression test: ranks once had an admin port without credentials, even if
// the leader's port required them. So any local user could drain the replica.
TEST_F(OperatorSurfaceTest, AFollowerRankOpensOnlyAMetricsPort) {
  SurfaceOptions options = OnFreePorts();
  const int before = NumListeners();
  options.metrics_only = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  FakeNode node;
  EXPECT_EQ(NumListeners(), before + 1);
  surface->SetServing(true);
  KVASIR_ASSERT_OK(surface->Ready(node));
  EXPECT_FALSE(std::filesystem::exists(options.listen.ready_file));
  EXPECT_TRUE(surface->serving());
  surface->RequestDrain();
  EXPECT_EQ(surface->WaitAndDrain(&node), kExitOk);
}

}  // namespace
}  // namespace kvasir::cli
