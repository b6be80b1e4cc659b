// A libFuzzer target that parses any bytes as a vllm.GenerateRequest.
#include <cstdint>

#include "base/check.h"
#include "router/facades/calls/stop_strings.h"
#include "router/facades/vllm_inference/request.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  vllm::GenerateRequest message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return 0;
  for (const bool streaming : {false, true}) {
    const auto request =
        kvasir::router::ParseVllmInferenceRequest(message, streaming);
    if (!request.ok()) continue;
    KVASIR_CHECK(request->text.has_value() || !request->token_ids.empty());
    KVASIR_CHECK(request->sampling.n() > 0);
    KVASIR_CHECK(streaming || request->sampling.n() == 1);
    KVASIR_CHECK(request->wants_logprobs || request->num_candidates == 0);
    KVASIR_CHECK(request->cache_salt.size() <=
                 kvasir::router::kMaxCacheSaltBytes);
    KVASIR_CHECK(request->stop_strings.size() <=
                 kvasir::router::kMaxStopStrings);
  }
  return 0;
}
