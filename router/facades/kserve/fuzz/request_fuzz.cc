// A libFuzzer target that parses any bytes as a ModelInferRequest.
#include <cstdint>

#include "base/check.h"
#include "router/facades/calls/stop_strings.h"
#include "router/facades/kserve/request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  inference::ModelInferRequest message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return 0;
  for (const bool unary : {false, true}) {
    const auto request = kvasir::router::ParseKserveRequest(message, unary);
    if (!request.ok()) continue;
    KVASIR_CHECK(!(unary && request->streaming));
    KVASIR_CHECK(!(request->streaming && request->prepend_prompt));
    KVASIR_CHECK(request->stop_strings.size() <=
                 kvasir::router::kMaxStopStrings);
  }
  return 0;
}
