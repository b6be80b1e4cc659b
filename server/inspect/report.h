// The data that `kvasir inspect` reports about a model and its plan, and
// functions that print this data as text and as JSON.
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
  // a sliding window needs more pages if this is larger
  int64_t max_batched_tokens = 512;
  bool deterministic = false;
  // true: on this device, the results of prompt tokens do not depend on the
  // other sequences in the batch
  bool rows_are_invariant = true;
  int64_t granule_bytes = 0;      // kernels::Device::page_granule_bytes
  worker::MatrixFormat matrices;  // how the device stores weight matrices
  int64_t tp = 0;                 // tensor-parallel ranks to report; 0: none
  // The sequence lengths for which bytes are reported. If empty, they are the
  // model's length, and a 4th, a 16th and a 64th of it.
  std::vector<int64_t> lengths;
};

// A row of the report's table: the keys or the values of one layer.
struct ReportSide {
  LayerSideSummary summary;
  worker::SideFlops flops;
  // In prompts, keys or values of a slot are computed from its latent before
  // attention if at least this many tokens attend to the slot. 0 means that
  // this is never done.
  int64_t lifted_from_tokens = 0;
};

struct ReportLength {
  int64_t tokens = 0;
  CacheBytes<int64_t> cache;
  // bytes of uncompressed keys and values in the model's own data type
  int64_t dense_bytes = 0;
  int64_t dense_bf16_bytes = 0;
  // bytes without eviction; 0 if the plan does not evict
  int64_t not_evicted_bytes = 0;
};

// The eviction settings of a group of layers.
struct ReportEviction {
  std::vector<int64_t> layers;
  plan::EvictionCounts counts;
  std::string method;  // "q-hitter", "h2o", "streaming"
  int64_t sinks = 0;
  int64_t recent = 0;
  float lambda = 0;
  float decay = 0;
  // The number of eviction units (KV heads that evict the same tokens) in each
  // layer, and the bytes of metadata per slot for all units of a layer.
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
  std::string base_model;  // the plan's base model
  kvasir::v1::KvPlan::Target target;
  kvasir::v1::KvPlan::Provenance provenance;
  // False if the plan has not been applied to the folder's weights yet.
  bool weights_fit = true;
  // The part of the plan that this build cannot serve; empty if it serves the
  // whole plan.
  std::string not_served;
  // The result of worker::InvarianceName; empty if the plan is not served.
  std::string invariance;

  int64_t page_tokens = 0;
  double bytes_per_token = 0;  // with padding
  double payload_bytes_per_token = 0;
  CacheBytes<double> token;
  int64_t fixed_bytes_per_sequence = 0;  // bytes of side pages
  // fixed_bytes_per_sequence without unused bytes
  int64_t fixed_payload_bytes_per_sequence = 0;
  DenseBytes dense;  // bytes of a token without compression

  WeightSizes weights;  // 0: this plan cannot be saved as a checkpoint
  // The weights of the same model, uncompressed, in the type of `dense`.
  WeightSizes dense_weights;

  std::vector<ReportSide>
      sides;  // the key and the value of layer 0, then of layer 1, ...
  // FLOPs per query token and slot for an uncompressed side
  int64_t dense_side_flops = 0;
  std::vector<ReportEviction> evictions;  // empty: every slot stays
  std::vector<ReportLength> at_length;
  std::vector<ReportLength> curve;  // from 0 to max_positions

  // The planner's prediction, if there is a file with it next to the plan.
  std::optional<Prediction> prediction;
  // True if the prediction's file is about another plan.
  bool foreign_prediction = false;
  // The share of each tensor-parallel rank, if requested.
  std::optional<RankSummary> ranks;
  // The evictions of a text, if requested.
  std::optional<EvictionTrace> trace;

  // Returns the sum of the FLOPs of all layers.
  worker::SideFlops flops() const;
};

// Creates the report. Errors: those of PageLayout::Create, ResolveForRanks
// and worker::ServePlan. But if ServePlan returns UNIMPLEMENTED, its text
// becomes `not_served`.
absl::StatusOr<InspectReport> MakeInspectReport(const ModelSource& source,
                                                const ReportOptions& options);

nlohmann::ordered_json ReportToJson(const InspectReport& report);
std::string ReportToText(const InspectReport& report);

}  // namespace kvasir::cli
