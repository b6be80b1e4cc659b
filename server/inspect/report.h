// Everything `kvasir inspect` tells of a model and its plan, gathered once for
// its text, its JSON and its page.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json_fwd.hpp"
#include "proto/kvasir/v1/kv_plan.pb.h"
#include "server/inspect/cache_bytes.h"
#include "server/inspect/eviction_trace.h"
#include "summary/plan_summary.h"
#include "summary/prediction.h"
#include "summary/rank_summary.h"
#include "worker/load/model_source.h"
#include "worker/program/attention_flops.h"
#include "worker/weights/matrix_format.h"

namespace kvasir::cli {

struct ReportOptions {
  int64_t page_tokens = 64;
  int64_t max_batched_tokens = 512;  // for layers with a sliding window
  bool deterministic = false;
  bool rows_are_invariant = true;  // on the device, of prompts too
  int64_t granule_bytes = 0;       // of pages: the device's
  worker::MatrixFormat matrices;   // likewise
  int64_t tp = 0;                  // tensor-parallel ranks to tell; 0: none
  // Of a sequence, to tell; empty: the model's, and quarters of it.
  std::vector<int64_t> lengths;
};

// A row of the rank table.
struct ReportSide {
  LayerSideSummary summary;
  worker::SideFlops flops;
  // Prompts lift it: it pays where so many tokens see a slot; 0: they do not.
  int64_t lifted_from_tokens = 0;
};

struct ReportLength {
  int64_t tokens = 0;
  CacheBytes<int64_t> cache;
  int64_t dense_bytes = 0;  // of whole keys and values in the model's own type
  int64_t dense_bf16_bytes = 0;
  int64_t not_evicted_bytes = 0;  // if all slots stayed; 0: they do
};

// What layers give up that evict alike.
struct ReportEviction {
  std::vector<int64_t> layers;
  plan::EvictionCounts counts;
  std::string method;  // "q-hitter", "h2o", "streaming"
  int64_t sinks = 0;
  int64_t recent = 0;
  float lambda = 0;
  float decay = 0;
  // Sets of KV heads that give up the same tokens, and what all of them note
  // down of a slot; of one layer.
  int64_t units = 0;
  double metadata_bytes_per_slot = 0;
};

struct InspectReport {
  std::string name;
  std::string model_type;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_positions = 0;
  std::string method;
  std::string base_model;  // of the plan
  kvasir::v1::KvPlan::Target target;
  kvasir::v1::KvPlan::Provenance provenance;
  // The folder has other weights: a plan that is still to be applied.
  bool weights_fit = true;
  // What the plan asks for that this build does not serve; empty: it does.
  std::string not_served;
  // worker::InvarianceName; empty where it is not served.
  std::string invariance;

  int64_t page_tokens = 0;
  double bytes_per_token = 0;  // padded
  double payload_bytes_per_token = 0;
  CacheBytes<double> token;
  int64_t fixed_bytes_per_sequence = 0;          // side pages
  int64_t fixed_payload_bytes_per_sequence = 0;  // of those: what is used
  DenseBytes dense;                              // of a token

  WeightSizes weights;  // 0: the artifact has no tensors for the plan
  // Of the same model, uncompressed, in the type of `dense`.
  WeightSizes dense_weights;

  std::vector<ReportSide> sides;          // key and value of each layer in turn
  int64_t dense_side_flops = 0;           // per query token and slot
  std::vector<ReportEviction> evictions;  // empty: every slot stays
  std::vector<ReportLength> at_length;
  std::vector<ReportLength> curve;  // from 0 to max_positions

  // What its planner has predicted, where that is beside the plan.
  std::optional<Prediction> prediction;
  // It is there, and of another plan.
  bool foreign_prediction = false;
  // What each tensor-parallel rank holds, where that was asked for.
  std::optional<RankSummary> ranks;
  // Of a text that was run, where that was asked for.
  std::optional<EvictionTrace> trace;

  // Over all layers.
  worker::SideFlops flops() const;
};

// Errors: of the layout, of ResolveForRanks, and of worker::ServePlan, but for
//   UNIMPLEMENTED, which is told as `not_served`.
absl::StatusOr<InspectReport> MakeInspectReport(const ModelSource& source,
                                                const ReportOptions& options);

nlohmann::ordered_json ReportToJson(const InspectReport& report);
std::string ReportToText(const InspectReport& report);

}  // namespace kvasir::cli
