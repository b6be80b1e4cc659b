#include "compress/apply/range_collector.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/oracle/layer_program.h"
#include "compress/oracle/outer_forward.h"
#include "compress/planner/channel_codes.h"
#include "compress/planner/layer_moments.h"
#include "compress/planner/layer_spaces.h"
#include "compress/runtime/for_each_index.h"
#include "compress/runtime/torch_status.h"
#include "compress/tensors/tensor_loader.h"

namespace kvasir::compress {
namespace {

// Number of rows of a layer to which ranges are fitted. More rows hardly
// change the ranges.
constexpr int64_t kFittedRows = 8192;

struct Range {
  at::Tensor low;  // the minimum of each stored channel
  at::Tensor high;
};

// Returns whether the plan gives the layer's bits by runs of channels, as
// planners do. If so, ranges are fitted for the least squared error.
bool IsFitted(const kvasir::v1::LayerPlan& layer) {
  const auto has_runs = [](const auto& parts) {
    return std::any_of(parts.begin(), parts.end(), [](const auto& part) {
      return part.codec().bits().runs_size() > 0;
    });
  };
  return has_runs(layer.key().parts()) || has_runs(layer.value().parts()) ||
         has_runs(layer.joint());
}

bool HasStaticCodes(const kvasir::v1::LayerPlan& layer) {
  const auto any = [](const auto& parts) {
    return std::any_of(parts.begin(), parts.end(), [](const auto& part) {
      return part.codec().has_channel_static();
    });
  };
  return any(layer.key().parts()) || any(layer.value().parts()) ||
         any(layer.joint());
}

// Returns the parts of a layer that have CHANNEL_STATIC codes: key parts before
// the value part.
std::vector<const ProgramPart*> StaticParts(const LayerProgram& program) {
  std::vector<const ProgramPart*> parts;
  auto add = [&](const ProgramPart& part) {
    if (!part.latents.empty() && part.latents[0].codec.channel_static) {
      parts.push_back(&part);
    }
  };
  for (const ProgramPart& part : program.key) add(part);
  if (!program.joint) add(program.value);
  return parts;
}

// Collects the latents of one sequence, from which ranges are found.
class LatentObserver : public LayerObserver {
 public:
  // Keeps every `rows_step`-th row from `first_row` on. If `rows_step` is 0,
  // keeps no rows, but only the minimum and maximum of each channel.
  LatentObserver(const LayerProgram& program, int64_t first_row,
                 int64_t rows_step)
      : program_(program), first_row_(first_row), rows_step_(rows_step) {}

  void OnLatent(int64_t, plan::Side side, int index,
                const at::Tensor& latent) override {
    const ProgramPart& part = side == plan::Side::kKey
                                  ? program_.key[static_cast<size_t>(index)]
                                  : program_.value;
    if (!part.latents[0].codec.channel_static) return;
    const at::Tensor rows = Coded(part, latent.detach().flatten(0, -2));
    if (rows_step_ > 0) {
      rows_[part.prefix] =
          rows.slice(0, first_row_, rows.size(0), rows_step_).clone();
      return;
    }
    ranges_[part.prefix] = {std::get<0>(rows.min(0)), std::get<0>(rows.max(0))};
  }

  const std::map<std::string, Range>& ranges() const { return ranges_; }
  const std::map<std::string, at::Tensor>& rows() const { return rows_; }

 private:
  // Returns the numbers that are actually coded: the rows, multiplied by the
  // Hadamard matrix if the codec is HADAMARD_ONLINE.
  static at::Tensor Coded(const ProgramPart& part, const at::Tensor& rows) {
    if (!part.latents[0].codec.hadamard.defined()) return rows;
    std::vector<at::Tensor> latents;
    for (const ProgramLatent& latent : part.latents) {
      latents.push_back(
          at::mm(rows.slice(1, latent.offset, latent.offset + latent.width()),
                 latent.codec.hadamard.to(rows.scalar_type()).t()));
    }
    return at::cat(latents, 1);
  }

  const LayerProgram& program_;
  const int64_t first_row_;
  const int64_t rows_step_;
  std::map<std::string, Range> ranges_;
  std::map<std::string, at::Tensor> rows_;
};

// Fits the range of each stored channel of a part to the rows of all sequences.
ChannelRanges FitPart(const LayerProgram& program, const ProgramPart& part,
                      const std::vector<LatentObserver>& observers) {
  std::vector<at::Tensor> sequence_rows;
  for (const LatentObserver& observer : observers) {
    sequence_rows.push_back(observer.rows().at(part.prefix));
  }
  const at::Tensor rows = at::cat(sequence_rows, 0);
  const int64_t span =
      std::min<int64_t>(kRangePositions, program.spec.max_position_embeddings);
  std::vector<at::Tensor> minimum;
  std::vector<at::Tensor> scale;
  for (const ProgramLatent& latent : part.latents) {
    at::Tensor own =
        rows.slice(1, latent.offset, latent.offset + latent.width());
    if (part.post_rope && !latent.channel_pairs.empty()) {
      own = TurnedChannels(own, program.spec.rope, latent.channel_pairs,
                           SpreadPositions(own.size(0), span));
    }
    std::vector<int> bits(static_cast<size_t>(latent.width()), 0);
    for (const LatentCodec::Run& run : latent.codec.runs) {
      std::fill_n(bits.begin() + run.begin, run.width, run.bits);
    }
    const ChannelRanges ranges = FitRanges(own, bits);
    minimum.push_back(ranges.minimum);
    scale.push_back(ranges.scale);
  }
  return {at::cat(minimum), at::cat(scale)};
}

// Returns the greatest code of each stored channel.
at::Tensor Levels(const ProgramPart& part) {
  const at::Tensor levels = at::ones({part.stored_width}, at::kFloat);
  for (const ProgramLatent& latent : part.latents) {
    for (const LatentCodec::Run& run : latent.codec.runs) {
      const int64_t begin = latent.offset + run.begin;
      levels.slice(0, begin, begin + run.width).fill_((1 << run.bits) - 1);
    }
  }
  return levels;
}

// Returns the range of each channel, from its minimum to its maximum.
ChannelRanges WholePart(const ProgramPart& part,
                        const std::vector<LatentObserver>& observers) {
  Range whole = observers[0].ranges().at(part.prefix);
  for (const LatentObserver& observer : observers) {
    const Range& one = observer.ranges().at(part.prefix);
    whole.low = at::minimum(whole.low, one.low);
    whole.high = at::maximum(whole.high, one.high);
  }
  return {whole.low, (whole.high - whole.low) / Levels(part)};
}

}  // namespace

bool RangeCollector::IsNeeded(const kvasir::v1::KvPlan& plan) {
  return std::any_of(plan.layers().begin(), plan.layers().end(),
                     [](const auto& layer) { return HasStaticCodes(layer); });
}

int64_t RangeCollector::SequencesFor(const kvasir::v1::KvPlan& plan,
                                     const CalibrationSample& sample,
                                     const Options& options) {
  const bool fitted = std::all_of(
      plan.layers().begin(), plan.layers().end(), [](const auto& layer) {
        return IsFitted(layer) || !HasStaticCodes(layer);
      });
  if (!fitted) return sample.num_sequences();
  return std::min(sample.num_sequences(),
                  std::max(sample.num_domains(),
                           options.fitted_tokens / sample.sequence_tokens));
}

absl::StatusOr<RangeCollector> RangeCollector::Create(
    const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
    const CalibrationSample& sample, const Options& options) {
  RangeCollector collector(base, plan, options);
  for (int layer = 0; layer < plan.layers_size(); ++layer) {
    if (HasStaticCodes(plan.layers(layer))) collector.last_layer_ = layer;
  }
  if (collector.last_layer_ < 0) return collector;
  OuterTensors outer;
  KVASIR_ASSIGN_OR_RETURN(outer.embedding,
                          LoadTensor(base, model::kEmbeddingName));
  KVASIR_RETURN_IF_ERROR(LoadSmallOuter(base, outer));
  KVASIR_RETURN_IF_ERROR(CatchTorch([&] {
    const at::NoGradGuard no_grad;
    collector.rotation_ = MakeRotation(base.spec().rope, sample.sequence_tokens,
                                       at::TensorOptions().dtype(at::kFloat));
    for (int64_t s = 0; s < SequencesFor(plan, sample, options); ++s) {
      const std::vector<int32_t>& sequence =
          sample.sequences[static_cast<size_t>(s)];
      const at::Tensor ids =
          at::from_blob(const_cast<int32_t*>(sequence.data()),
                        {1, sample.sequence_tokens}, at::kInt)
              .to(at::kLong);
      collector.hidden_.push_back(EmbedTokens(base.spec(), outer, ids));
    }
    return absl::OkStatus();
  }));
  return collector;
}

absl::Status RangeCollector::FindRanges(const LayerProgram& program,
                                        TensorMap& tensors,
                                        TensorMap& attention) const {
  const std::vector<const ProgramPart*> parts = StaticParts(program);
  if (parts.empty()) return absl::OkStatus();
  const kvasir::v1::LayerPlan& plan =
      plan_.layers(static_cast<int>(program.layer));
  const bool fitted = IsFitted(plan);
  const int64_t tokens =
      static_cast<int64_t>(hidden_.size()) * hidden_[0].size(1);
  std::vector<LatentObserver> observers(
      hidden_.size(),
      LatentObserver(program, fitted ? int64_t{plan.exact_sinks()} : 0,
                     fitted ? (tokens + kFittedRows - 1) / kFittedRows : 0));
  std::vector<absl::Status> results(hidden_.size());
  ForEachIndex(
      static_cast<int64_t>(hidden_.size()), options_.threads, [&](int64_t i) {
        const at::NoGradGuard no_grad;
        const auto index = static_cast<size_t>(i);
        const absl::StatusOr<at::Tensor> x =
            AttentionInput(program, tensors, hidden_[index]);
        results[index] = x.ok()
                             ? AttentionForward(program, tensors, rotation_, *x,
                                                {.observer = &observers[index],
                                                 .code_latents = false,
                                                 .only_latents = true})
                                   .status()
                             : x.status();
      });
  for (const absl::Status& result : results) {
    KVASIR_RETURN_IF_ERROR(result);
  }
  for (const ProgramPart* part : parts) {
    const ChannelRanges ranges = fitted ? FitPart(program, *part, observers)
                                        : WholePart(*part, observers);
    if (!at::isfinite(ranges.minimum + ranges.scale).all().item<bool>()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", program.layer, " ", part->prefix,
                       ": some latents are NaN or infinite, so the ranges "
                       "of their codes cannot be set"));
    }
    for (TensorMap* map : {&tensors, &attention}) {
      (*map)[part->prefix + ".range.min"] = ranges.minimum;
      (*map)[part->prefix + ".range.scale"] = ranges.scale;
    }
  }
  return absl::OkStatus();
}

absl::Status RangeCollector::Collect(int64_t layer, TensorMap& attention) {
  if (layer > last_layer_) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(
      const LayerProgram program,
      MakeLayerProgram(base_.spec(), &plan_.layers(static_cast<int>(layer)),
                       layer));
  KVASIR_ASSIGN_OR_RETURN(const TensorMap base, LoadLayer(base_, layer));
  return CatchTorch([&]() -> absl::Status {
    const at::NoGradGuard no_grad;
    TensorMap tensors;
    for (const auto& [name, tensor] : base) {
      if (name.rfind("self_attn.", 0) != 0) tensors[name] = tensor;
    }
    for (const auto& [name, tensor] : attention) {
      tensors[name] = tensor.to(options_.stored).to(at::kFloat);
    }
    KVASIR_RETURN_IF_ERROR(FindRanges(program, tensors, attention));
    if (layer == last_layer_) return absl::OkStatus();
    std::vector<absl::Status> results(hidden_.size());
    ForEachIndex(static_cast<int64_t>(hidden_.size()), options_.threads,
                 [&](int64_t i) {
                   const at::NoGradGuard no_grad_here;
                   at::Tensor& hidden = hidden_[static_cast<size_t>(i)];
                   absl::StatusOr<at::Tensor> out =
                       LayerForward(program, tensors, rotation_, hidden);
                   results[static_cast<size_t>(i)] = out.status();
                   if (out.ok()) hidden = *std::move(out);
                 });
    for (const absl::Status& result : results) {
      KVASIR_RETURN_IF_ERROR(result);
    }
    return absl::OkStatus();
  });
}

}  // namespace kvasir::compress
