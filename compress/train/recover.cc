#include "compress/train/recover.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "compress/oracle/outer_forward.h"
#include "compress/runtime/device.h"
#include "compress/runtime/for_each_index.h"
#include "compress/runtime/torch_status.h"
#include "compress/train/crop_sampler.h"

namespace kvasir::compress {
namespace {

using LayerTensors = std::function<TensorMap(int64_t layer)>;

// Returns the hidden states after the final norm, [N, M], where N is the number
// of tokens in all sequences together. If `layer_tensors` is given, it replaces
// the decoder's tensors.
absl::StatusOr<at::Tensor> FinalStates(const ReferenceDecoder& decoder,
                                       const at::Tensor& ids,
                                       const LayerHooks& hooks,
                                       const LayerTensors& layer_tensors = {}) {
  at::Tensor hidden = EmbedTokens(decoder.spec(), decoder.outer(), ids);
  for (int64_t l = 0; l < decoder.spec().num_layers(); ++l) {
    KVASIR_ASSIGN_OR_RETURN(
        hidden,
        LayerForward(decoder.program(l),
                     layer_tensors ? layer_tensors(l) : decoder.layer(l),
                     decoder.RotationOf(hidden.size(1), l), hidden, hooks));
  }
  return FinalNorm(decoder.spec(), decoder.outer(), hidden).flatten(0, 1);
}

at::Tensor IdTensor(const TokenStream& text, int64_t begin, int64_t length) {
  return at::from_blob(const_cast<int32_t*>(text.ids.data() + begin), {length},
                       at::kInt)
      .to(at::kLong);
}

absl::Status CheckIds(const TokenStream& text, int64_t vocab_size) {
  for (size_t i = 0; i < text.ids.size(); ++i) {
    if (text.ids[i] < 0 || text.ids[i] >= vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "token ", i, " of the text has the id ", text.ids[i],
          ", but the model's vocabulary has ", vocab_size, " tokens"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const RecoverOptions& options,
                          const model::DecoderSpec& spec,
                          const TokenStream& text) {
  const int64_t crop = options.crop_tokens;
  if (crop < 2 || crop > spec.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("crops must have 2 to ", spec.max_position_embeddings,
                     " tokens (the model's context), but have ", crop));
  }
  if (crop > options.batch_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("a batch of ", options.batch_tokens,
                     " tokens is too small for a crop of ", crop, " tokens"));
  }
  // A crop needs one token more, because the target of its last token is the
  // next token.
  if (static_cast<int64_t>(text.ids.size()) < crop + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text has ", text.ids.size(), " tokens, but crops of ",
                     crop, " tokens need at least ", crop + 1));
  }
  const RecoverLossWeights& loss = options.loss;
  if (loss.cross_entropy <= 0.0 && loss.divergence <= 0.0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the weight of the cross entropy or of the divergence must be above 0, "
        "but they are ",
        loss.cross_entropy, " and ", loss.divergence));
  }
  if (options.adapters.rank < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the rank of the adapters must be at least 1, is ",
                     options.adapters.rank));
  }
  if (options.adapters.dropout < 0.0 || options.adapters.dropout >= 1.0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the dropout must be at least 0 and below 1, is ",
                     options.adapters.dropout));
  }
  if (loss.temperature <= 0.0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the temperature must be above 0, is ", loss.temperature));
  }
  if (options.steps < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the number of training steps must be at least 0, is ", options.steps));
  }
  return CheckIds(text, spec.vocab_size);
}

struct Batch {
  at::Tensor inputs;   // [B, T]
  at::Tensor targets;  // [B * T]
  uint64_t draw = 0;   // selects the random numbers of the dropout
};

class Recovery {
 public:
  Recovery(const ReferenceDecoder& student, const ReferenceDecoder& teacher,
           const TokenStream& text, const RecoverOptions& options)
      : student_(student),
        teacher_(teacher),
        text_(text),
        options_(options),
        threads_(ThreadsFor(student.device(), options.threads)),
        adapters_(student, options.adapters),
        optimizer_(adapters_.parameters(),
                   torch::optim::AdamWOptions()
                       .betas({0.9, 0.99})
                       .weight_decay(options.weight_decay)),
        sampler_(static_cast<int64_t>(text.ids.size()) - 1, options.crop_tokens,
                 options.adapters.seed) {
    // libtorch may use only one thread inside an operation, because
    // ForEachIndex already runs several threads, each on crops of its own.
    at::set_num_threads(1);
  }

  absl::StatusOr<Recovered> Run(
      const std::function<bool(const RecoverProgress&)>& on_step);

 private:
  struct StepLoss {
    double cross_entropy = 0.0;
    double divergence = 0.0;
  };
  // The sums of losses and gradients over the micro-batches of one thread.
  struct Sum {
    StepLoss loss;
    std::vector<at::Tensor> gradients;
  };

  double LearningRate(int64_t step) const;
  std::vector<Batch> NextBatches();
  absl::Status AddGradients(const Batch& batch, double batch_tokens,
                            Sum& sum) const;
  absl::StatusOr<StepLoss> Step(double learning_rate);
  void Clip(std::vector<at::Tensor>& gradients) const;
  void Update(const std::vector<at::Tensor>& gradients, double learning_rate);

  double Weighted(const StepLoss& loss) const {
    const double t = options_.loss.temperature;
    return options_.loss.cross_entropy * loss.cross_entropy +
           options_.loss.divergence * t * t * loss.divergence;
  }

  const ReferenceDecoder& student_;
  const ReferenceDecoder& teacher_;
  const TokenStream& text_;
  const RecoverOptions& options_;
  const int threads_;
  AdapterSet adapters_;
  torch::optim::AdamW optimizer_;
  CropSampler sampler_;
  int64_t crops_taken_ = 0;
  uint64_t draws_ = 0;
};

double Recovery::LearningRate(int64_t step) const {
  const double fraction =
      (static_cast<double>(step) + 0.5) / static_cast<double>(options_.steps);
  if (fraction < options_.warmup) {
    return options_.learning_rate * fraction / options_.warmup;
  }
  const double done = (fraction - options_.warmup) / (1.0 - options_.warmup);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return options_.learning_rate *
         (options_.final_learning_rate +
          (1.0 - options_.final_learning_rate) * cosine);
}

std::vector<Batch> Recovery::NextBatches() {
  const int64_t length = options_.crop_tokens;
  const int64_t crops = options_.batch_tokens / length;
  const int64_t per_micro =
      std::max<int64_t>(options_.micro_batch_tokens / length, 1);
  std::vector<Batch> batches;
  for (int64_t first = 0; first < crops; first += per_micro) {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> targets;
    for (int64_t i = first; i < std::min(first + per_micro, crops); ++i) {
      const int64_t crop = crops_taken_ + i;
      const at::Tensor ids =
          IdTensor(text_, sampler_.CropBegin(crop), length + 1);
      inputs.push_back(ids.slice(0, 0, length).clone());
      // Every second crop begins with the start token, as a prompt does.
      if (options_.start_token.has_value() && crop % 2 == 0) {
        inputs.back()[0].fill_(*options_.start_token);
      }
      targets.push_back(ids.slice(0, 1));
    }
    batches.push_back({at::stack(inputs).to(student_.device()),
                       at::cat(targets).to(student_.device()), draws_++});
  }
  crops_taken_ += crops;
  return batches;
}

absl::Status Recovery::AddGradients(const Batch& batch, double batch_tokens,
                                    Sum& sum) const {
  const LayerHooks hooks{.code_latents = options_.through_codes};
  Prediction teacher;
  if (options_.loss.divergence > 0.0) {
    const at::NoGradGuard no_grad;
    KVASIR_ASSIGN_OR_RETURN(teacher.normal,
                            FinalStates(teacher_, batch.inputs, hooks));
    teacher.head = teacher_.outer().head;
  }
  KVASIR_ASSIGN_OR_RETURN(
      const at::Tensor normal,
      FinalStates(student_, batch.inputs, hooks, [&](int64_t layer) {
        return adapters_.AdaptLayer(layer, batch.draw);
      }));
  const RecoverLoss loss =
      ComputeRecoverLoss({normal.detach(), student_.outer().head}, teacher,
                         batch.targets, options_.loss);
  std::vector<at::Tensor> parts = torch::autograd::grad(
      {normal}, adapters_.parameters(), {loss.gradient / batch_tokens});
  const at::NoGradGuard no_grad;
  sum.loss.cross_entropy += loss.cross_entropy / batch_tokens;
  sum.loss.divergence += loss.divergence / batch_tokens;
  if (sum.gradients.empty()) {
    sum.gradients = std::move(parts);
    return absl::OkStatus();
  }
  for (size_t p = 0; p < parts.size(); ++p) sum.gradients[p].add_(parts[p]);
  return absl::OkStatus();
}

absl::StatusOr<Recovery::StepLoss> Recovery::Step(double learning_rate) {
  const std::vector<Batch> batches = NextBatches();
  int64_t tokens = 0;
  for (const Batch& batch : batches) tokens += batch.targets.numel();
  // Each thread has a sum of its own. The sums are added in the order of the
  // threads, so that all runs with the same number of threads give the same
  // result.
  const auto count = static_cast<int64_t>(batches.size());
  std::vector<Sum> sums(
      static_cast<size_t>(std::min<int64_t>(threads_, count)));
  std::vector<absl::Status> failures(batches.size());
  ForEachIndex(count, threads_, [&](int64_t i) {
    const auto index = static_cast<size_t>(i);
    failures[index] = AddGradients(batches[index], static_cast<double>(tokens),
                                   sums[static_cast<size_t>(i % threads_)]);
  });
  for (const absl::Status& failure : failures) {
    KVASIR_RETURN_IF_ERROR(failure);
  }
  const at::NoGradGuard no_grad;
  Sum& total = sums[0];
  for (size_t t = 1; t < sums.size(); ++t) {
    total.loss.cross_entropy += sums[t].loss.cross_entropy;
    total.loss.divergence += sums[t].loss.divergence;
    for (size_t p = 0; p < total.gradients.size(); ++p) {
      total.gradients[p].add_(sums[t].gradients[p]);
    }
  }
  Clip(total.gradients);
  Update(total.gradients, learning_rate);
  return total.loss;
}

void Recovery::Clip(std::vector<at::Tensor>& gradients) const {
  double square = 0.0;
  for (const at::Tensor& gradient : gradients) {
    square += gradient.square().sum(at::kDouble).item<double>();
  }
  const double norm = std::sqrt(square);
  if (norm <= options_.clip_norm) return;
  for (at::Tensor& gradient : gradients) {
    gradient.mul_(options_.clip_norm / norm);
  }
}

void Recovery::Update(const std::vector<at::Tensor>& gradients,
                      double learning_rate) {
  torch::optim::OptimizerParamGroup& group = optimizer_.param_groups()[0];
  group.options().set_lr(learning_rate);
  for (size_t p = 0; p < gradients.size(); ++p) {
    group.params()[p].mutable_grad() = gradients[p];
  }
  optimizer_.step();
}

absl::StatusOr<Recovered> Recovery::Run(
    const std::function<bool(const RecoverProgress&)>& on_step) {
  const absl::Time started = absl::Now();
  Recovered result;
  result.trained_parameters = adapters_.num_parameters();
  for (int64_t step = 0; step < options_.steps; ++step) {
    RecoverProgress progress;
    progress.step = step + 1;
    progress.learning_rate = LearningRate(step);
    KVASIR_ASSIGN_OR_RETURN(const StepLoss loss, Step(progress.learning_rate));
    progress.cross_entropy = loss.cross_entropy;
    progress.divergence = loss.divergence;
    result.last_loss = Weighted(loss);
    if (step == 0) result.first_loss = result.last_loss;
    if (!std::isfinite(result.last_loss)) {
      return absl::InternalError(absl::StrCat("the loss of step ", step + 1,
                                              " is ", result.last_loss,
                                              "; a lower --lr may help"));
    }
    result.tokens_seen = crops_taken_ * options_.crop_tokens;
    progress.tokens_per_second = static_cast<double>(result.tokens_seen) /
                                 absl::ToDoubleSeconds(absl::Now() - started);
    if (!on_step(progress)) {
      return absl::CancelledError(
          absl::StrCat("training was stopped after step ", step + 1,
                       "; nothing was written"));
    }
  }
  result.steps = options_.steps;
  for (int64_t l = 0; l < student_.spec().num_layers(); ++l) {
    result.layers.push_back(adapters_.MergeLayer(l));
    for (auto& [name, tensor] : result.layers.back()) {
      tensor = tensor.cpu();
      if (!at::isfinite(tensor).all().item<bool>()) {
        return absl::InternalError(absl::StrCat(
            "layer ", l, ": ", name,
            " is not finite after training; a lower --lr may help"));
      }
    }
  }
  result.elapsed = absl::Now() - started;
  return result;
}

}  // namespace

absl::Status CheckTeacher(const model::DecoderSpec& student,
                          const model::DecoderSpec& teacher) {
  struct Size {
    const char* what;
    int64_t student;
    int64_t teacher;
  };
  for (const Size& size :
       {Size{"the number of layers", student.num_layers(),
             teacher.num_layers()},
        Size{"the hidden size", student.hidden_size, teacher.hidden_size},
        Size{"the number of query heads", student.num_heads, teacher.num_heads},
        Size{"the number of KV heads", student.num_kv_heads,
             teacher.num_kv_heads},
        Size{"the head dim", student.head_dim, teacher.head_dim},
        Size{"the intermediate size", student.intermediate_size,
             teacher.intermediate_size},
        Size{"the vocabulary size", student.vocab_size, teacher.vocab_size}}) {
    if (size.student != size.teacher) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the teacher does not match the trained model: ", size.what, " is ",
          size.teacher, " in the teacher, but ", size.student,
          " in the trained model"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Recovered> Recover(
    const ReferenceDecoder& student, const ReferenceDecoder& teacher,
    const TokenStream& text, const RecoverOptions& options,
    const std::function<bool(const RecoverProgress&)>& on_step) {
  KVASIR_RETURN_IF_ERROR(CheckTeacher(student.spec(), teacher.spec()));
  KVASIR_RETURN_IF_ERROR(CheckOptions(options, student.spec(), text));
  if (student.device() != teacher.device()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the teacher is on the device ", teacher.device().str(),
                     ", but the trained model is on ", student.device().str()));
  }
  return CatchTorch(
      [&] { return Recovery(student, teacher, text, options).Run(on_step); });
}

RecoverMemory EstimateRecoverMemory(const model::DecoderSpec& spec,
                                    const RecoverOptions& options) {
  constexpr int64_t kFloatBytes = 4;
  const int64_t width = spec.hidden_size;
  const int64_t queries = spec.num_heads * spec.head_dim;
  const int64_t keys = spec.num_kv_heads * spec.head_dim;
  const int64_t attention = 2 * width * (queries + keys);
  const int64_t mlp =
      model::MlpMatrices(spec.mlp) * width * spec.mlp_features();
  const int64_t model = spec.num_layers() * (attention + mlp) +
                        (spec.tied_head ? 1 : 2) * spec.vocab_size * width;
  // The numbers that the autograd graph keeps for each token in each layer.
  const int64_t per_token = 6 * width + 5 * (queries + keys) +
                            spec.num_heads * options.crop_tokens +
                            4 * spec.used_mlp_features();
  const int64_t micro = std::max(
      options.micro_batch_tokens / options.crop_tokens * options.crop_tokens,
      options.crop_tokens);
  // The merged weights and their gradients, which every micro-batch makes anew.
  const int64_t merged = 2 * spec.num_layers() * attention;
  const int64_t logits = kRecoverLossBuffers * spec.vocab_size *
                         std::min(RecoverLossRows(spec.vocab_size), micro);
  // The allocator holds about twice the memory in use (measured), because
  // threads free blocks of many sizes.
  constexpr int64_t kKept = 2;
  return {2 * model * kFloatBytes,
          kKept * std::max(options.threads, 1) * kFloatBytes *
              (spec.num_layers() * micro * per_token + merged + logits)};
}

}  // namespace kvasir::compress
