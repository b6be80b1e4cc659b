// Test support: compression plans of every method for the tiny model of
// tiny_rank.h (8 query and 4 KV heads of 8 dims, 4 pairs). Both layers are
// mostly alike.
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
  std::string key;   // JSON of the parts
  std::string value;
  bool codes = false;      // quantized
  uint32_t key_exact = 0;  // exact window of keys
  uint32_t value_exact = 0;
  uint32_t sinks = 0;      // exact sinks
  std::string joint = "";  // instead of both sides' parts
  // Whether the first layer is stored whole without exact rows. Exact rows of
  // other layers lie in its arena.
  bool first_whole = false;
  // The eviction of layers that are not whole, like {"budget":20, ...}; empty:
  // none.
  std::string eviction = "";
};

namespace plan_cases {

// $ stands for the number type
inline constexpr char kTyped[] = R"({"dtype":"$"})";

// A joint low_rank part of keys and values, with lifts at run time. `codec` and
// later arguments are as below.
PlanCase JointCase(const std::string& name, const std::string& groups,
                   const std::string& stored, const std::string& codec,
                   uint32_t exact_window = 0, const std::string& rest = "",
                   uint32_t sinks = 0);
// `groups` lists {"heads", "rank"} objects.
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

// Every method, with numbers and with codes.
std::vector<PlanCase> PlanCases();

// The plan of a case, with numbers stored as `dtype` ("BF16").
kvasir::v1::KvPlan PlanOf(const PlanCase& plan_case,
                          const model::DecoderSpec& spec,
                          const std::string& dtype = "BF16");

// A rank with the tiny model and this plan, with random factors.
absl::StatusOr<std::unique_ptr<Rank>> MakePlannedRank(
    const PlanCase& plan_case, const RankOptions& options,
    Collective* collective = nullptr, const std::string& dtype = "BF16",
    const model::ModelShape& shape = TinyShape());

}  // namespace kvasir::worker
