#include "server/runtime/serve_stack.h"

#include <grpcpp/channel.h>

#include "absl/time/clock.h"
#include "base/net/grpc_channel.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

// Regression test: `kvasir generate` once lost answers that took longer than
// ten seconds, because the server closed connections at this age.
TEST(ServeStackTest, AConnectionToTheServerOfAGenerateCommandHasNoAgeLimit) {
  ServeStackOptions options;
  options.model.random_weights = true;
  options.model.shape = "kvasir-tiny";
  options.model.threads = 1;
  options.engine.max_model_len = 64;
  options.engine.max_num_seqs = 1;
  options.listens_privately = true;
  options.max_connection_age = absl::Milliseconds(100);
  options.on_fatal = [](const std::string&) {};
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto stack,
                              ServeStack::Create(std::move(options)));
  const auto channel = base::NewGrpcChannel(stack->router().target(), nullptr);
  ASSERT_TRUE(channel->WaitForConnected(
      absl::ToChronoTime(absl::Now() + absl::Seconds(20))));
  absl::SleepFor(absl::Milliseconds(400));
  EXPECT_EQ(channel->GetState(/*try_to_connect=*/false), GRPC_CHANNEL_READY);
}

}  // namespace
}  // namespace kvasir::cli
