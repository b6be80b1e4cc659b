// Test support: compression plans of every method for the tiny model of
// tiny_rank.h (8 query and 4 KV heads of 8 dims, 4 pairs), both layers mostly
// alike.
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
  std::string name;  // letters only: part of a test's name
  std::string key;   // parts
  std::string value;
  bool codes = false;      // quantized
  uint32_t key_exact = 0;  // exact windows
  uint32_t value_exact = 0;
  uint32_t sinks = 0;      // exact ones
  std::string joint = "";  // instead of both sides' parts
  // The first layer is whole and has no exact rows: others' lie in its arena.
  bool first_whole = false;
  // Of the layers that are not whole: {"budget":20, ...}; empty: none.
  std::string eviction = "";
};

namespace plan_cases {

inline constexpr char kTyped[] = R"({"dtype":"$"})";  // $: the number type

// A low_rank part of key and value, its lifts at run time; `codec` and what
// comes behind it as below.
PlanCase JointCase(const std::string& name, const std::string& groups,
                   const std::string& stored, const std::string& codec,
                   uint32_t exact_window = 0, const std::string& rest = "",
                   uint32_t sinks = 0);
// `groups` is a list of {"heads", "rank"}.
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

// Every method, in numbers and in codes.
std::vector<PlanCase> PlanCases();

// The plan of a case, its numbers stored as `dtype` ("BF16").
kvasir::v1::KvPlan PlanOf(const PlanCase& plan_case,
                          const model::DecoderSpec& spec,
                          const std::string& dtype = "BF16");

// A rank of the tiny model's plan, with random factors.
absl::StatusOr<std::unique_ptr<Rank>> MakePlannedRank(
    const PlanCase& plan_case, const RankOptions& options,
    Collective* collective = nullptr, const std::string& dtype = "BF16",
    const model::ModelShape& shape = TinyShape());

}  // namespace kvasir::worker
