// Tests of the service over real gRPC, with a scripted router.
#include "router/facades/vllm_engine/service.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "base/sha256.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/testing/byte_codec.h"
#include "router/testing/facade_server.h"

namespace kvasir::router {
namespace {

using ::testing::HasSubstr;
namespace engine = vllm::grpc::engine;
namespace common = smg::grpc::common;

class VllmEngineServiceTest : public FacadeServerTest {
 protected:
  void Start(bool shares_tokenizer = true) {
    // Random text does not compress, so the archive gets more than one chunk.
    std::string noise;
    while (noise.size() < (3 << 20)) {
      noise += base::Sha256Hex(std::to_string(noise.size()));
    }
    folder_.Write("tokenizer.json", noise);
    FacadeOptions options;
    options.codec = std::make_shared<ByteCodec>();
    options.server_version = "1.2.3";
    options.tokenizer_folder = folder_.path();
    options.share_tokenizer = shares_tokenizer;
    service_ = std::make_unique<VllmEngineService>(options, &router_);
    Listen({service_.get()});
    stub_ = engine::VllmEngine::NewStub(channel_);
  }
  void TearDown() override {
    stub_.reset();
    StopListening();
    service_.reset();
  }
  static engine::GenerateRequest Message(const std::string& id) {
    engine::GenerateRequest message;
    message.set_request_id(id);
    message.set_stream(true);
    message.mutable_tokenized()->add_input_ids(7);
    return message;
  }

  const base::TempFolder folder_;
  std::unique_ptr<VllmEngineService> service_;
  std::unique_ptr<engine::VllmEngine::Stub> stub_;
};

TEST_F(VllmEngineServiceTest, AGenerateCallStreamsItsTokensAndEndsOk) {
  Start();
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Message("r1"));
  router_.WaitFor(0)->Complete("ab");
  engine::GenerateResponse response;
  std::string ids;
  while (reader->Read(&response)) {
    for (const uint32_t id : response.chunk().token_ids()) {
      ids.push_back(static_cast<char>(id));
    }
  }
  EXPECT_EQ(ids, "ab");
  EXPECT_EQ(response.complete().finish_reason(), "length");
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(VllmEngineServiceTest, AnAbortEndsOnlyRequestsOfTheCallersTenant) {
  Start();
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Message("r1"));
  const auto request = router_.WaitFor(0);
  engine::AbortRequest abort;
  abort.add_request_ids("r1");
  engine::AbortResponse nothing;
  grpc::ClientContext others;
  others.AddMetadata("x-tenant-id", "other");
  EXPECT_TRUE(stub_->Abort(&others, abort, &nothing).ok());
  EXPECT_FALSE(request->cancelled());
  for (int i = 0; i < 2; ++i) {
    grpc::ClientContext own;
    EXPECT_TRUE(stub_->Abort(&own, abort, &nothing).ok());
    WaitUntilCancelled(*request);
  }
  engine::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.complete().finish_reason(), "abort");
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());
  request->Done(absl::CancelledError("cancelled"));
}

// The number of ids is limited, because each id costs a lookup and a task for
// each request with this id.
TEST_F(VllmEngineServiceTest, AnAbortOfTooManyIdsIsRefused) {
  Start();
  engine::AbortRequest abort;
  for (int i = 0; i < 1024; ++i) abort.add_request_ids("r1");
  engine::AbortResponse nothing;
  grpc::ClientContext all;
  EXPECT_TRUE(stub_->Abort(&all, abort, &nothing).ok());
  abort.add_request_ids("r1");
  grpc::ClientContext more;
  const grpc::Status status = stub_->Abort(&more, abort, &nothing);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            "request_ids: want at most 1024 ids, have 1025");
}

TEST_F(VllmEngineServiceTest, AResetOfTheCallCancelsTheRequest) {
  Start();
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Message("r1"));
  const auto request = router_.WaitFor(0);
  context.TryCancel();
  WaitUntilCancelled(*request);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  request->Done(absl::CancelledError("cancelled"));
}

TEST_F(VllmEngineServiceTest,
       ARefusedStreamEndsWithItsStatusAndWithoutAResponse) {
  Start();
  router_.Refuse(absl::ResourceExhaustedError("the queue is full"));
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, Message("r1"));
  engine::GenerateResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(VllmEngineServiceTest, TheServiceReportsItsModelHealthAndLoad) {
  Start();
  engine::GetModelInfoResponse model;
  grpc::ClientContext c1;
  ASSERT_TRUE(stub_->GetModelInfo(&c1, {}, &model).ok());
  EXPECT_TRUE(model.is_generation());
  EXPECT_EQ(model.served_model_name(), "tiny");
  EXPECT_EQ(model.max_context_length(), 1024);
  EXPECT_EQ(model.max_req_input_len(), 1023);
  EXPECT_EQ(model.tokenizer_path(), "/nonexistent/tiny")
      << "without one a gateway does not ask for the tokenizer";
  engine::HealthCheckResponse health;
  grpc::ClientContext c2;
  ASSERT_TRUE(stub_->HealthCheck(&c2, {}, &health).ok());
  EXPECT_TRUE(health.healthy());
  engine::GetServerInfoResponse info;
  grpc::ClientContext c3;
  ASSERT_TRUE(stub_->GetServerInfo(&c3, {}, &info).ok());
  EXPECT_EQ(info.data_parallel_size(), 1);
  engine::GetLoadsResponse loads;
  grpc::ClientContext c4;
  ASSERT_TRUE(stub_->GetLoads(&c4, {}, &loads).ok());
  EXPECT_EQ(loads.version(), "1.2.3");
  EXPECT_EQ(loads.dp_rank_count(), 1);
  engine::GetLoadsRequest other;
  other.set_dp_rank(1);
  grpc::ClientContext c5;
  ASSERT_TRUE(stub_->GetLoads(&c5, other, &loads).ok());
  EXPECT_EQ(loads.loads_size(), 0);
}

TEST_F(VllmEngineServiceTest,
       TheTokenizerIsSentInChunksAndTheLastChunkHasItsHash) {
  Start();
  grpc::ClientContext context;
  const auto reader = stub_->GetTokenizer(&context, {});
  common::GetTokenizerChunk chunk;
  std::string zip;
  int chunks = 0;
  std::string hash;
  while (reader->Read(&chunk)) {
    EXPECT_EQ(hash, "");
    zip += chunk.data();
    hash = chunk.sha256();
    ++chunks;
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_GT(chunks, 1);
  EXPECT_EQ(hash, base::Sha256Hex(zip));
}

TEST_F(VllmEngineServiceTest,
       TheTokenizersFilesAreServedOnlyIfSharingIsTurnedOn) {
  Start(/*shares_tokenizer=*/false);
  grpc::ClientContext context;
  const auto reader = stub_->GetTokenizer(&context, {});
  common::GetTokenizerChunk chunk;
  EXPECT_FALSE(reader->Read(&chunk));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(status.error_message(),
              HasSubstr("unless its operator shares them"));
}

TEST_F(VllmEngineServiceTest, TheErrorForAnRpcThatIsNotImplementedNamesIt) {
  Start();
  const auto expect = [](const grpc::Status& status, const char* name) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
    EXPECT_THAT(status.error_message(), HasSubstr(name));
  };
  engine::EmbedResponse embedded;
  grpc::ClientContext c1;
  expect(stub_->Embed(&c1, {}, &embedded), "Embed");
  common::FlushCacheResponse flushed;
  grpc::ClientContext c2;
  expect(stub_->FlushCache(&c2, {}, &flushed), "FlushCache");
  common::ProfileResponse profile;
  grpc::ClientContext c3;
  expect(stub_->StartProfile(&c3, {}, &profile), "StartProfile");
  grpc::ClientContext c4;
  expect(stub_->StopProfile(&c4, {}, &profile), "StopProfile");
  grpc::ClientContext c5;
  const auto events = stub_->SubscribeKvEvents(&c5, {});
  common::KvEventBatch batch;
  EXPECT_FALSE(events->Read(&batch));
  expect(events->Finish(), "SubscribeKvEvents");
}

}  // namespace
}  // namespace kvasir::router
