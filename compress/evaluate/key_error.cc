#include "compress/evaluate/key_error.h"

#include <cmath>
#include <utility>

#include "base/status_macros.h"
#include "compress/oracle/outer_forward.h"
#include "compress/runtime/torch_status.h"

namespace kvasir::compress {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::Part;

// Records the input and the keys of one layer.
class Recorder : public LayerObserver {
 public:
  void OnAttentionInput(int64_t /*layer*/, const at::Tensor& x) override {
    input = x;
  }
  void OnKey(int64_t /*layer*/, const at::Tensor& tensor) override {
    key = tensor;
  }
  void OnRotatedKey(int64_t /*layer*/, const at::Tensor& tensor) override {
    rotated_key = tensor;
  }

  at::Tensor input;
  at::Tensor key;
  at::Tensor rotated_key;
};

// Sums of k kT and k over tokens, where k has the keys of all heads side by
// side.
struct Moments {
  at::Tensor gram;  // [W, W]
  at::Tensor sum;   // [W]
  double tokens = 0.0;

  void Add(const at::Tensor& key) {
    const at::Tensor rows = key.flatten(2).flatten(0, 1).to(at::kDouble);
    const at::Tensor product = at::matmul(rows.t(), rows);
    gram = gram.defined() ? gram + product : product;
    const at::Tensor added = rows.sum(0);
    sum = sum.defined() ? sum + added : added;
    tokens += static_cast<double>(rows.size(0));
  }
  at::Tensor Covariance() const {
    const at::Tensor mean = sum / tokens;
    return gram / tokens - at::outer(mean, mean);
  }
};

at::Tensor FallingVariances(const Moments& moments) {
  return at::linalg_eigvalsh(moments.Covariance(), "L").flip(0).clamp_min(0);
}

// Returns the share of the channels' energy that is lost if `codec` codes them.
// `variances` are in falling order, which matters only if channels have
// different bit widths.
double LostShare(const at::Tensor& variances, const Codec& codec) {
  const auto& schedule = codec.bits().schedule();
  const int64_t run = variances.size(0) / schedule.size();
  double lost = 0.0;
  for (int i = 0; i < schedule.size(); ++i) {
    lost += variances.narrow(0, i * run, run).sum().item<double>() *
            std::pow(4.0, -static_cast<double>(schedule.Get(i)));
  }
  return lost / variances.sum().item<double>();
}

// Returns whether the formula for the predicted error covers this part. The
// part must have static ranges, and either no basis or one basis for all heads.
bool IsAnalysed(const Part& part) {
  const Codec& codec = part.codec();
  if (!codec.has_bits() || !codec.has_channel_static()) return false;
  if (part.has_full()) return true;
  return codec.has_basis_static() && part.low_rank().groups_size() == 1;
}

}  // namespace

absl::StatusOr<KeyErrorMeter> KeyErrorMeter::Create(
    const ReferenceDecoder& teacher, const std::vector<at::Tensor>& windows) {
  return CatchTorch([&]() -> absl::StatusOr<KeyErrorMeter> {
    const at::NoGradGuard no_grad;
    KeyErrorMeter meter;
    const int64_t num_layers = teacher.spec().num_layers();
    meter.layers_.resize(static_cast<size_t>(num_layers));
    std::vector<Moments> plain(meter.layers_.size());
    std::vector<Moments> rotated(meter.layers_.size());
    for (const at::Tensor& ids : windows) {
      at::Tensor hidden = EmbedTokens(teacher.spec(), teacher.outer(),
                                      ids.unsqueeze(0).to(teacher.device()));
      for (size_t l = 0; l < meter.layers_.size(); ++l) {
        Recorder recorder;
        const auto index = static_cast<int64_t>(l);
        KVASIR_ASSIGN_OR_RETURN(
            hidden, LayerForward(teacher.program(index), teacher.layer(index),
                                 teacher.RotationOf(hidden.size(1), index),
                                 hidden, {.observer = &recorder}));
        Layer& layer = meter.layers_[l];
        layer.inputs.push_back(recorder.input);
        layer.rotated_keys.push_back(recorder.rotated_key);
        plain[l].Add(recorder.key);
        rotated[l].Add(recorder.rotated_key);
      }
    }
    const double gain = teacher.spec().rope.attention_factor;
    for (size_t l = 0; l < meter.layers_.size(); ++l) {
      Layer& layer = meter.layers_[l];
      layer.variances = FallingVariances(plain[l]);
      layer.rotated_variances = FallingVariances(rotated[l]);
      layer.centred_energy =
          layer.variances.sum().item<double>() * plain[l].tokens * gain * gain;
    }
    return meter;
  });
}

absl::StatusOr<std::optional<KeyError>> KeyErrorMeter::Measure(
    const ReferenceDecoder& decoder) const {
  return CatchTorch([&]() -> absl::StatusOr<std::optional<KeyError>> {
    const at::NoGradGuard no_grad;
    if (!decoder.plan().has_value()) return std::nullopt;
    double measured = 0.0;
    double predicted = 0.0;
    bool analysed = true;
    for (size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      const auto index = static_cast<int64_t>(l);
      double error = 0.0;
      for (size_t w = 0; w < layer.inputs.size(); ++w) {
        Recorder recorder;
        KVASIR_RETURN_IF_ERROR(
            AttentionForward(decoder.program(index), decoder.layer(index),
                             decoder.RotationOf(layer.inputs[w].size(1), index),
                             layer.inputs[w], {.observer = &recorder})
                .status());
        if (!recorder.rotated_key.defined()) return std::nullopt;
        error += (recorder.rotated_key - layer.rotated_keys[w])
                     .square()
                     .sum(at::kDouble)
                     .item<double>();
      }
      measured += error / layer.centred_energy;
      const auto& key = decoder.plan()->layers(static_cast<int>(index)).key();
      analysed = analysed && key.parts_size() == 1 && IsAnalysed(key.parts(0));
      if (!analysed) continue;
      predicted += LostShare(key.parts(0).stored() == kvasir::v1::POST_ROPE
                                 ? layer.rotated_variances
                                 : layer.variances,
                             key.parts(0).codec());
    }
    const auto count = static_cast<double>(layers_.size());
    KeyError result{.relative = std::sqrt(measured / count)};
    if (analysed) result.predicted = std::sqrt(predicted / count);
    return result;
  });
}

}  // namespace kvasir::compress
