// libFuzzer target: parses any bytes as config.json and generation_config.json.
#include <cmath>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "model/shapes/config.h"

namespace {

constexpr uint64_t kWorkPerByte = 1000;

void Parse(std::string_view text) {
  kvasir::model::DecoderSpec parsed;
  auto spec = kvasir::model::ParseConfig(text, "fuzz");
  if (spec.ok()) {
    KVASIR_CHECK(spec->num_heads % spec->num_kv_heads == 0);
    KVASIR_CHECK(spec->head_dim > 0 && spec->head_dim % 2 == 0);
    KVASIR_CHECK(spec->num_layers() > 0);
    for (const double frequency : spec->rope.frequencies) {
      KVASIR_CHECK(std::isfinite(frequency));
    }
    parsed = *std::move(spec);
  } else {
    parsed.vocab_size = 100;
  }
  (void)kvasir::model::ParseGenerationConfig(text, "fuzz", &parsed);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
