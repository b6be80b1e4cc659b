// Helpers for tests of the KServe facade: build requests, and read responses.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "proto/inference/grpc_service.pb.h"
#include "router/testing/byte_codec.h"

namespace kvasir::router {

// Builds a request as the Python package tritonclient does: all tensors are
// in raw_input_contents.
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

// Returns the raw bytes of a response's output; nullopt if the output
// is absent.
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

// Returns the value of the parameter that marks the last response; nullopt if
// it is missing or not a bool.
std::optional<bool> FinalFlag(const inference::ModelInferResponse& response);

}  // namespace kvasir::router
