// Tests of the service over real gRPC, with a scripted router.
#include "router/facades/kserve/service.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/net/grpc_server.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/testing/facade_server.h"
#include "router/testing/kserve_testing.h"

namespace kvasir::router {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class KserveServiceTest : public FacadeServerTest {
 protected:
  void SetUp() override {
    FacadeOptions options;
    options.codec = std::make_shared<ByteCodec>();
    options.server_version = "1.2.3";
    options.limits.max_waiting_bytes_per_stream = 1 << 20;
    service_ = std::make_unique<KserveService>(options, &router_);
    Listen({service_.get()});
    stub_ = inference::GRPCInferenceService::NewStub(channel_);
  }
  void TearDown() override {
    stub_.reset();
    StopListening();
    service_.reset();
  }
  static InferRequestBuilder Vllm(const std::string& id, bool stream = true) {
    InferRequestBuilder builder("tiny", id);
    builder.Text("text_input", "hi").Bool("stream", stream);
    return builder;
  }

  std::unique_ptr<KserveService> service_;
  std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
};

TEST_F(KserveServiceTest, ReturnsMetadataOfTheServerAndItsModels) {
  grpc::ClientContext a, b, c, d, e;
  inference::ServerLiveResponse live;
  ASSERT_TRUE(stub_->ServerLive(&a, {}, &live).ok());
  EXPECT_TRUE(live.live());
  inference::ServerReadyResponse ready;
  ASSERT_TRUE(stub_->ServerReady(&b, {}, &ready).ok());
  EXPECT_TRUE(ready.ready());
  inference::ServerMetadataResponse metadata;
  ASSERT_TRUE(stub_->ServerMetadata(&c, {}, &metadata).ok());
  EXPECT_EQ(metadata.name(), "kvasir");
  EXPECT_EQ(metadata.version(), "1.2.3");
  inference::ModelReadyRequest request;
  inference::ModelReadyResponse model;
  request.set_name("tiny");
  ASSERT_TRUE(stub_->ModelReady(&d, request, &model).ok());
  EXPECT_TRUE(model.ready());
  request.set_name("other");
  ASSERT_TRUE(stub_->ModelReady(&e, request, &model).ok());
  EXPECT_FALSE(model.ready());
}

TEST_F(KserveServiceTest, TheModelConfigurationListsTheTensorsOfTheMetadata) {
  grpc::ClientContext a, b, c;
  inference::ModelMetadataRequest metadata_request;
  metadata_request.set_name("tiny");
  inference::ModelMetadataResponse metadata;
  ASSERT_TRUE(stub_->ModelMetadata(&a, metadata_request, &metadata).ok());
  inference::ModelConfigRequest config_request;
  config_request.set_name("tiny");
  inference::ModelConfigResponse response;
  ASSERT_TRUE(stub_->ModelConfig(&b, config_request, &response).ok());
  const inference::ModelConfig& config = response.config();
  EXPECT_TRUE(config.model_transaction_policy().decoupled());
  EXPECT_EQ(config.max_batch_size(), 0);
  EXPECT_EQ(config.instance_group(0).gpus_size(), 1);
  ASSERT_EQ(config.input_size(), metadata.inputs_size());
  for (int i = 0; i < config.input_size(); ++i) {
    EXPECT_EQ(config.input(i).name(), metadata.inputs(i).name());
    EXPECT_TRUE(config.input(i).optional());
  }
  ASSERT_EQ(config.output_size(), metadata.outputs_size());
  for (int i = 0; i < config.output_size(); ++i) {
    EXPECT_EQ(config.output(i).name(), metadata.outputs(i).name());
    EXPECT_NE(config.output(i).data_type(), inference::TYPE_INVALID);
  }
  config_request.set_name("other");
  EXPECT_EQ(stub_->ModelConfig(&c, config_request, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(KserveServiceTest, TheErrorForAnRpcThatIsNotImplementedNamesIt) {
  grpc::ClientContext a, b;
  inference::SystemSharedMemoryRegisterResponse registered;
  const grpc::Status memory =
      stub_->SystemSharedMemoryRegister(&a, {}, &registered);
  EXPECT_EQ(memory.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(memory.error_message(), HasSubstr("SystemSharedMemoryRegister"));
  inference::RepositoryModelLoadResponse loaded;
  const grpc::Status load = stub_->RepositoryModelLoad(&b, {}, &loaded);
  EXPECT_EQ(load.error_code(), grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(load.error_message(), HasSubstr("RepositoryModelLoad"));
}

TEST_F(KserveServiceTest, AUnaryRequestIsAnsweredAndCountedInTheStatistics) {
  std::thread engine([this] { router_.WaitFor(0)->Complete("yo"); });
  grpc::ClientContext context;
  inference::ModelInferResponse response;
  const grpc::Status status =
      stub_->ModelInfer(&context, Vllm("a", false).Build(), &response);
  engine.join();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.id(), "a");
  EXPECT_THAT(StringOutput(response, "text_output"), ElementsAre("hiyo"));
  grpc::ClientContext statistics_context;
  inference::ModelStatisticsResponse statistics;
  ASSERT_TRUE(
      stub_->ModelStatistics(&statistics_context, {}, &statistics).ok());
  EXPECT_EQ(statistics.model_stats(0).inference_count(), 1u);
}

TEST_F(KserveServiceTest,
       AnErrorOfAUnaryCallReachesTheClientWithItsStatusCode) {
  grpc::ClientContext a, b;
  inference::ModelInferResponse response;
  EXPECT_EQ(
      stub_->ModelInfer(&a, InferRequestBuilder("tiny").Build(), &response)
          .error_code(),
      grpc::StatusCode::INVALID_ARGUMENT);
  router_.Refuse(absl::UnavailableError("draining"));
  EXPECT_EQ(
      stub_->ModelInfer(&b, Vllm("a", false).Build(), &response).error_code(),
      grpc::StatusCode::UNAVAILABLE);
}

TEST_F(KserveServiceTest, TheDeadlineOfAUnaryCallCancelsTheRequest) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(300));
  inference::ModelInferResponse response;
  EXPECT_EQ(stub_->ModelInfer(&context, Vllm("a", false).Build(), &response)
                .error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  const auto request = router_.WaitFor(0);
  ASSERT_NE(request, nullptr);
  EXPECT_LT(request->request().deadline, absl::Now() + absl::Seconds(1));
  WaitUntilCancelled(*request);
}

TEST_F(KserveServiceTest,
       AllRequestsOfAStreamAreAnsweredAfterTheClientsHalfClose) {
  constexpr size_t kRequests = 20;
  grpc::ClientContext context;
  auto stream = stub_->ModelStreamInfer(&context);
  for (size_t i = 0; i < kRequests; ++i) {
    ASSERT_TRUE(stream->Write(Vllm("r" + std::to_string(i)).Build()));
  }
  stream->WritesDone();
  std::thread engine([this] {
    // The requests may reach the router in any order, because several
    // threads tokenize.
    for (size_t i = 0; i < kRequests; ++i) {
      const auto request = router_.WaitFor(i);
      request->Emit("<" + request->request().client_request_id);
      request->Emit(">");
      request->Finish();
      request->Done();
    }
  });
  std::map<std::string, std::string> texts;
  std::map<std::string, int> finals;
  inference::ModelStreamInferResponse response;
  while (stream->Read(&response)) {
    const auto& answer = response.infer_response();
    ASSERT_EQ(response.error_message(), "");
    texts[answer.id()] += StringOutput(answer, "text_output").at(0);
    ASSERT_TRUE(FinalFlag(answer).has_value());
    finals[answer.id()] += *FinalFlag(answer) ? 1 : 0;
  }
  engine.join();
  EXPECT_TRUE(stream->Finish().ok());
  ASSERT_EQ(texts.size(), kRequests);
  for (const auto& [id, text] : texts) {
    EXPECT_EQ(text, "<" + id + ">");
    EXPECT_EQ(finals[id], 1);
  }
}

TEST_F(KserveServiceTest, TenantsDoNotShareTheirPrefixCache) {
  const auto submit = [this](const char* tenant, size_t index) {
    grpc::ClientContext context;
    if (tenant != nullptr) context.AddMetadata("x-tenant-id", tenant);
    std::thread engine(
        [this, index] { router_.WaitFor(index)->Complete("x"); });
    inference::ModelInferResponse response;
    EXPECT_TRUE(
        stub_->ModelInfer(&context, Vllm("", false).Build(), &response).ok());
    engine.join();
    return router_.WaitFor(index)->request();
  };
  const CanonicalRequest first = submit("red", 0);
  const CanonicalRequest second = submit("blue", 1);
  const CanonicalRequest third = submit("red", 2);
  const CanonicalRequest without = submit(nullptr, 3);
  EXPECT_EQ(first.tenant, "red");
  EXPECT_NE(first.cache_salt, second.cache_salt);
  EXPECT_EQ(first.cache_salt, third.cache_salt);
  EXPECT_NE(first.cache_salt, "");
  EXPECT_EQ(without.tenant, "");
  EXPECT_EQ(without.cache_salt, "");
}

TEST_F(KserveServiceTest, ADrainEndsStreamsThatTheirClientsKeepOpen) {
  grpc::ClientContext early, late;
  // Set deadlines, so that the reads return even if the drain does not end
  // the streams.
  early.set_deadline(std::chrono::system_clock::now() +
                     std::chrono::seconds(20));
  late.set_deadline(std::chrono::system_clock::now() +
                    std::chrono::seconds(20));
  auto idle = stub_->ModelStreamInfer(&early);
  ASSERT_TRUE(idle->Write(Vllm("a").Build()));
  router_.WaitFor(0)->Complete("x");
  // Text and end of the answer may arrive in one message or in two.
  inference::ModelStreamInferResponse response;
  do {
    ASSERT_TRUE(idle->Read(&response));
  } while (!FinalFlag(response.infer_response()).value_or(false));
  service_->BeginDrain();
  EXPECT_FALSE(idle->Read(&response));
  const grpc::Status ended = idle->Finish();
  EXPECT_EQ(ended.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(ended.error_message(), HasSubstr("draining"));
  // Open another stream on the old connection. The server must still serve it,
  // because a client may not have seen the GOAWAY yet.
  grpc::ClientContext meanwhile;
  auto next = stub_->ModelStreamInfer(&meanwhile);
  ASSERT_TRUE(next->Write(Vllm("b").Build()));
  router_.WaitFor(1)->Complete("x");
  ASSERT_TRUE(next->Read(&response));
  service_->EndStreams();
  while (next->Read(&response)) {
  }
  EXPECT_EQ(next->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  auto opened_late = stub_->ModelStreamInfer(&late);
  EXPECT_FALSE(opened_late->Read(&response));
  EXPECT_EQ(opened_late->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(KserveServiceTest, AResetOfTheStreamCancelsItsRequests) {
  grpc::ClientContext context;
  auto stream = stub_->ModelStreamInfer(&context);
  ASSERT_TRUE(stream->Write(Vllm("a").Build()));
  ASSERT_TRUE(stream->Write(Vllm("b").Build()));
  const auto first = router_.WaitFor(0);
  const auto second = router_.WaitFor(1);
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  WaitUntilCancelled(*first);
  WaitUntilCancelled(*second);
}

TEST_F(KserveServiceTest,
       ARequestsErrorBecomesTheStatusOfTheStreamIfTheClientAsksForIt) {
  grpc::ClientContext context;
  context.AddMetadata("triton_grpc_error", "true");
  auto stream = stub_->ModelStreamInfer(&context);
  ASSERT_TRUE(stream->Write(InferRequestBuilder("tiny", "bad").Build()));
  inference::ModelStreamInferResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(KserveServiceTest, TheCallOfAClientThatNeverReadsIsReset) {
  grpc::ClientContext context;
  auto stream = stub_->ModelStreamInfer(&context);
  ASSERT_TRUE(stream->Write(Vllm("a").Build()));
  const auto request = router_.WaitFor(0);
  ASSERT_NE(request, nullptr);
  const std::string much(64 << 10, 'x');
  for (int i = 0; i < 1000 && !request->cancelled(); ++i) {
    request->Emit(much);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  WaitUntilCancelled(*request);
  EXPECT_EQ(request->reason(), CancelReason::kSlowReader);
  request->Done(absl::CancelledError(""));
  inference::ModelStreamInferResponse response;
  while (stream->Read(&response)) {
  }
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(KserveServiceTest, AServerShutdownCancelsRunningRequests) {
  grpc::ClientContext context;
  auto stream = stub_->ModelStreamInfer(&context);
  ASSERT_TRUE(stream->Write(Vllm("a").Build()));
  const auto request = router_.WaitFor(0);
  server_->Shutdown(absl::Now());
  EXPECT_FALSE(stream->Finish().ok());
  WaitUntilCancelled(*request);
  // These events of the engine come after the end of the call.
  request->Emit("late");
  request->Done(absl::CancelledError(""));
}

// Clients cancel their streams one after the other, each in another state,
// while the engine answers.
TEST_F(KserveServiceTest, StreamsCancelledInAnyStateLeaveNoRequests) {
  std::atomic<bool> stop{false};
  std::thread engine([this, &stop] {
    for (size_t i = 0; !stop; ++i) {
      while (!stop && router_.num_requests() <= i) std::this_thread::yield();
      if (stop) return;
      const auto request = router_.WaitFor(i);
      request->Emit("abc");
      if (i % 3 == 0) request->Finish();
      if (i % 3 != 2) {
        request->Done(i % 3 == 0 ? absl::OkStatus()
                                 : absl::UnavailableError("lost"));
      }
    }
  });
  for (int round = 0; round < 60; ++round) {
    grpc::ClientContext context;
    auto stream = stub_->ModelStreamInfer(&context);
    for (int i = 0; i < round % 4; ++i) {
      stream->Write(Vllm("r" + std::to_string(i)).Build());
    }
    if (round % 2 == 0) {
      inference::ModelStreamInferResponse response;
      if (round % 4 > 0) stream->Read(&response);
    }
    if (round % 5 == 0) {
      stream->Write(
          InferRequestBuilder("tiny", "r0").Bool("stop", true).Build());
    }
    context.TryCancel();
    stream->Finish();
  }
  stop = true;
  engine.join();
  server_->Shutdown(absl::Now());
  for (size_t i = 0; i < router_.num_requests(); ++i) {
    const auto request = router_.WaitFor(i);
    if (i % 3 == 2) WaitUntilCancelled(*request);
  }
}

}  // namespace
}  // namespace kvasir::router
