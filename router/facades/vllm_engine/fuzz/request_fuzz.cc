// A libFuzzer target that parses any bytes as a GenerateRequest.
#include <cstdint>

#include "base/check.h"
#include "router/facades/calls/stop_strings.h"
#include "router/facades/vllm_engine/request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  vllm::grpc::engine::GenerateRequest message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return 0;
  const auto request = kvasir::router::ParseVllmEngineRequest(message);
  if (!request.ok()) return 0;
  KVASIR_CHECK(request->text.has_value() || !request->token_ids.empty());
  KVASIR_CHECK(request->sampling.n() > 0);
  KVASIR_CHECK(request->stop_strings.size() <= kvasir::router::kMaxStopStrings);
  return 0;
}
