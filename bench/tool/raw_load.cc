#include "bench/tool/raw_load.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/net/grpc_callbacks.h"
#include "base/net/grpc_status.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"
#include "proto/vllm/engine.grpc.pb.h"
#include "proto/vllm/inference.grpc.pb.h"

namespace kvasir::cli {
namespace {

using RawStub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

constexpr int64_t kVocabulary = 50000;

int32_t IdAt(int64_t i) {
  return static_cast<int32_t>((i * 7919 + 1) % kVocabulary);
}

std::string PromptBytes(int64_t num_tokens) {
  std::string bytes;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int32_t id = IdAt(i);
    bytes.append(reinterpret_cast<const char*>(&id), sizeof id);
  }
  return bytes;
}

template <typename T>
std::string BytesOfOne(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename Message>
bool Decode(const grpc::ByteBuffer& buffer, Message* message) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return false;
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return message->ParseFromString(bytes);
}

// Returns the request with `id`, which must be shorter than 128 bytes.
grpc::ByteBuffer WithId(const RawCall& call, const std::string& id) {
  constexpr int kLengthDelimited = 2;
  std::string field;
  field.push_back(static_cast<char>(call.id_field << 3 | kLengthDelimited));
  field.push_back(static_cast<char>(id.size()));
  field.append(id);
  const grpc::Slice slices[] = {call.request, grpc::Slice(field)};
  return grpc::ByteBuffer(slices, 2);
}

void AddInput(const char* name, const char* datatype, int64_t count,
              std::string raw, inference::ModelInferRequest* infer) {
  auto* const input = infer->add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  input->add_shape(count);
  infer->add_raw_input_contents(std::move(raw));
}

// The state that all calls of one RawLoad::Run share.
struct Round {
  const RawCall* call = nullptr;
  std::vector<std::unique_ptr<RawStub>>* stubs = nullptr;
  bool read = false;
  uint64_t first_id = 0;
  int requests = 0;

  base::Mutex mutex;
  base::CondVar changed;
  int started ABSL_GUARDED_BY(mutex) = 0;
  int running ABSL_GUARDED_BY(mutex) = 0;
  RawRound result ABSL_GUARDED_BY(mutex);
  absl::Status failure ABSL_GUARDED_BY(mutex);
};

void StartNext(Round* round);

// One call. At its end, it starts the next call of the round and deletes
// itself.
class OneCall final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  OneCall(Round* round, int index)
      : round_(round),
        request_(WithId(
            *round->call,
            absl::StrCat("bench-",
                         round->first_id + static_cast<uint64_t>(index)))),
        start_(base::Clock::Real().Now()) {
    auto& stubs = *round->stubs;
    stubs[static_cast<size_t>(index) % stubs.size()]->PrepareBidiStreamingCall(
        &context_, round->call->method, {}, this);
    StartWriteLast(&request_, grpc::WriteOptions());
    StartRead(&response_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (first_ == absl::ZeroDuration()) {
      first_ = base::Clock::Real().Now() - start_;
    }
    if (round_->read) {
      const int64_t tokens = round_->call->tokens_in(response_);
      if (tokens < 0) wrong_ = true;
      tokens_ += std::max<int64_t>(tokens, 0);
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    const absl::Duration total = base::Clock::Real().Now() - start_;
    Round* const round = round_;
    {
      base::MutexLock lock(&round->mutex);
      if (!status.ok()) round->failure.Update(base::FromGrpcStatus(status));
      if (wrong_) {
        round->failure.Update(absl::InternalError(absl::StrCat(
            round->call->method,
            ": the server sent an error or a message that is not valid")));
      }
      round->result.first_ms.push_back(absl::ToDoubleMilliseconds(first_));
      round->result.total_ms.push_back(absl::ToDoubleMilliseconds(total));
      round->result.tokens += tokens_;
    }
    delete this;
    StartNext(round);
  }

 private:
  Round* const round_;
  const grpc::ByteBuffer request_;
  const absl::Time start_;
  grpc::ByteBuffer response_;
  grpc::ClientContext context_;
  absl::Duration first_;
  int64_t tokens_ = 0;
  bool wrong_ = false;
};

void StartNext(Round* round) {
  int index = 0;
  {
    base::MutexLock lock(&round->mutex);
    if (round->started == round->requests || !round->failure.ok()) {
      --round->running;
      round->changed.SignalAll();
      return;
    }
    index = round->started++;
  }
  new OneCall(round, index);
}

}  // namespace

RawCall WorkerRawCall(int64_t prompt_tokens, uint32_t max_tokens) {
  kvasir::v1::GenerateRequest request;
  request.set_prompt_token_ids(PromptBytes(prompt_tokens));
  kvasir::v1::SamplingParams* const sampling = request.mutable_sampling();
  sampling->set_top_p(1.0f);
  sampling->set_repetition_penalty(1.0f);
  sampling->set_n(1);
  sampling->set_max_tokens(max_tokens);
  sampling->set_ignore_eos(true);
  return {.method = "/kvasir.v1.Worker/Generate",
          .request = grpc::Slice(request.SerializeAsString()),
          .id_field = kvasir::v1::GenerateRequest::kRequestIdFieldNumber,
          .tokens_in = [](const grpc::ByteBuffer& buffer) -> int64_t {
            kvasir::v1::GenerateEvent event;
            if (!Decode(buffer, &event)) return -1;
            return event.tokens().token_ids_size();
          }};
}

RawCall KserveRawCall(const std::string& model, int64_t prompt_tokens,
                      uint32_t max_tokens) {
  inference::ModelInferRequest request;
  request.set_model_name(model);
  AddInput("input_ids", "INT32", prompt_tokens, PromptBytes(prompt_tokens),
           &request);
  AddInput("request_output_len", "UINT32", 1, BytesOfOne(max_tokens), &request);
  AddInput("end_id", "INT32", 1, BytesOfOne(int32_t{-1}), &request);
  AddInput("streaming", "BOOL", 1, std::string(1, '\1'), &request);
  return {
      .method = "/inference.GRPCInferenceService/ModelStreamInfer",
      .request = grpc::Slice(request.SerializeAsString()),
      .id_field = inference::ModelInferRequest::kIdFieldNumber,
      .tokens_in = [](const grpc::ByteBuffer& buffer) -> int64_t {
        inference::ModelStreamInferResponse response;
        if (!Decode(buffer, &response) || !response.error_message().empty()) {
          return -1;
        }
        for (const auto& output : response.infer_response().outputs()) {
          // the shape is [1, n, tokens]
          if (output.name() == "output_ids" && output.shape_size() == 3) {
            return output.shape(2);
          }
        }
        return 0;
      }};
}

RawCall VllmEngineRawCall(int64_t prompt_tokens, uint32_t max_tokens) {
  vllm::grpc::engine::GenerateRequest request;
  for (int64_t i = 0; i < prompt_tokens; ++i) {
    request.mutable_tokenized()->add_input_ids(static_cast<uint32_t>(IdAt(i)));
  }
  request.set_stream(true);
  auto* const sampling = request.mutable_sampling_params();
  sampling->set_temperature(0.0f);
  sampling->set_max_tokens(max_tokens);
  sampling->set_ignore_eos(true);
  return {
      .method = "/vllm.grpc.engine.VllmEngine/Generate",
      .request = grpc::Slice(request.SerializeAsString()),
      .id_field = vllm::grpc::engine::GenerateRequest::kRequestIdFieldNumber,
      .tokens_in = [](const grpc::ByteBuffer& buffer) -> int64_t {
        vllm::grpc::engine::GenerateResponse response;
        if (!Decode(buffer, &response)) return -1;
        return response.chunk().token_ids_size();
      }};
}

RawCall VllmInferenceRawCall(int64_t prompt_tokens, uint32_t max_tokens) {
  vllm::GenerateRequest request;
  for (int64_t i = 0; i < prompt_tokens; ++i) {
    request.mutable_token_ids()->add_ids(static_cast<uint32_t>(IdAt(i)));
  }
  request.mutable_stopping()->set_max_new_tokens(max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_response()->set_output_text(false);
  request.mutable_response()->set_output_token_ids(true);
  return {.method = "/vllm.Inference/GenerateStream",
          .request = grpc::Slice(request.SerializeAsString()),
          .id_field = vllm::GenerateRequest::kRequestIdFieldNumber,
          .tokens_in = [](const grpc::ByteBuffer& buffer) -> int64_t {
            vllm::GenerateResponse response;
            if (!Decode(buffer, &response)) return -1;
            return response.outputs().token_ids_size();
          }};
}

struct RawLoad::Connections {
  std::vector<std::unique_ptr<RawStub>> stubs;
};

RawLoad::RawLoad(const std::string& target,
                 const std::shared_ptr<grpc::ChannelCredentials>& credentials)
    : connections_(std::make_unique<Connections>()) {
  base::KeepGrpcCallbackThreads();
  // Opens two connections, as many as a router has to a worker.
  for (int i = 0; i < 2; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    connections_->stubs.push_back(
        std::make_unique<RawStub>(grpc::CreateCustomChannel(
            target,
            credentials == nullptr ? grpc::InsecureChannelCredentials()
                                   : credentials,
            arguments)));
  }
}

RawLoad::~RawLoad() = default;

absl::StatusOr<RawRound> RawLoad::Run(const RawCall& call, int requests,
                                      int concurrency, bool read) {
  Round round;
  round.call = &call;
  round.stubs = &connections_->stubs;
  round.read = read;
  round.first_id = next_id_;
  round.requests = requests;
  next_id_ += static_cast<uint64_t>(requests);
  const int lanes = std::min(concurrency, requests);
  {
    base::MutexLock lock(&round.mutex);
    round.running = lanes;
  }
  const absl::Time start = base::Clock::Real().Now();
  for (int lane = 0; lane < lanes; ++lane) StartNext(&round);
  base::MutexLock lock(&round.mutex);
  while (round.running > 0) round.changed.Wait(&round.mutex);
  round.result.took = base::Clock::Real().Now() - start;
  if (!round.failure.ok()) return round.failure;
  return std::move(round.result);
}

}  // namespace kvasir::cli
