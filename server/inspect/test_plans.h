// For tests: a small model, and functions that give it a plan.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "cache/layout/layout.h"
#include "model/shapes/shape_config.h"
#include "worker/load/model_source.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {

// A model with 2 layers, hidden size 32, 8 query heads and 4 KV heads of 8
// dimensions (4 RoPE pairs), and 512 positions.
inline ModelSource SmallSource() {
  ModelSource source;
  source.shape = model::ModelShape{.name = "small",
                                   .num_layers = 2,
                                   .hidden_size = 32,
                                   .intermediate_size = 48,
                                   .num_query_heads = 8,
                                   .num_kv_heads = 4,
                                   .head_dim = 8,
                                   .vocab_size = 100,
                                   .max_position = 512};
  source.name = "small";
  source.spec = model::SpecOfShape(*source.shape).value();
  return source;
}

// The small model with a plan in which each layer has the parts `key` and
// `value` and the JSON fields in `rest`.
inline ModelSource SourceWith(const std::string& key, const std::string& value,
                              const std::string& rest = "") {
  ModelSource source = SmallSource();
  const std::string layer =
      absl::StrCat(R"({"key":{"parts":[)", key, R"(]},"value":{"parts":[)",
                   value, "]}", rest, "}");
  auto plan = plan::ParsePlanJson(
      absl::StrCat(R"({"schema_version":1,"method":"test","layers":[)", layer,
                   ",", layer, "]}"),
      "plan");
  KVASIR_EXPECT_OK(plan);
  if (plan.ok()) {
    KVASIR_EXPECT_OK(source.SetPlan(*plan));
  }
  return source;
}

inline constexpr char kFullKey[] =
    R"({"full":{},"stored":"POST_ROPE","codec":{"dtype":"BF16"}})";
inline constexpr char kFullValue[] =
    R"({"full":{},"stored":"NO_ROPE","codec":{"dtype":"BF16"}})";

// The JSON of a low_rank part with two groups of two heads, ranks 6 and 5, and
// 4-bit codes.
inline std::string LowRankPart(const std::string& lift,
                               const std::string& stored) {
  return absl::StrCat(R"({"low_rank":{"groups":[{"heads":[0,1],"rank":6},)",
                      R"({"heads":[2,3],"rank":5}]},"uses":[{")", lift,
                      R"(":{}}],"stored":")", stored,
                      R"(","codec":{"bits":{"schedule":[4]},"per_token":{},)",
                      R"("param_dtype":"F16"}})");
}

}  // namespace kvasir::cli
