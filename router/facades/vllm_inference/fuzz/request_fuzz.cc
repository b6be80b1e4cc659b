// A libFuzzer target that parses any bytes as a vllm.GenerateRequest.
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "router/facades/calls/stop_strings.h"
#include "router/facades/vllm_inference/request.h"

namespace {

constexpr uint64_t kWorkPerByte = 2000;

void Parse(std::string_view text) {
  vllm::GenerateRequest message;
  if (!message.ParseFromArray(text.data(), static_cast<int>(text.size())))
    return;
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
    KVASIR_CHECK(request->session.size() <= kvasir::router::kMaxSessionBytes);
    KVASIR_CHECK(request->stop_strings.size() <=
                 kvasir::router::kMaxStopStrings);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse,
                                  kvasir::base::kConstantWorkOfMessage);
  return 0;
}
