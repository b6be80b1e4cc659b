#include "router/testing/kserve_testing.h"

#include <utility>

namespace kvasir::router {

InferRequestBuilder::InferRequestBuilder(const std::string& model,
                                         const std::string& id) {
  request_.set_model_name(model);
  request_.set_id(id);
}

InferRequestBuilder& InferRequestBuilder::Raw(const std::string& name,
                                              const std::string& datatype,
                                              const std::vector<int64_t>& shape,
                                              const std::string& raw) {
  auto* input = request_.add_inputs();
  input->set_name(name);
  input->set_datatype(datatype);
  for (const int64_t dim : shape) input->add_shape(dim);
  request_.add_raw_input_contents(raw);
  return *this;
}

InferRequestBuilder& InferRequestBuilder::Bool(
    const std::string& name, bool value, const std::vector<int64_t>& shape) {
  return Raw(name, "BOOL", shape, std::string(1, value ? '\1' : '\0'));
}

InferRequestBuilder& InferRequestBuilder::Int(
    const std::string& name, int32_t value, const std::vector<int64_t>& shape) {
  return Numbers<int32_t>(name, "INT32", shape, {value});
}

InferRequestBuilder& InferRequestBuilder::Float(
    const std::string& name, float value, const std::vector<int64_t>& shape) {
  return Numbers<float>(name, "FP32", shape, {value});
}

InferRequestBuilder& InferRequestBuilder::Strings(
    const std::string& name, const std::vector<std::string>& values,
    const std::vector<int64_t>& shape) {
  return Raw(name, "BYTES", shape, EncodeStrings(values));
}

InferRequestBuilder& InferRequestBuilder::Text(
    const std::string& name, const std::string& value,
    const std::vector<int64_t>& shape) {
  return Strings(name, {value}, shape);
}

InferRequestBuilder& InferRequestBuilder::Output(const std::string& name) {
  request_.add_outputs()->set_name(name);
  return *this;
}

inference::InferParameter& InferRequestBuilder::Parameter(
    const std::string& name) {
  return (*request_.mutable_parameters())[name];
}

InferRequestBuilder& InferRequestBuilder::WantsEmptyFinal() {
  Parameter("triton_enable_empty_final_response").set_bool_param(true);
  return *this;
}

std::string InferRequestBuilder::EncodeStrings(
    const std::vector<std::string>& values) {
  std::string raw;
  for (const std::string& value : values) {
    const auto size = static_cast<uint32_t>(value.size());
    raw.append(reinterpret_cast<const char*>(&size), sizeof(size));
    raw.append(value);
  }
  return raw;
}

std::optional<std::string> RawOutput(
    const inference::ModelInferResponse& response, const std::string& name) {
  for (int i = 0; i < response.outputs_size(); ++i) {
    if (response.outputs(i).name() == name) {
      return response.raw_output_contents(i);
    }
  }
  return std::nullopt;
}

std::vector<std::string> StringOutput(
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

std::vector<int64_t> OutputShape(const inference::ModelInferResponse& response,
                                 const std::string& name) {
  for (const auto& output : response.outputs()) {
    if (output.name() == name) {
      return {output.shape().begin(), output.shape().end()};
    }
  }
  return {};
}

std::optional<bool> FinalFlag(const inference::ModelInferResponse& response) {
  const auto found = response.parameters().find("triton_final_response");
  if (found == response.parameters().end() || !found->second.has_bool_param()) {
    return std::nullopt;
  }
  return found->second.bool_param();
}

}  // namespace kvasir::router
