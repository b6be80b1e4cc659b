// For tests of the KServe facade: requests tensor by tensor, and a tokenizer
// whose ids are bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "proto/inference/grpc_service.pb.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

// Ids 0 to 255 are bytes, kByteEos ends, larger ids do not exist. Characters
// are released when whole; kByteBad is refused in prompts.
inline constexpr int32_t kByteEos = 256;
inline constexpr char kByteBad = '\x01';

class ByteDetokenizer final : public Detokenizer {
 public:
  std::string Push(int32_t id) override;
  std::string Finish() override;

 private:
  std::string held_;
};

class ByteCodec final : public TextCodec {
 public:
  absl::StatusOr<std::vector<int32_t>> EncodePrompt(
      const std::string& text) const override;
  absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const override;
  std::unique_ptr<Detokenizer> NewDetokenizer(std::span<const int32_t>,
                                              bool) const override;
  std::string TokenText(int32_t id) const override;
  bool IsSpecial(int32_t id) const override { return id == kByteEos; }

  static std::vector<int32_t> Ids(const std::string& text);
};

// Builds requests as tritonclient does: everything raw.
class InferRequestBuilder {
 public:
  explicit InferRequestBuilder(const std::string& model = "tiny",
                               const std::string& id = "r1");

  InferRequestBuilder& Raw(const std::string& name, const std::string& datatype,
                           const std::vector<int64_t>& shape,
                           const std::string& raw);
  template <typename T>
  InferRequestBuilder& Numbers(const std::string& name,
                               const std::string& datatype,
                               const std::vector<int64_t>& shape,
                               const std::vector<T>& values) {
    return Raw(name, datatype, shape,
               std::string(reinterpret_cast<const char*>(values.data()),
                           values.size() * sizeof(T)));
  }
  InferRequestBuilder& Bool(const std::string& name, bool value,
                            const std::vector<int64_t>& shape = {1});
  InferRequestBuilder& Int(const std::string& name, int32_t value,
                           const std::vector<int64_t>& shape = {1});
  InferRequestBuilder& Float(const std::string& name, float value,
                             const std::vector<int64_t>& shape = {1});
  InferRequestBuilder& Strings(const std::string& name,
                               const std::vector<std::string>& values,
                               const std::vector<int64_t>& shape);
  InferRequestBuilder& Text(const std::string& name, const std::string& value,
                            const std::vector<int64_t>& shape = {1});
  InferRequestBuilder& Output(const std::string& name);
  inference::InferParameter& Parameter(const std::string& name);
  InferRequestBuilder& WantsEmptyFinal();

  const inference::ModelInferRequest& Build() const { return request_; }

  static std::string EncodeStrings(const std::vector<std::string>& values);

 private:
  inference::ModelInferRequest request_;
};

// What a response holds under a name; nullopt when it is not there.
std::optional<std::string> RawOutput(
    const inference::ModelInferResponse& response, const std::string& name);

std::vector<std::string> StringOutput(
    const inference::ModelInferResponse& response, const std::string& name);

template <typename T>
std::vector<T> NumberOutput(const inference::ModelInferResponse& response,
                            const std::string& name) {
  const std::string raw = RawOutput(response, name).value_or("");
  std::vector<T> values(raw.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), raw.data(), values.size() * sizeof(T));
  }
  return values;
}

std::vector<int64_t> OutputShape(const inference::ModelInferResponse& response,
                                 const std::string& name);

// True, false, or nullopt when the parameter is missing or no bool.
std::optional<bool> FinalFlag(const inference::ModelInferResponse& response);

}  // namespace kvasir::router
