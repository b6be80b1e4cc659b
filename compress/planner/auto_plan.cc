#include "compress/planner/auto_plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "compress/methods/low_rank_plan.h"
#include "compress/planner/layer_spaces.h"
#include "compress/planner/plan_judge.h"
#include "compress/planner/spending.h"
#include "compress/runtime/for_each_index.h"
#include "compress/runtime/torch_status.h"
#include "model/shapes/attention_shape.h"
#include "plan/resolved_plan.h"

namespace kvasir::compress {
namespace {

using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;

constexpr int64_t kPageTokens = 64;
// The smallest grain in bytes per token: the regions of a page begin at
// multiples of 128 bytes, which are 2 bytes for each of 64 tokens.
constexpr int64_t kLeastGrain = cache::kRegionAlignmentBytes / kPageTokens;

// Number of sample rows on which every possible space of a layer is measured.
// The spaces that are chosen are then measured on all rows.
constexpr int64_t kTriedRows = 1024;

// Returns the possible ways to divide the KV heads into equal groups. No group
// spans two of the `shares` equal parts into which tensor parallelism divides
// the heads.
std::vector<std::vector<std::vector<int64_t>>> Groupings(
    const model::DecoderSpec& spec, int64_t shares) {
  const int64_t heads = spec.num_kv_heads;
  std::vector<std::vector<std::vector<int64_t>>> groupings;
  for (int64_t size = 1; size <= heads / shares; ++size) {
    if (heads / shares % size != 0) continue;
    std::vector<std::vector<int64_t>> groups;
    for (int64_t head = 0; head < heads; ++head) {
      if (head % size == 0) groups.emplace_back();
      groups.back().push_back(head);
    }
    groupings.push_back(std::move(groups));
  }
  return groupings;
}

// Returns whether the engine has an exact Hadamard matrix of this width:
// Sylvester's, or Paley's for multiples of 32.
bool HasHadamard(int64_t width) {
  return width % 32 == 0 ? width <= 1024 : (width & (width - 1)) == 0;
}

std::vector<SpaceOption> OptionsOf(const model::DecoderSpec& spec,
                                   int64_t layer, PlanSpeed speed,
                                   int64_t shares) {
  const bool rotates = spec.layers[static_cast<size_t>(layer)].rope;
  const bool rebuilds = speed == PlanSpeed::kStorage;
  std::vector<SpaceOption> options;
  for (const auto& groups : Groupings(spec, shares)) {
    if (rebuilds || !rotates) options.push_back({SpaceKind::kKey, groups});
    if (rotates) options.push_back({SpaceKind::kRopeKey, groups});
    options.push_back({SpaceKind::kValue, groups});
    if (groups[0].size() == 1 && HasHadamard(spec.head_dim)) {
      options.push_back({SpaceKind::kRotatedKey, groups});
      options.push_back({SpaceKind::kRotatedValue, groups});
    }
    if (rebuilds) options.push_back({SpaceKind::kJoint, groups});
  }
  return options;
}

class Planner {
 public:
  Planner(const PlanRequest& request, const AutoOptions& options)
      : request_(request), spec_(request.spec) {
    options_ = options;
    kappa_.median = kappa_.low = kappa_.high = options_.kappa;
    grain_bytes_ = std::max(kLeastGrain, options.granule_bytes);
    span_ = std::min<int64_t>(kRangePositions, spec_.max_position_embeddings);
    if (options_.target_length == 0) {
      options_.target_length =
          std::min<int64_t>(8192, spec_.max_position_embeddings);
    }
  }

  absl::StatusOr<AutoPlan> Plan() {
    KVASIR_RETURN_IF_ERROR(Check());
    KVASIR_RETURN_IF_ERROR(Measure());
    KVASIR_RETURN_IF_ERROR(Choose());
    if (options().probes > 0) KVASIR_RETURN_IF_ERROR(Probe());
    KVASIR_RETURN_IF_ERROR(CheckLoss());
    KVASIR_RETURN_IF_ERROR(Judge());
    Draw();
    return std::move(best_);
  }

 private:
  const AutoOptions& options() const { return options_; }

  absl::Status Check() const {
    KVASIR_RETURN_IF_ERROR(CheckPlanRequest(request_));
    KVASIR_RETURN_IF_ERROR(NeedCalibration(request_, "method auto"));
    KVASIR_RETURN_IF_ERROR(NeedWeights(request_, "method auto"));
    if (!options().kv_bytes_per_token && !options().max_kl) {
      return absl::InvalidArgumentError(
          "method auto needs a limit: a number of bytes per token, or a "
          "maximum divergence");
    }
    if (options().probes < 0 || options().probes > kMostProbes) {
      return absl::InvalidArgumentError(
          absl::StrCat("the number of probes must be 0 to ", kMostProbes,
                       ", is ", options().probes));
    }
    if (options().windows.empty()) {
      return absl::InvalidArgumentError(
          "method auto needs at least one length of the exact window; 0 means "
          "no window");
    }
    const int64_t least =
        *std::min_element(options().windows.begin(), options().windows.end());
    if (least >= options().target_length) {
      return absl::InvalidArgumentError(
          absl::StrCat("the shortest exact window has ", least,
                       " tokens, but must be shorter than the target length, ",
                       options().target_length, " tokens"));
    }
    if (!request_.calibration->has_information()) {
      return absl::FailedPreconditionError(
          "method auto needs Fisher information of keys and values, which the "
          "calibration does not have");
    }
    const bool rotates =
        std::any_of(spec_.layers.begin(), spec_.layers.end(),
                    [](const auto& layer) { return layer.rope; });
    if (rotates && spec_.rope.rotary_dim != spec_.head_dim) {
      return absl::UnimplementedError(absl::StrCat(
          "method auto needs RoPE on all dims of a head; this model rotates ",
          spec_.rope.rotary_dim, " of ", spec_.head_dim));
    }
    return absl::OkStatus();
  }

  // Adds `layers` to the progress and calls options().progress. The caller
  // ensures that only one thread at a time calls this.
  void Advance(double layers) {
    done_ += layers;
    if (options().progress == nullptr || cancelled_) return;
    cancelled_ = !options().progress(static_cast<int64_t>(done_ + 0.5),
                                     2 * spec_.num_layers());
  }
  absl::Status Cancelled() const {
    return cancelled_ ? absl::CancelledError("planning was stopped")
                      : absl::OkStatus();
  }

  absl::StatusOr<AttentionWeights> WeightsOf(int64_t layer) {
    const std::lock_guard lock(mutex_);
    KVASIR_RETURN_IF_ERROR(Cancelled());
    return request_.weights(layer);
  }

  absl::StatusOr<PlannedLayer> DataOf(int64_t layer) {
    KVASIR_ASSIGN_OR_RETURN(const AttentionWeights weights, WeightsOf(layer));
    const LayerCalibration& calibration =
        request_.calibration->layers[static_cast<size_t>(layer)];
    PlannedLayer data;
    KVASIR_ASSIGN_OR_RETURN(data.moments,
                            MomentsOfLayer(spec_, weights, calibration,
                                           request_.calibration->num_tokens));
    // Exact sinks are left out, because they need no codes.
    const at::Tensor coded =
        calibration.sample_positions >= options().exact_sinks;
    const at::Tensor held_out = calibration.sample_held_out;
    data.fitted = RowsWhere(calibration,
                            coded.logical_and(held_out.logical_not()), span_);
    data.held_out = RowsWhere(calibration, coded.logical_and(held_out), span_);
    if (data.fitted.rows.size(0) < 2) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", layer, ": the calibration has ", data.fitted.rows.size(0),
          " sample rows that are neither exact sinks nor held out, but at "
          "least 2 are needed"));
    }
    return data;
  }

  absl::Status Measure() {
    const auto layers = static_cast<size_t>(spec_.num_layers());
    data_.resize(layers);
    candidates_.by_layer.resize(layers);
    for (size_t l = 0; l < layers; ++l) {
      for (SpaceOption& option :
           OptionsOf(spec_, static_cast<int64_t>(l), options().speed,
                     HeadShares(request_))) {
        candidates_.by_layer[l].push_back(
            static_cast<int>(candidates_.all.size()));
        candidates_.all.push_back(
            {.layer = static_cast<int64_t>(l), .option = std::move(option)});
      }
    }
    std::vector<absl::Status> results(layers);
    ForEachIndex(spec_.num_layers(), options().threads, [&](int64_t layer) {
      results[static_cast<size_t>(layer)] =
          CatchTorch([&] { return MeasureLayer(layer); });
    });
    for (const absl::Status& result : results) {
      KVASIR_RETURN_IF_ERROR(result);
    }
    if (const TimeModel* time = TimeOf(options().speed)) {
      const auto layer_count = static_cast<double>(spec_.num_layers());
      const auto heads = static_cast<double>(spec_.num_heads);
      const auto kv_heads = static_cast<double>(spec_.num_kv_heads);
      const auto dim = static_cast<double>(spec_.head_dim);
      dense_slot_ns_ = layer_count * 4 * dim *
                       (kv_heads * time->byte_ns + heads * time->flop_ns);
    }
    return absl::OkStatus();
  }

  // Returns at most kTriedRows rows, spread evenly over all rows.
  static SampleRows SampleOf(const SampleRows& all) {
    const int64_t step = (all.rows.size(0) + kTriedRows - 1) / kTriedRows;
    return {all.rows.slice(0, 0, all.rows.size(0), step),
            all.positions.slice(0, 0, all.rows.size(0), step)};
  }

  absl::Status MeasureLayer(int64_t layer) {
    const at::NoGradGuard no_grad;
    const auto index = static_cast<size_t>(layer);
    KVASIR_ASSIGN_OR_RETURN(data_[index], DataOf(layer));
    for (const int candidate : candidates_.by_layer[index]) {
      MeasureCandidate(candidates_.all[static_cast<size_t>(candidate)]);
    }
    const std::lock_guard lock(mutex_);
    Advance(1);
    return absl::OkStatus();
  }

  void MeasureCandidate(PlanCandidate& candidate) const {
    const PlannedLayer& data = data_[static_cast<size_t>(candidate.layer)];
    if (candidate.option.rotated()) {
      candidate.channels =
          RotatedChannels(candidate.option, data.moments, spec_);
    } else {
      candidate.latents = TransformsOf(candidate.option, data.moments, spec_);
      candidate.channels =
          MeasureChannels(candidate.latents, spec_, SampleOf(data.fitted));
      for (LatentTransform& latent : candidate.latents) {
        latent.encode = latent.decode = at::Tensor();
      }
    }
    candidate.channels.latents =
        static_cast<int64_t>(candidate.option.groups.size());
    candidate.channels.grain_bytes = grain_bytes_;
    const TimeModel* time = TimeOf(options().speed);
    if (time == nullptr) return;
    // Codes are unpacked once per group of heads. Each query head then needs
    // two operations for every channel of its group.
    candidate.ns_per_channel =
        static_cast<double>(candidate.option.groups.size()) * time->code_ns +
        2 * static_cast<double>(spec_.num_heads) * time->code_flop_ns;
  }

  int64_t MostGrains() const {
    double sum = 0;
    for (const std::vector<int>& candidates : candidates_.by_layer) {
      double most = 0;
      for (const int index : candidates) {
        const PartChannels& part =
            candidates_.all[static_cast<size_t>(index)].channels;
        most = std::max(most, static_cast<double>(part.latents) *
                                  static_cast<double>(part.groups.size() + 2) *
                                  16);
      }
      sum += 2 * most;
    }
    return static_cast<int64_t>(sum);
  }

  // Returns the largest number of grains for which the curve of loss over bytes
  // is shown.
  int64_t GrainsInSight() const {
    if (!options().kv_bytes_per_token) return MostGrains();
    // The curve goes beyond the budget, to show what more bytes would bring.
    return GrainsOf(1.5 * *options().kv_bytes_per_token);
  }

  // Returns how many grains fit into `bytes`, but no more than MostGrains.
  int64_t GrainsOf(double bytes) const {
    return static_cast<int64_t>(
        std::min(bytes / static_cast<double>(grain_bytes_),
                 static_cast<double>(MostGrains())));
  }

  double Predicted(const SpentBytes& spent, int64_t window) const {
    return LossOf(spent, window) * kappa_.median;
  }

  absl::StatusOr<KvPlan> PlanOf(const SpentBytes& spent, int64_t window) const {
    KvPlan plan;
    for (int64_t l = 0; l < spec_.num_layers(); ++l) {
      LayerPlan* layer = plan.add_layers();
      layer->set_exact_sinks(static_cast<uint32_t>(options().exact_sinks));
      layer->mutable_key()->set_exact_window(static_cast<uint32_t>(window));
      layer->mutable_value()->set_exact_window(static_cast<uint32_t>(window));
    }
    for (const TakenPart& taken : spent.parts) {
      const auto l = static_cast<size_t>(taken.candidate->layer);
      Part part = PartOf(taken, spec_, spec_.layers[l].rope);
      LayerPlan* layer = plan.mutable_layers(static_cast<int>(l));
      switch (taken.candidate->option.kind) {
        case SpaceKind::kJoint:
          *layer->add_joint() = std::move(part);
          break;
        case SpaceKind::kValue:
        case SpaceKind::kRotatedValue:
          *layer->mutable_value()->add_parts() = std::move(part);
          break;
        default:
          *layer->mutable_key()->add_parts() = std::move(part);
      }
    }
    return FinishPlan(request_,
                      {.method = "auto",
                       .options = OptionsText(),
                       .decomposition = Decomposition::kFisher},
                      std::move(plan));
  }

  std::string OptionsText() const {
    const AutoOptions& o = options();
    return absl::StrCat(
        o.kv_bytes_per_token
            ? absl::StrCat("--kv-bytes-per-token ",
                           NumberText(*o.kv_bytes_per_token), " ")
            : "",
        o.max_kl ? absl::StrCat("--max-kl ", NumberText(*o.max_kl), " ") : "",
        kappa_.median != 1
            ? absl::StrCat("--kappa ", NumberText(kappa_.median), " ")
            : "",
        "--speed ", PlanSpeedName(o.speed), " --target-length ",
        o.target_length, " --windows ", absl::StrJoin(o.windows, ","),
        " --exact-sinks ", o.exact_sinks, " --tp ", request_.tp);
  }

  // The bytes that a plan takes on all tensor-parallel ranks, as the page
  // layout counts them: per token (marginal) and per sequence (fixed).
  struct Counted {
    double marginal = 0;
    // like `marginal`, but without the bytes by which pages grow to hold the
    // rows of exact tokens
    double tiles = 0;
    double fixed = 0;
  };
  absl::StatusOr<Counted> Count(const KvPlan& plan) const {
    Counted counted;
    const int64_t shares = HeadShares(request_);
    for (int64_t rank = 0; rank < shares; ++rank) {
      KVASIR_ASSIGN_OR_RETURN(
          const cache::PageLayout layout,
          cache::PageLayout::Create(plan, model::AttentionShapeOf(spec_),
                                    {.page_tokens = kPageTokens,
                                     .granule_bytes = options().granule_bytes},
                                    {.rank = rank, .size = shares}));
      counted.marginal += layout.marginal_bytes_per_token();
      counted.fixed += static_cast<double>(layout.fixed_bytes_per_sequence());
      for (int64_t l = 0; l < spec_.num_layers(); ++l) {
        counted.tiles += static_cast<double>(layout.layer(l).tile_bytes) /
                         static_cast<double>(kPageTokens);
      }
    }
    return counted;
  }

  // A complete plan for one window length.
  struct Finished {
    AutoPlan plan;
    SpentBytes spent;
  };
  absl::StatusOr<Finished> Finish(SpentBytes spent, int64_t window) const {
    Finished finished;
    KVASIR_ASSIGN_OR_RETURN(finished.plan.plan, PlanOf(spent, window));
    KVASIR_ASSIGN_OR_RETURN(const Counted counted, Count(finished.plan.plan));
    AutoPrediction& prediction = finished.plan.prediction;
    prediction.marginal_bytes = counted.marginal;
    prediction.fixed_bytes = counted.fixed;
    prediction.target_length = options().target_length;
    prediction.bytes =
        counted.marginal +
        counted.fixed / static_cast<double>(options().target_length);
    prediction.exact_window = window;
    prediction.kl = Predicted(spent, window);
    prediction.kappa = kappa_;
    prediction.slot_ns = spent.ns;
    prediction.dense_slot_ns = dense_slot_ns_;
    const auto want = static_cast<double>(GrainBytesOf(spent));
    if (counted.tiles != want) {
      return absl::InternalError(
          absl::StrFormat("the planner counts %.1f bytes per token, but the "
                          "page layout counts %.1f",
                          want, counted.tiles));
    }
    finished.spent = std::move(spent);
    return finished;
  }

  int64_t GrainBytesOf(const SpentBytes& spent) const {
    return spent.grains * grain_bytes_;
  }

  // Returns the best plan with this exact window that takes at most `budget`
  // bytes per token; empty if there is none. `spending` must cover the whole
  // budget.
  absl::StatusOr<std::optional<Finished>> WithinBytes(const Spending& spending,
                                                      int64_t window,
                                                      double budget) const {
    const auto grain = static_cast<double>(grain_bytes_);
    int64_t grains = GrainsOf(budget);
    for (int attempt = 0; attempt < 16; ++attempt) {
      const int64_t least = spending.all().least_grains();
      if (least < 0 || grains < least) return std::nullopt;
      KVASIR_ASSIGN_OR_RETURN(Finished finished,
                              Finish(spending.Spend(grains), window));
      const double over = finished.plan.prediction.bytes - budget;
      if (over <= 0) return finished;
      grains -=
          std::max<int64_t>(1, static_cast<int64_t>(std::ceil(over / grain)));
    }
    return std::nullopt;
  }

  // Returns the plan with the fewest bytes whose predicted loss is at most
  // max_kl; empty if there is none.
  absl::StatusOr<std::optional<Finished>> WithinLoss(
      const Spending& spending) const {
    const auto predicted = [&](int64_t grains) {
      return Predicted(spending.Spend(grains), spending.window());
    };
    int64_t low = spending.all().least_grains();
    auto high = static_cast<int64_t>(spending.all().loss().size()) - 1;
    if (low < 0 || predicted(high) > *options().max_kl) return std::nullopt;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (predicted(middle) <= *options().max_kl) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    KVASIR_ASSIGN_OR_RETURN(Finished finished,
                            Finish(spending.Spend(high), spending.window()));
    return finished;
  }

  // Returns the best plan over all windows; empty if no plan fits. Each
  // nanosecond of attention per cached token counts as a loss of `price` nats.
  // Also sets spending_ to the Spending from which the plan was chosen.
  absl::StatusOr<std::optional<Finished>> BestOf(double price) {
    const int64_t sight = GrainsInSight();
    const bool by_bytes = options().kv_bytes_per_token.has_value();
    std::optional<Finished> best;
    for (const int64_t window : options().windows) {
      if (window >= options().target_length) continue;
      auto spending =
          std::make_unique<Spending>(candidates_, window, price, sight);
      KVASIR_ASSIGN_OR_RETURN(
          std::optional<Finished> found,
          by_bytes
              ? WithinBytes(*spending, window, *options().kv_bytes_per_token)
              : WithinLoss(*spending));
      if (!found) continue;
      const auto rank = [by_bytes](const Finished& finished) {
        const AutoPrediction& p = finished.plan.prediction;
        return by_bytes ? p.kl : p.bytes;
      };
      if (best && rank(*found) >= rank(*best)) continue;
      best = std::move(found);
      spending_ = std::move(spending);
    }
    return best;
  }

  absl::Status Choose() {
    double price = 0;
    KVASIR_ASSIGN_OR_RETURN(std::optional<Finished> best, BestOf(price));
    if (!best) return Impossible();
    // Finds the lowest price of time at which attention is no slower than with
    // a dense cache. The higher the price, the greater the loss.
    const double limit = dense_slot_ns_;
    if (limit > 0 && best->spent.ns > limit) {
      double low = 0;
      double high = LossOf(best->spent, 0) / best->spent.ns;
      std::optional<Finished> fast;
      for (int step = 0; step < 24; ++step) {
        price = fast ? (low + high) / 2 : high;
        KVASIR_ASSIGN_OR_RETURN(std::optional<Finished> found, BestOf(price));
        const bool fits = found && found->spent.ns <= limit;
        if (fits) {
          fast = std::move(found);
          high = price;
        } else if (fast) {
          low = price;
        } else {
          low = high;
          high *= 4;
        }
        if (fast && high - low < 0.05 * high) break;
      }
      // BestOf also sets spending_, from which the curve is drawn, so it runs
      // once more at the final price.
      KVASIR_ASSIGN_OR_RETURN(best, BestOf(fast ? high : 0.0));
    }
    best_ = std::move(best->plan);
    spent_ = std::move(best->spent);
    return absl::OkStatus();
  }

  // Measures plans with fewer and with more bytes than the chosen plan and fits
  // kappa to them. If no number of bytes is given, chooses again with this
  // kappa. The measured plans have no window, because a window would keep most
  // tokens of the short measured sequences exact.
  absl::Status Probe() {
    constexpr double kLeastShare = 0.6;
    constexpr double kMostShare = 1.4;
    KVASIR_ASSIGN_OR_RETURN(const Finished plain, Finish(spent_, 0));
    const AutoPrediction& chosen = plain.plan.prediction;
    const auto least =
        static_cast<double>(spending_->all().least_grains() * grain_bytes_) +
        chosen.bytes - chosen.marginal_bytes;
    std::vector<PlanTrial> trials;
    for (int i = 0; i < options().probes; ++i) {
      const double share =
          options().probes == 1
              ? 1.0
              : kLeastShare * std::pow(kMostShare / kLeastShare,
                                       i / (options().probes - 1.0));
      KVASIR_ASSIGN_OR_RETURN(
          const std::optional<Finished> found,
          WithinBytes(*spending_, /*window=*/0,
                      std::max(share * chosen.bytes, least)));
      if (!found) continue;
      const AutoPrediction& prediction = found->plan.prediction;
      KVASIR_ASSIGN_OR_RETURN(const double measured,
                              options().measure(found->plan.plan));
      trials.push_back(
          {prediction.bytes, prediction.kl / kappa_.median, measured});
    }
    const double before = kappa_.median;
    KVASIR_ASSIGN_OR_RETURN(kappa_, FitKappa(std::move(trials)));
    if (!options().kv_bytes_per_token) return Choose();
    // With a given number of bytes the plan stays the same, and only its
    // prediction changes.
    best_.prediction.kl *= kappa_.median / before;
    best_.prediction.kappa = kappa_;
    return absl::OkStatus();
  }

  absl::Status CheckLoss() const {
    const AutoPrediction& prediction = best_.prediction;
    if (options().max_kl && prediction.kl > *options().max_kl) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a plan of %.1f bytes per token is predicted to "
                          "diverge by %.4f nats, "
                          "more than the %.4f of --max-kl; %s",
                          prediction.bytes, prediction.kl, *options().max_kl,
                          BytesForLoss(*options().max_kl)));
    }
    return absl::OkStatus();
  }

  // Returns a text such as "5120.0 bytes per token would suffice", or a text
  // that says that no number of bytes suffices.
  std::string BytesForLoss(double max_kl) const {
    const Spending wide(candidates_, best_.prediction.exact_window, 0.0,
                        MostGrains());
    const std::vector<double>& loss = wide.all().loss();
    for (size_t i = 0; i < loss.size(); ++i) {
      // kImpossible is greater than any loss.
      if (loss[i] * kappa_.median > max_kl) continue;
      return absl::StrFormat(
          "%.1f bytes per token would suffice",
          static_cast<double>(i) * static_cast<double>(grain_bytes_) +
              best_.prediction.bytes - best_.prediction.marginal_bytes);
    }
    return "no number of bytes per token would suffice";
  }

  absl::Status Impossible() const {
    if (!options().kv_bytes_per_token) {
      int64_t window = 0;  // the longest window that was tried
      for (const int64_t each : options().windows) {
        if (each < options().target_length) window = std::max(window, each);
      }
      const Spending all(candidates_, window, 0.0, MostGrains());
      return absl::InvalidArgumentError(absl::StrFormat(
          "no plan is predicted to diverge by %.3g nats or less: even 8 bits "
          "per number and a window of %d exact tokens give %.3g",
          *options().max_kl, window, all.all().loss().back() * kappa_.median));
    }
    const Spending all(candidates_, 0, 0.0, MostGrains());
    const double grain = static_cast<double>(grain_bytes_);
    const int64_t least = all.all().least_grains();
    return absl::InvalidArgumentError(absl::StrFormat(
        "%.1f bytes per token are too few: the smallest plan takes %.1f, not "
        "counting sinks and windows, and is predicted to diverge by %.3g nats",
        *options().kv_bytes_per_token, static_cast<double>(least) * grain,
        Predicted(all.Spend(least), 0)));
  }

  absl::Status Judge() {
    AutoPrediction& prediction = best_.prediction;
    const double layers_of_part = static_cast<double>(spec_.num_layers()) /
                                  static_cast<double>(spent_.parts.size());
    JudgePlan({.spec = &spec_,
               .calibration = request_.calibration,
               .layers = &data_,
               .exact_sinks = options().exact_sinks,
               .span = span_,
               .kappa = kappa_.median,
               .exact_window = prediction.exact_window,
               .threads = options().threads,
               .on_part = [&] { Advance(layers_of_part); }},
              spent_.parts, prediction);
    return Cancelled();
  }

  // Computes the curve of loss over bytes for the chosen window and price of
  // time.
  void Draw() {
    constexpr int64_t kPoints = 24;
    AutoPrediction& prediction = best_.prediction;
    const std::vector<double>& loss = spending_->all().loss();
    const int64_t first = spending_->all().least_grains();
    auto last = static_cast<int64_t>(loss.size()) - 1;
    // Leaves out points at the end that do not lower the loss.
    while (last > first && loss[static_cast<size_t>(last - 1)] ==
                               loss[static_cast<size_t>(last)]) {
      --last;
    }
    const double fixed = prediction.bytes - prediction.marginal_bytes;
    for (int64_t i = 0; i < kPoints; ++i) {
      const int64_t grains = first + (last - first) * i / (kPoints - 1);
      const SpentBytes spent = spending_->Spend(grains);
      prediction.curve.push_back(
          {static_cast<double>(GrainBytesOf(spent)) + fixed,
           Predicted(spent, prediction.exact_window)});
    }
  }

  const PlanRequest& request_;
  const model::DecoderSpec& spec_;
  AutoOptions options_;
  int64_t grain_bytes_ = 0;
  // attention time per token of a dense cache, in all layers together
  double dense_slot_ns_ = 0;
  PlanCandidates candidates_;
  FittedKappa kappa_;
  int64_t span_ = 0;
  std::vector<PlannedLayer> data_;
  std::mutex mutex_;  // guards weights and progress while layers are measured
  double done_ = 0;   // number of layers that are done
  bool cancelled_ = false;
  std::unique_ptr<Spending> spending_;  // for the chosen price and window
  SpentBytes spent_;
  AutoPlan best_;
};

}  // namespace

absl::StatusOr<AutoPlan> PlanAuto(const PlanRequest& request,
                                  const AutoOptions& options) {
  const at::NoGradGuard no_grad;
  return CatchTorch([&] { return Planner(request, options).Plan(); });
}

}  // namespace kvasir::compress
