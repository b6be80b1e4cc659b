// Tests of the services over real gRPC, with a scripted router.
#include "router/facades/vllm_inference/service.h"

#include <grpcpp/generic/generic_stub.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/testing/byte_codec.h"
#include "router/testing/facade_server.h"

namespace kvasir::router {
namespace {

using ::testing::HasSubstr;

class VllmInferenceServiceTest : public FacadeServerTest {
 protected:
  void SetUp() override {
    FacadeOptions options;
    options.server_version = "1.2.3";
    options.codec = std::make_shared<ByteCodec>();
    service_ = std::make_unique<VllmInferenceService>(options, &router_);
    Listen(service_->services());
    stub_ = vllm::Inference::NewStub(channel_);
    control_ = vllm::Control::NewStub(channel_);
  }
  void TearDown() override {
    stub_.reset();
    control_.reset();
    StopListening();
    service_.reset();
  }
  static vllm::GenerateRequest Message(const std::string& id) {
    vllm::GenerateRequest message;
    message.set_request_id(id);
    message.mutable_token_ids()->add_ids(7);
    return message;
  }

  grpc::Status RawCall(const std::string& method, const std::string& bytes) {
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer message(&slice, 1);
    grpc::ByteBuffer answer;
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> raw(
        channel_);
    grpc::ClientContext context;
    std::promise<grpc::Status> done;
    raw.UnaryCall(&context, method, {}, &message, &answer,
                  [&done](grpc::Status status) { done.set_value(status); });
    return done.get_future().get();
  }

  std::unique_ptr<VllmInferenceService> service_;
  std::unique_ptr<vllm::Inference::Stub> stub_;
  std::unique_ptr<vllm::Control::Stub> control_;
};

TEST_F(VllmInferenceServiceTest, AGenerateStreamCallStreamsItsTextAndEndsOk) {
  grpc::ClientContext context;
  const auto reader = stub_->GenerateStream(&context, Message("r1"));
  router_.WaitFor(0)->Complete("ab");
  vllm::GenerateResponse response;
  std::string text;
  while (reader->Read(&response)) text += response.outputs().text();
  EXPECT_EQ(text, "ab");
  EXPECT_EQ(response.outputs().finish_info().num_output_tokens(), 2);
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(VllmInferenceServiceTest, AGenerateCallReturnsItsTextInOneResponse) {
  std::thread engine([this] { router_.WaitFor(0)->Complete("ab"); });
  grpc::ClientContext context;
  vllm::GenerateResponse response;
  EXPECT_TRUE(stub_->Generate(&context, Message("r1"), &response).ok());
  engine.join();
  EXPECT_EQ(response.outputs().text(), "ab");
  EXPECT_EQ(response.prompt_info().num_prompt_tokens(), 1);
  EXPECT_EQ(response.outputs().finish_info().finish_reason(),
            vllm::FinishInfo::LENGTH);
}

TEST_F(VllmInferenceServiceTest, AModelThatIsNotServedIsNotFound) {
  vllm::GenerateRequest message = Message("r1");
  message.set_model("other");
  grpc::ClientContext context;
  vllm::GenerateResponse response;
  EXPECT_EQ(stub_->Generate(&context, message, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(VllmInferenceServiceTest, AResetOfTheCallCancelsTheRequest) {
  grpc::ClientContext context;
  const auto reader = stub_->GenerateStream(&context, Message("r1"));
  const auto request = router_.WaitFor(0);
  context.TryCancel();
  WaitUntilCancelled(*request);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  request->Done(absl::CancelledError("cancelled"));
}

TEST_F(VllmInferenceServiceTest, ARepeatedAbortOfARequestSucceeds) {
  grpc::ClientContext context;
  const auto reader = stub_->GenerateStream(&context, Message("r1"));
  const auto request = router_.WaitFor(0);
  vllm::AbortRequest abort;
  abort.add_request_ids("r1");
  vllm::AbortResponse nothing;
  for (int i = 0; i < 2; ++i) {
    grpc::ClientContext own;
    EXPECT_TRUE(control_->Abort(&own, abort, &nothing).ok());
    WaitUntilCancelled(*request);
  }
  vllm::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.outputs().finish_info().finish_reason(),
            vllm::FinishInfo::ABORTED);
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());
  request->Done(absl::CancelledError("cancelled"));
}

TEST_F(VllmInferenceServiceTest, ARefusedStreamEndsWithAStatusAndNoResponse) {
  router_.Refuse(absl::ResourceExhaustedError("the queue is full"));
  grpc::ClientContext context;
  const auto reader = stub_->GenerateStream(&context, Message("r1"));
  vllm::GenerateResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(VllmInferenceServiceTest, TheServiceDescribesItsServerAndItsModel) {
  vllm::ServerInfo server;
  grpc::ClientContext c1;
  ASSERT_TRUE(control_->GetServerInfo(&c1, {}, &server).ok());
  EXPECT_EQ(server.max_model_len(), 1024);
  EXPECT_EQ(server.engine_version(), "1.2.3");
  vllm::ModelInfo model;
  grpc::ClientContext c2;
  ASSERT_TRUE(control_->GetModelInfo(&c2, {}, &model).ok());
  EXPECT_EQ(model.served_model_name(), "tiny");
  vllm::GetKvEventSourcesResponse sources;
  grpc::ClientContext c3;
  EXPECT_TRUE(control_->GetKvEventSources(&c3, {}, &sources).ok());
  EXPECT_EQ(sources.ByteSizeLong(), 0);
}

// By itself, gRPC 1.51 would answer UNIMPLEMENTED without a text, as if the RPC
// did not exist.
TEST_F(VllmInferenceServiceTest,
       TheErrorForAMessageThatCannotBeParsedNamesTheMethod) {
  for (const std::string method :
       {"/vllm.Inference/Generate", "/vllm.Inference/GenerateStream",
        "/vllm.Control/Abort"}) {
    const grpc::Status status = RawCall(method, std::string(100, '\xff'));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(),
              "the request is not a valid protobuf message for " + method);
  }
  EXPECT_EQ(router_.num_requests(), 0);
  // Gateways call unknown RPCs to find out what kind of server this is, so the
  // code must stay UNIMPLEMENTED.
  EXPECT_EQ(
      RawCall("/vllm.Inference/Other", std::string(9, '\xff')).error_code(),
      grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(VllmInferenceServiceTest, TheErrorForAnRpcThatIsNotImplementedNamesIt) {
  const auto* service = vllm::NotBuilt::descriptor()->file()->service(0);
  int refused = 0;
  for (int i = 0; i < service->method_count(); ++i) {
    const auto* method = service->method(i);
    if (method->input_type() != vllm::NotBuilt::descriptor()) continue;
    const grpc::Status status = RawCall("/vllm.Control/" + method->name(), "");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(
        status.error_message(),
        HasSubstr("vllm.Control/" + method->name() + " is not implemented"));
    ++refused;
  }
  EXPECT_EQ(refused, 17);
}

}  // namespace
}  // namespace kvasir::router
