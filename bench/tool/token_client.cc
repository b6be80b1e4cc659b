#include "bench/tool/token_client.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/grpc_channel.h"
#include "base/net/grpc_status.h"
#include "base/status_macros.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/kvasir/v1/worker.grpc.pb.h"

namespace kvasir::cli {
namespace {

// Encodes ids as little-endian 32-bit integers, as both protocols require.
std::string BytesOf(const std::vector<int32_t>& ids) {
  std::string bytes(ids.size() * sizeof(int32_t), '\0');
  std::memcpy(bytes.data(), ids.data(), bytes.size());
  return bytes;
}

template <typename T>
std::string BytesOfOne(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

class RouterTokenClient final : public TokenClient {
 public:
  RouterTokenClient(
      const std::string& endpoint,
      const std::shared_ptr<grpc::ChannelCredentials>& credentials)
      : stub_(inference::GRPCInferenceService::NewStub(
            base::NewGrpcChannel(endpoint, credentials))) {}

  absl::StatusOr<TokenResult> Generate(const TokenRequest& request) override {
    inference::ModelInferRequest infer;
    infer.set_model_name(request.model);
    infer.set_id(request.request_id);
    AddInput("input_ids", "INT32", request.prompt_ids.size(),
             BytesOf(request.prompt_ids), &infer);
    AddInput("request_output_len", "UINT32", 1, BytesOfOne(request.max_tokens),
             &infer);
    AddInput("end_id", "INT32", 1, BytesOfOne(int32_t{-1}), &infer);
    AddInput("streaming", "BOOL", 1, std::string(1, '\1'), &infer);

    const absl::Time start = absl::Now();
    grpc::ClientContext context;
    const auto stream = stub_->ModelStreamInfer(&context);
    if (stream->Write(infer)) stream->WritesDone();
    TokenResult result;
    absl::Status failure;
    inference::ModelStreamInferResponse response;
    while (stream->Read(&response)) {
      if (!response.error_message().empty()) {
        failure = absl::InternalError(response.error_message());
        continue;
      }
      const int64_t tokens = TokensIn(response.infer_response());
      if (tokens > 0) result.arrivals.push_back({absl::Now() - start, tokens});
    }
    const grpc::Status status = stream->Finish();
    result.total = absl::Now() - start;
    KVASIR_RETURN_IF_ERROR(base::FromGrpcStatus(status));
    KVASIR_RETURN_IF_ERROR(failure);
    return result;
  }

 private:
  static void AddInput(const char* name, const char* datatype, size_t count,
                       std::string raw, inference::ModelInferRequest* infer) {
    auto* const input = infer->add_inputs();
    input->set_name(name);
    input->set_datatype(datatype);
    input->add_shape(static_cast<int64_t>(count));
    infer->add_raw_input_contents(std::move(raw));
  }

  // The number of tokens in a response, whose output_ids have the shape [1, n,
  // tokens].
  static int64_t TokensIn(const inference::ModelInferResponse& response) {
    for (const auto& output : response.outputs()) {
      if (output.name() == "output_ids" && output.shape_size() == 3) {
        return output.shape(2);
      }
    }
    return 0;
  }

  const std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
};

class WorkerTokenClient final : public TokenClient {
 public:
  WorkerTokenClient(
      const std::string& endpoint,
      const std::shared_ptr<grpc::ChannelCredentials>& credentials)
      : stub_(kvasir::v1::Worker::NewStub(
            base::NewGrpcChannel(endpoint, credentials))) {}

  absl::StatusOr<TokenResult> Generate(const TokenRequest& request) override {
    kvasir::v1::GenerateRequest generate;
    generate.set_request_id(request.request_id);
    generate.set_prompt_token_ids(BytesOf(request.prompt_ids));
    kvasir::v1::SamplingParams* const sampling = generate.mutable_sampling();
    sampling->set_top_p(1.0f);
    sampling->set_repetition_penalty(1.0f);
    sampling->set_n(1);
    sampling->set_max_tokens(request.max_tokens);
    sampling->set_ignore_eos(true);

    const absl::Time start = absl::Now();
    grpc::ClientContext context;
    const auto stream = stub_->Generate(&context, generate);
    TokenResult result;
    kvasir::v1::GenerateEvent event;
    while (stream->Read(&event)) {
      if (!event.has_tokens()) continue;
      result.arrivals.push_back(
          {absl::Now() - start, event.tokens().token_ids_size()});
    }
    const grpc::Status status = stream->Finish();
    result.total = absl::Now() - start;
    KVASIR_RETURN_IF_ERROR(base::FromGrpcStatus(status));
    return result;
  }

 private:
  const std::unique_ptr<kvasir::v1::Worker::Stub> stub_;
};

}  // namespace

int64_t TokenResult::num_tokens() const {
  int64_t sum = 0;
  for (const Arrival& arrival : arrivals) sum += arrival.num_tokens;
  return sum;
}

std::unique_ptr<TokenClient> MakeRouterTokenClient(
    const std::string& endpoint,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  return std::make_unique<RouterTokenClient>(endpoint, credentials);
}

std::unique_ptr<TokenClient> MakeWorkerTokenClient(
    const std::string& endpoint,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  return std::make_unique<WorkerTokenClient>(endpoint, credentials);
}

absl::StatusOr<kvasir::v1::WorkerInfo> GetWorkerInfo(
    const std::string& endpoint,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    absl::Duration timeout) {
  const auto stub =
      kvasir::v1::Worker::NewStub(base::NewGrpcChannel(endpoint, credentials));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  kvasir::v1::WorkerInfo info;
  KVASIR_RETURN_IF_ERROR(base::StatusOfCall(
      stub->GetInfo(&context, kvasir::v1::GetInfoRequest(), &info), context));
  return info;
}

}  // namespace kvasir::cli
