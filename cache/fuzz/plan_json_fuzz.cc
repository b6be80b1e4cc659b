// libFuzzer target: parses any bytes as a compression plan and lays out its
// pages, because plans are untrusted. Both steps must succeed or return an
// error, never crash.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "cache/layout/layout.h"
#include "google/protobuf/util/message_differencer.h"
#include "plan/plan.h"

namespace {

constexpr uint64_t kWorkPerByte = 2000;

void Parse(std::string_view text) {
  using kvasir::cache::PageLayout;
  using kvasir::plan::AttentionShape;
  const auto plan = kvasir::plan::ParsePlanJson(
      absl::string_view(text.data(), text.size()), "input");
  if (!plan.ok()) return;
  for (int64_t rotary_dim : {0, 8, 16}) {
    AttentionShape shape;
    shape.num_kv_heads = 4;
    shape.head_dim = 16;
    shape.rotary_dim = rotary_dim;
    shape.layers.resize(static_cast<size_t>(plan->layers_size()));
    for (int64_t rank : {0, 1}) {
      const auto layout = PageLayout::Create(*plan, shape, {}, {rank, 2});
      if (!layout.ok()) continue;
      KVASIR_CHECK(layout->marginal_bytes_per_token() > 0);
      KVASIR_CHECK(layout->BytesAtLength(100, 10) > 0);
      // A valid plan that is written as JSON must read back as an equal plan.
      const auto back =
          kvasir::plan::ParsePlanJson(kvasir::plan::PlanToJson(*plan), "");
      KVASIR_CHECK(back.ok());
      KVASIR_CHECK(
          google::protobuf::util::MessageDifferencer::Equals(*plan, *back));
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
