// Measures how many heap bytes are allocated for a prompt of 64K token ids,
// from gRPC's parsing of the message until the router has the request.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/facades/kserve/stream.h"
#include "router/facades/vllm_engine/prepare.h"
#include "router/facades/vllm_engine/request.h"
#include "router/facades/vllm_inference/prepare.h"
#include "router/facades/vllm_inference/request.h"
#include "router/testing/call_testing.h"
#include "router/testing/kserve_testing.h"

namespace {

// If this is not null, the size of each allocation is added to `*heap_bytes`.
int64_t* heap_bytes = nullptr;

void* CountedAllocate(std::size_t bytes, std::size_t alignment) {
  if (heap_bytes != nullptr) *heap_bytes += static_cast<int64_t>(bytes);
  const std::size_t whole = (bytes + alignment) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, whole);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) {
  return CountedAllocate(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return CountedAllocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace kvasir::router {
namespace {

constexpr size_t kTokens = 64 << 10;

// Returns random ids from a vocabulary of usual size.
std::vector<int32_t> Ids() {
  std::vector<int32_t> ids(kTokens);
  uint32_t random = 1;
  for (int32_t& id : ids) {
    random = random * 1664525U + 1013904223U;
    id = static_cast<int32_t>(random % 128000U);
  }
  return ids;
}

class PromptBytesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    router_.SetMaxModelLen(2 * kTokens);
    backend_->router = &router_;
    backend_->tokenizer = std::make_shared<ManualRunner>();
  }
  // Calls `read`, which parses a message and submits its request. Returns the
  // heap bytes that this allocates, divided by the prompt's size (4 bytes for
  // each token). Freed bytes are not subtracted.
  template <typename Read>
  double Ratio(const char* facade, Read read) {
    int64_t taken = 0;
    heap_bytes = &taken;
    read();
    heap_bytes = nullptr;
    const double ratio = static_cast<double>(taken) / (4.0 * kTokens);
    std::printf("%s: %.2f x the prompt's bytes\n", facade, ratio);
    RecordProperty(facade, std::to_string(ratio));
    return ratio;
  }
  void ExpectSubmitted() {
    ASSERT_EQ(router_.num_requests(), 1);
    EXPECT_EQ(router_.WaitFor(0)->request().prompt.ToIds(), Ids());
  }

  FakeRouter router_;
  std::shared_ptr<KserveBackend> backend_ = std::make_shared<KserveBackend>();
};

class Sink final
    : public FakeWriter<inference::ModelStreamInferResponse, KserveStreamSink> {
 public:
  void Read() override {}
};

TEST_F(PromptBytesTest,
       AKserveRequestAllocatesItsMessageAndOneCopyOfThePromptIds) {
  const std::vector<int32_t> ids = Ids();
  InferRequestBuilder builder("tiny", "a");
  builder
      .Numbers<int32_t>("input_ids", "INT32",
                        {1, static_cast<int64_t>(ids.size())}, ids)
      .Int("request_output_len", 1, {1, 1});
  const std::string wire = builder.Build().SerializeAsString();
  const auto strand = std::make_shared<ManualRunner>();
  const auto tokenizer =
      std::static_pointer_cast<ManualRunner>(backend_->tokenizer);
  Sink sink;
  const auto stream =
      std::make_shared<KserveStream>(backend_, KserveCall(), strand, &sink);
  const double ratio = Ratio("kserve", [&] {
    auto message = std::make_shared<inference::ModelInferRequest>();
    ASSERT_TRUE(message->ParseFromString(wire));
    stream->OnRead(std::move(message));
    while (strand->RunOne() || tokenizer->RunOne()) {
    }
  });
  EXPECT_LE(ratio, 2.2);
  EXPECT_GE(ratio, 2.0) << "the counter does not count";
  ExpectSubmitted();
  stream->OnCancelled();
  while (strand->RunOne()) {
  }
}

template <typename Request, typename Parse, typename Prepare>
auto Prompt(const std::string& wire, Parse parse, Prepare prepare) {
  Request message;
  KVASIR_CHECK(message.ParseFromString(wire));
  auto request = parse(message);
  KVASIR_CHECK(request.ok());
  kvasir::v1::WorkerInfo info;
  info.set_max_model_len(2 * kTokens);
  auto prepared = prepare(*std::move(request), info,
                          std::shared_ptr<const TextCodec>(), FacadeLimits());
  KVASIR_CHECK(prepared.ok());
  return prepared->prompt;
}

// The ids are varints in these messages, so protobuf appends them to a list
// that doubles its capacity when it is full. The allocations for this list can
// add up to four times the prompt's size. The copy of the ids adds the prompt's
// size once more.
TEST_F(PromptBytesTest, AVllmRequestAllocatesItsListOfIdsAndOneCopyOfThem) {
  vllm::grpc::engine::GenerateRequest engine;
  vllm::GenerateRequest inference;
  inference.mutable_response()->set_output_text(false);
  for (const int32_t id : Ids()) {
    engine.mutable_tokenized()->add_input_ids(static_cast<uint32_t>(id));
    inference.mutable_token_ids()->add_ids(static_cast<uint32_t>(id));
  }
  const std::string engine_wire = engine.SerializeAsString();
  const std::string inference_wire = inference.SerializeAsString();
  proto::TokenBytes prompt;
  EXPECT_LE(Ratio("vllm_engine",
                  [&] {
                    prompt = Prompt<vllm::grpc::engine::GenerateRequest>(
                        engine_wire, ParseVllmEngineRequest,
                        PrepareVllmEngineCall);
                  }),
            5.6);
  EXPECT_EQ(prompt.ToIds(), Ids());
  EXPECT_LE(Ratio("vllm_inference",
                  [&] {
                    prompt = Prompt<vllm::GenerateRequest>(
                        inference_wire,
                        [](const vllm::GenerateRequest& message) {
                          return ParseVllmInferenceRequest(message, true);
                        },
                        PrepareVllmInferenceCall);
                  }),
            5.6);
  EXPECT_EQ(prompt.ToIds(), Ids());
}

}  // namespace
}  // namespace kvasir::router
