// Test support: compression plans of every method for the tiny model of
// tiny_rank.h (8 query heads and 4 KV heads of 8 dims, 4 rotation pairs). In
// most plans both layers are alike.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {

struct PlanCase {
  std::string name;  // letters only, because it is part of a test's name
  std::string key;   // the key parts, as JSON
  std::string value;
  bool codes = false;      // whether the plan stores quantized codes
  uint32_t key_exact = 0;  // number of recent keys kept uncompressed
  uint32_t value_exact = 0;
  // Number of tokens at the beginning of a text that are kept uncompressed.
  uint32_t sinks = 0;
  std::string joint = "";  // joint parts, used instead of `key` and `value`
  // Whether layer 0 is stored at full rank and has no exact (uncompressed) rows
  // of its own. Exact rows of the other layers then lie in layer 0's arena.
  bool first_whole = false;
  // The eviction, like {"budget":20, ...}, of all layers (except layer 0 if
  // `first_whole`). Empty: no eviction.
  std::string eviction = "";
};

namespace plan_cases {

// The codec without quantization. PlanOf replaces $ by the data type.
inline constexpr char kTyped[] = R"({"dtype":"$"})";

// Returns a plan with a joint low_rank part for keys and values, which is
// lifted at run time. `groups`, `codec` and `rest` are as in LowRank.
PlanCase JointCase(const std::string& name, const std::string& groups,
                   const std::string& stored, const std::string& codec,
                   uint32_t exact_window = 0, const std::string& rest = "",
                   uint32_t sinks = 0);
// These return the JSON of a part or of a codec. `groups` is a list of
// {"heads", "rank"} objects. `rest` is JSON of more fields and begins with a
// comma.
std::string LowRank(const std::string& groups, const std::string& use,
                    const std::string& stored,
                    const std::string& codec = kTyped,
                    const std::string& rest = "");
std::string Full(const std::string& stored, const std::string& codec = kTyped,
                 const std::string& rest = "");
std::string Codes(const std::string& bits, const std::string& rest);
std::string Runs(const std::vector<std::pair<int, int>>& channels_and_bits,
                 const std::string& rest);

}  // namespace plan_cases

// Returns plans of every compression method, both without quantization and with
// quantized codes.
std::vector<PlanCase> PlanCases();

// Returns the plan of a case. `dtype`, like "BF16", is the type of values that
// are stored without quantization.
kvasir::v1::KvPlan PlanOf(const PlanCase& plan_case,
                          const model::DecoderSpec& spec,
                          const std::string& dtype = "BF16");

// Makes a rank with a tiny model, this plan, and random weights.
absl::StatusOr<std::unique_ptr<Rank>> MakePlannedRank(
    const PlanCase& plan_case, const RankOptions& options,
    Collective* collective = nullptr, const std::string& dtype = "BF16",
    const model::ModelShape& shape = TinyShape());

}  // namespace kvasir::worker
