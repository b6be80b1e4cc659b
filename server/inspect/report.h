// The report of `kvasir inspect` about a model and its plan, made once for its
// text, its JSON and its page.
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
  // true if the device keeps rows of prompts invariant, too
  bool rows_are_invariant = true;
  int64_t granule_bytes = 0;      // granule of the device's pages
  worker::MatrixFormat matrices;  // format of the device's matrices
  int64_t tp = 0;                 // tensor-parallel ranks to report; 0: none
  // Sequence lengths to report; empty: the model's length, and a 4th, a 16th
  // and a 64th of it.
  std::vector<int64_t> lengths;
};

// A row of the rank table.
struct ReportSide {
  LayerSideSummary summary;
  worker::SideFlops flops;
  // Prompts lift this side if at least so many tokens see a slot; 0: never.
  int64_t lifted_from_tokens = 0;
};

struct ReportLength {
  int64_t tokens = 0;
  CacheBytes<int64_t> cache;
  // bytes of whole keys and values in the model's own type
  int64_t dense_bytes = 0;
  int64_t dense_bf16_bytes = 0;
  int64_t not_evicted_bytes = 0;  // bytes if no slot were evicted; 0: none is
};

// The eviction of layers that evict alike.
struct ReportEviction {
  std::vector<int64_t> layers;
  plan::EvictionCounts counts;
  std::string method;  // "q-hitter", "h2o", "streaming"
  int64_t sinks = 0;
  int64_t recent = 0;
  float lambda = 0;
  float decay = 0;
  // In one layer: the sets of KV heads that evict the same tokens, and the
  // bytes of metadata per slot for all of them.
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
  // False if the plan still has to be applied to the folder's weights.
  bool weights_fit = true;
  // The part of the plan that this build does not serve; empty: it serves the
  // plan.
  std::string not_served;
  // worker::InvarianceName; empty if the plan is not served.
  std::string invariance;

  int64_t page_tokens = 0;
  double bytes_per_token = 0;  // with padding
  double payload_bytes_per_token = 0;
  CacheBytes<double> token;
  int64_t fixed_bytes_per_sequence = 0;          // side pages
  int64_t fixed_payload_bytes_per_sequence = 0;  // the used part of these
  DenseBytes dense;                              // bytes of a token

  WeightSizes weights;  // 0: the artifact has no tensors for the plan
  // The weights of the same model, uncompressed, in the type of `dense`.
  WeightSizes dense_weights;

  std::vector<ReportSide> sides;          // key and value of each layer in turn
  int64_t dense_side_flops = 0;           // per query token and slot
  std::vector<ReportEviction> evictions;  // empty: every slot stays
  std::vector<ReportLength> at_length;
  std::vector<ReportLength> curve;  // from 0 to max_positions

  // The planner's prediction, if it is beside the plan.
  std::optional<Prediction> prediction;
  // A prediction is there but belongs to another plan.
  bool foreign_prediction = false;
  // The share of each tensor-parallel rank, if requested.
  std::optional<RankSummary> ranks;
  // The evictions of a text, if requested.
  std::optional<EvictionTrace> trace;

  // The sum over all layers.
  worker::SideFlops flops() const;
};

// Errors: those of the layout, of ResolveForRanks, and of worker::ServePlan,
// except for UNIMPLEMENTED, which becomes `not_served`.
absl::StatusOr<InspectReport> MakeInspectReport(const ModelSource& source,
                                                const ReportOptions& options);

nlohmann::ordered_json ReportToJson(const InspectReport& report);
std::string ReportToText(const InspectReport& report);

}  // namespace kvasir::cli
