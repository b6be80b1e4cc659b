#include "bench/proxy/null_proxy.h"

#include <grpcpp/create_channel.h>

#include <string>
#include <vector>

#include "base/net/grpc_status.h"
#include "base/status_matchers.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"

namespace kvasir::bench {
namespace {

namespace v1 = kvasir::v1;
using base::StatusIs;

struct Answer {
  uint32_t prompt_tokens = 0;
  std::vector<int32_t> ids;
  bool finished = false;
  absl::Status status;
};

Answer Ask(const std::string& target, uint32_t max_tokens) {
  const auto stub = v1::Worker::NewStub(
      grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  v1::GenerateRequest request;
  request.set_prompt_token_ids(std::string(4000, '\1'));
  request.mutable_sampling()->set_max_tokens(max_tokens);
  grpc::ClientContext context;
  const auto stream = stub->Generate(&context, request);
  Answer answer;
  v1::GenerateEvent event;
  while (stream->Read(&event)) {
    if (event.has_accepted()) {
      answer.prompt_tokens = event.accepted().prompt_tokens();
    }
    answer.ids.insert(answer.ids.end(), event.tokens().token_ids().begin(),
                      event.tokens().token_ids().end());
    answer.finished = event.has_finish();
  }
  answer.status = base::FromGrpcStatus(stream->Finish());
  return answer;
}

TEST(NullProxyTest, TheProxyForwardsTheAnswersOfTheWorker) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto worker, StartScriptedWorker({}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto proxy,
                              StartNullProxy({}, worker->target()));
  for (const std::string& target : {worker->target(), proxy->target()}) {
    const Answer answer = Ask(target, 5);
    KVASIR_EXPECT_OK(answer.status);
    EXPECT_EQ(answer.prompt_tokens, 1000u);
    EXPECT_EQ(answer.ids, (std::vector<int32_t>{0, 1, 2, 3, 4}));
    EXPECT_TRUE(answer.finished);
  }
}

TEST(NullProxyTest, TheProxyPassesOnTheErrorIfNoWorkerIsReachable) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto proxy,
                              StartNullProxy({}, "127.0.0.1:1"));
  EXPECT_THAT(Ask(proxy->target(), 1).status,
              StatusIs(absl::StatusCode::kUnavailable,
                       ::testing::HasSubstr("connect")));
}

// The proxy must notice the end of both sides. AddressSanitizer finds a call
// that was not freed.
TEST(NullProxyTest, CancellingTheClientsCallCancelsTheCallToTheWorker) {
  KVASIR_ASSERT_OK_AND_ASSIGN(auto worker, StartScriptedWorker({}));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto proxy,
                              StartNullProxy({}, worker->target()));
  const auto stub = v1::Worker::NewStub(
      grpc::CreateChannel(proxy->target(), grpc::InsecureChannelCredentials()));
  v1::GenerateRequest request;
  request.mutable_sampling()->set_max_tokens(1u << 30);
  grpc::ClientContext context;
  const auto stream = stub->Generate(&context, request);
  v1::GenerateEvent event;
  ASSERT_TRUE(stream->Read(&event));
  context.TryCancel();
  while (stream->Read(&event)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  // Destroying the worker waits until it has no more calls, so a call that
  // never ends would hang here.
  worker.reset();
}

}  // namespace
}  // namespace kvasir::bench
