#include "server/runtime/operator_surface.h"

#include <dirent.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
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

// Of this process.
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

DrainOutcome NothingToDrain(absl::Duration) { return {}; }

TEST_F(OperatorSurfaceTest, WhatIsReadyIsToldAndEndsWithSuccess) {
  const SurfaceOptions options = OnFreePorts();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  surface->SetServing(true);
  KVASIR_ASSERT_OK(surface->Ready({.grpc = "x:1"}, "model", {}));
  EXPECT_TRUE(std::filesystem::remove(options.listen.ready_file));
  surface->RequestDrain();
  EXPECT_EQ(surface->WaitAndDrain(&NothingToDrain), kExitOk);
}

// A group that ended just as its leader had loaded was told to be ready, and
// said so to probes.
TEST_F(OperatorSurfaceTest, WhatHasFailedIsNeverReady) {
  const SurfaceOptions options = OnFreePorts();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  surface->Fail("a rank is gone");
  surface->SetServing(true);
  KVASIR_ASSERT_OK(surface->Ready({.grpc = "x:1"}, "model", {}));
  EXPECT_FALSE(std::filesystem::exists(options.listen.ready_file));
  EXPECT_FALSE(surface->serving());
  EXPECT_EQ(surface->WaitAndDrain(&NothingToDrain), kExitFailed);
}

TEST_F(OperatorSurfaceTest, WhatFailsInItsDrainEndsWithFailure) {
  const SurfaceOptions options = OnFreePorts();
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  surface->RequestDrain();
  EXPECT_EQ(surface->WaitAndDrain([&](absl::Duration) {
    surface->Fail("a rank is gone");
    return DrainOutcome{};
  }),
            kExitFailed);
}

// Whoever was on a machine drained a replica by a rank's admin port, which
// asked for no credential whatever the leader's did.
TEST_F(OperatorSurfaceTest,
       AProgramThatAnotherOneDrainsListensForMetricsAlone) {
  SurfaceOptions options = OnFreePorts();
  const int before = NumListeners();
  options.metrics_only = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto surface,
                              OperatorSurface::Start(options));
  EXPECT_EQ(NumListeners(), before + 1);
  surface->SetServing(true);
  KVASIR_ASSERT_OK(surface->Ready({.grpc = "x:1"}, "model", {}));
  EXPECT_FALSE(std::filesystem::exists(options.listen.ready_file));
  EXPECT_TRUE(surface->serving());
  surface->RequestDrain();
  EXPECT_EQ(surface->WaitAndDrain(&NothingToDrain), kExitOk);
}

}  // namespace
}  // namespace kvasir::cli
