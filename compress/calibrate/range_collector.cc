#include "compress/calibrate/range_collector.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/oracle/layer_program.h"
#include "compress/oracle/tensor_loader.h"
#include "compress/runtime/for_each_index.h"
#include "compress/runtime/torch_status.h"

namespace kvasir::compress {
namespace {

struct Range {
  at::Tensor low;  // [ΣR']
  at::Tensor high;
};

bool HasStaticCodes(const kvasir::v1::LayerPlan& layer) {
  const auto any = [](const auto& parts) {
    return std::any_of(parts.begin(), parts.end(), [](const auto& part) {
      return part.codec().has_channel_static();
    });
  };
  return any(layer.key().parts()) || any(layer.value().parts()) ||
         any(layer.joint());
}

// Keys of a layer come before its value.
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

// What of one sequence goes into the ranges.
class LatentObserver : public LayerObserver {
 public:
  explicit LatentObserver(const LayerProgram& program) : program_(program) {}

  void OnLatent(int64_t, plan::Side side, int index,
                const at::Tensor& latent) override {
    const ProgramPart& part = side == plan::Side::kKey
                                  ? program_.key[static_cast<size_t>(index)]
                                  : program_.value;
    if (!part.latents[0].codec.channel_static) return;
    const at::Tensor rows = Coded(part, latent.detach().flatten(0, -2));
    ranges_[part.prefix] = {std::get<0>(rows.min(0)), std::get<0>(rows.max(0))};
  }

  const std::map<std::string, Range>& ranges() const { return ranges_; }

 private:
  // The numbers that are coded: after HADAMARD_ONLINE.
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
  std::map<std::string, Range> ranges_;
};

// (greatest code) of each channel [ΣR'].
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

}  // namespace

bool RangeCollector::IsNeeded(const kvasir::v1::KvPlan& plan) {
  return std::any_of(plan.layers().begin(), plan.layers().end(),
                     [](const auto& layer) { return HasStaticCodes(layer); });
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
    for (const std::vector<int32_t>& sequence : sample.sequences) {
      const at::Tensor ids =
          at::from_blob(const_cast<int32_t*>(sequence.data()),
                        {1, sample.sequence_tokens}, at::kInt)
              .to(at::kLong);
      collector.hidden_.push_back(EmbedTokens(outer, ids));
    }
    return absl::OkStatus();
  }));
  return collector;
}

absl::Status RangeCollector::FindRanges(const LayerProgram& program,
                                        TensorMap& tensors,
                                        TensorMap& attention) const {
  // Ranges of nothing let the layer run; its latents do not depend on them.
  const std::vector<const ProgramPart*> parts = StaticParts(program);
  if (parts.empty()) return absl::OkStatus();
  for (const ProgramPart* part : parts) {
    for (const char* name : {".range.min", ".range.scale"}) {
      tensors[part->prefix + name] =
          at::zeros({part->stored_width}, at::kFloat);
    }
  }
  std::vector<LatentObserver> observers(hidden_.size(),
                                        LatentObserver(program));
  std::vector<absl::Status> results(hidden_.size());
  ForEachIndex(
      static_cast<int64_t>(hidden_.size()), options_.threads, [&](int64_t i) {
        const at::NoGradGuard no_grad;
        const auto index = static_cast<size_t>(i);
        const absl::StatusOr<at::Tensor> x =
            AttentionInput(program, tensors, hidden_[index]);
        results[index] = x.ok()
                             ? AttentionForward(program, tensors, rotation_, *x,
                                                {.observer = &observers[index]})
                                   .status()
                             : x.status();
      });
  for (const absl::Status& result : results) {
    KVASIR_RETURN_IF_ERROR(result);
  }
  for (const ProgramPart* part : parts) {
    Range whole = observers[0].ranges().at(part->prefix);
    for (const LatentObserver& observer : observers) {
      const Range& one = observer.ranges().at(part->prefix);
      whole.low = at::minimum(whole.low, one.low);
      whole.high = at::maximum(whole.high, one.high);
    }
    const at::Tensor scale = (whole.high - whole.low) / Levels(*part);
    if (!at::isfinite(scale).all().item<bool>()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", program.layer, " ", part->prefix,
                       ": latents are not finite, so codes have no range"));
    }
    tensors[part->prefix + ".range.min"] = whole.low;
    tensors[part->prefix + ".range.scale"] = scale;
    attention[part->prefix + ".range.min"] = whole.low;
    attention[part->prefix + ".range.scale"] = scale;
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
