// For tests of the KServe facade: requests tensor by tensor, and a tokenizer
// whose ids are bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
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
  std::string Push(int32_t id) override {
    if (id < 0 || id > 255) return "";
    held_.push_back(static_cast<char>(id));
    const auto lead = static_cast<unsigned char>(held_[0]);
    const size_t want = lead < 0xC0 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (held_.size() < want) return "";
    return std::exchange(held_, "");
  }
  std::string Finish() override {
    return held_.empty() ? "" : std::string("\xEF\xBF\xBD");
  }

 private:
  std::string held_;
};

class ByteCodec final : public TextCodec {
 public:
  absl::StatusOr<std::vector<int32_t>> EncodePrompt(
      const std::string& text) const override {
    if (text.find(kByteBad) != std::string::npos) {
      return absl::InvalidArgumentError("text has a byte 1");
    }
    return Ids(text);
  }
  absl::StatusOr<std::vector<int32_t>> EncodeWord(
      const std::string& text) const override {
    if (text == "</s>") return std::vector<int32_t>{kByteEos};
    return Ids(text);
  }
  std::unique_ptr<Detokenizer> NewDetokenizer(std::span<const int32_t>,
                                              bool) const override {
    return std::make_unique<ByteDetokenizer>();
  }
  std::string TokenText(int32_t id) const override {
    return id >= 0 && id < 128 ? std::string(1, static_cast<char>(id)) : "";
  }
  bool IsSpecial(int32_t id) const override { return id == kByteEos; }

  static std::vector<int32_t> Ids(const std::string& text) {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
};

// Builds requests as tritonclient does: everything raw.
class InferRequestBuilder {
 public:
  explicit InferRequestBuilder(const std::string& model = "tiny",
                               const std::string& id = "r1") {
    request_.set_model_name(model);
    request_.set_id(id);
  }

  InferRequestBuilder& Raw(const std::string& name, const std::string& datatype,
                           const std::vector<int64_t>& shape,
                           const std::string& raw) {
    auto* input = request_.add_inputs();
    input->set_name(name);
    input->set_datatype(datatype);
    for (const int64_t dim : shape) input->add_shape(dim);
    request_.add_raw_input_contents(raw);
    return *this;
  }
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
                            const std::vector<int64_t>& shape = {1}) {
    return Raw(name, "BOOL", shape, std::string(1, value ? '\1' : '\0'));
  }
  InferRequestBuilder& Int(const std::string& name, int32_t value,
                           const std::vector<int64_t>& shape = {1}) {
    return Numbers<int32_t>(name, "INT32", shape, {value});
  }
  InferRequestBuilder& Float(const std::string& name, float value,
                             const std::vector<int64_t>& shape = {1}) {
    return Numbers<float>(name, "FP32", shape, {value});
  }
  InferRequestBuilder& Strings(const std::string& name,
                               const std::vector<std::string>& values,
                               const std::vector<int64_t>& shape) {
    return Raw(name, "BYTES", shape, EncodeStrings(values));
  }
  InferRequestBuilder& Text(const std::string& name, const std::string& value,
                            const std::vector<int64_t>& shape = {1}) {
    return Strings(name, {value}, shape);
  }
  InferRequestBuilder& Output(const std::string& name) {
    request_.add_outputs()->set_name(name);
    return *this;
  }
  inference::InferParameter& Parameter(const std::string& name) {
    return (*request_.mutable_parameters())[name];
  }
  InferRequestBuilder& WantsEmptyFinal() {
    Parameter("triton_enable_empty_final_response").set_bool_param(true);
    return *this;
  }

  const inference::ModelInferRequest& Build() const { return request_; }

  static std::string EncodeStrings(const std::vector<std::string>& values) {
    std::string raw;
    for (const std::string& value : values) {
      const auto size = static_cast<uint32_t>(value.size());
      raw.append(reinterpret_cast<const char*>(&size), sizeof(size));
      raw.append(value);
    }
    return raw;
  }

 private:
  inference::ModelInferRequest request_;
};

// What a response holds under a name; nullopt when it is not there.
inline std::optional<std::string> RawOutput(
    const inference::ModelInferResponse& response, const std::string& name) {
  for (int i = 0; i < response.outputs_size(); ++i) {
    if (response.outputs(i).name() == name) {
      return response.raw_output_contents(i);
    }
  }
  return std::nullopt;
}

inline std::vector<std::string> StringOutput(
    const inference::ModelInferResponse& response, const std::string& name) {
  std::vector<std::string> values;
  const std::string raw = RawOutput(response, name).value_or("");
  for (size_t at = 0; at + sizeof(uint32_t) <= raw.size();) {
    uint32_t size = 0;
    std::memcpy(&size, raw.data() + at, sizeof(size));
    values.push_back(raw.substr(at + sizeof(size), size));
    at += sizeof(size) + size;
  }
  return values;
}

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

inline std::vector<int64_t> OutputShape(
    const inference::ModelInferResponse& response, const std::string& name) {
  for (const auto& output : response.outputs()) {
    if (output.name() == name) {
      return {output.shape().begin(), output.shape().end()};
    }
  }
  return {};
}

// True, false, or nullopt when the parameter is missing or no bool.
inline std::optional<bool> FinalFlag(
    const inference::ModelInferResponse& response) {
  const auto found = response.parameters().find("triton_final_response");
  if (found == response.parameters().end() || !found->second.has_bool_param()) {
    return std::nullopt;
  }
  return found->second.bool_param();
}

}  // namespace kvasir::router
