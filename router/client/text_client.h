// A client of the KServe facade: it streams one completion over
// ModelStreamInfer. Its requests have the same form as those of other
// Triton clients.
#pragma once

#include <grpcpp/security/credentials.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/inference/grpc_service.grpc.pb.h"

namespace kvasir::cli {

struct TextRequest {
  std::string model;  // empty: the server's first model
  std::string prompt;
  int64_t max_tokens = 128;
  double temperature = 1.0;
  double top_p = 1.0;
  int64_t top_k = 0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;
  uint64_t seed = 0;
  bool has_seed = false;
  bool ignore_eos = false;
  std::vector<std::string> stop;
  std::string eviction_budget;  // empty: the served plan's budget
};

struct TextResult {
  std::string text;
  std::string finish_reason;
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;
  absl::Duration time_to_first_token;
  absl::Duration total;

  // prompt_rate: prompt tokens per second until the first output token.
  // decode_rate: output tokens per second after the first one. They are nullopt
  // if there are no such tokens or no time was measured.
  std::optional<double> prompt_rate() const;
  std::optional<double> decode_rate() const;
};

// The client's connection and calls.
// Threads: only one thread at a time may use it.
class TextClient {
 public:
  // With null credentials, the connection is not encrypted.
  explicit TextClient(
      const std::string& endpoint,
      std::shared_ptr<grpc::ChannelCredentials> credentials = nullptr);

  // Returns the names of the models that accept requests now. UNAVAILABLE if no
  // server answers within `timeout`.
  absl::StatusOr<std::vector<std::string>> ReadyModels(absl::Duration timeout);

  // Returns the model's max_model_len: the most tokens that prompt and output
  // may have together. nullopt if the server does not report it;
  // INVALID_ARGUMENT if the reported value is not an integer of at least 2.
  absl::StatusOr<std::optional<int64_t>> MaxModelLen(const std::string& model,
                                                     absl::Duration timeout);

  // Streams one completion and calls `on_text` for each piece of new text.
  // Returns the server's error if the request fails.
  absl::StatusOr<TextResult> Generate(
      const TextRequest& request,
      const std::function<void(std::string_view)>& on_text);

 private:
  // Converts gRPC's status. Adds an explanation where gRPC's own text does not
  // suffice, for example if the server does not have this service.
  absl::Status Explained(const grpc::Status& status,
                         const grpc::ClientContext& context) const;

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
  const std::string endpoint_;
};

}  // namespace kvasir::cli
