// A libFuzzer target that parses any bytes as a ModelInferRequest, and also as
// the JSON text of the tensor sampling_parameters.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "router/facades/calls/stop_strings.h"
#include "router/facades/kserve/request.h"

namespace {

constexpr uint64_t kWorkPerByte = 2000;

void ParseMessage(const inference::ModelInferRequest& message, bool unary) {
  const auto request = kvasir::router::ParseKserveRequest(message, unary);
  if (!request.ok()) return;
  KVASIR_CHECK(!(unary && request->streaming));
  KVASIR_CHECK(!(request->streaming && request->prepend_prompt));
  KVASIR_CHECK(request->stop_strings.size() <= kvasir::router::kMaxStopStrings);
}

void Parse(std::string_view text) {
  inference::ModelInferRequest message;
  if (message.ParseFromArray(text.data(), static_cast<int>(text.size()))) {
    ParseMessage(message, false);
    ParseMessage(message, true);
  }
  inference::ModelInferRequest json;
  const auto add = [&json](const char* name, std::string_view value) {
    auto* tensor = json.add_inputs();
    tensor->set_name(name);
    tensor->set_datatype("BYTES");
    tensor->add_shape(1);
    tensor->mutable_contents()->add_bytes_contents(std::string(value));
  };
  add("text_input", "a");
  add("sampling_parameters", text);
  ParseMessage(json, false);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse,
                                  kvasir::base::kConstantWorkOfMessage);
  return 0;
}
