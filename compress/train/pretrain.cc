#include "compress/train/pretrain.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <optional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "compress/artifact/hf_config.h"
#include "compress/artifact/safetensors_writer.h"
#include "compress/runtime/device.h"
#include "compress/runtime/for_each_index.h"
#include "compress/train/crop_sampler.h"
#include "compress/train/decoder.h"
#include "compress/train/optimizer.h"

namespace kvasir::compress {
namespace {

constexpr char kStateFile[] = "pretrain.state";

// What the run is made of; a state is resumed only under the same. Its length
// is not in it, so that a run can be ended early or made longer.
std::string DescribeRun(const PretrainOptions& options,
                        const TokenStream& train) {
  const model::ModelShape& s = options.shape;
  std::string text = absl::StrCat(
      "layers ", s.num_layers, " hidden ", s.hidden_size, " intermediate ",
      s.intermediate_size, " heads ", s.num_query_heads, "/", s.num_kv_heads,
      "x", s.head_dim, " vocab ", s.vocab_size, " context ", s.max_position,
      " theta ", s.rope_theta, " tied ", s.tied_embedding);
  absl::StrAppend(&text, " seed ", options.seed, " batch ",
                  options.batch_tokens, " micro ", options.micro_batch_tokens,
                  " lr ", options.learning_rate, " warmup ", options.warmup,
                  " final ", options.final_learning_rate, " decay ",
                  options.weight_decay, " clip ", options.clip_norm, " muon ",
                  options.muon, " train tokens ", train.ids.size());
  for (const RampStage& stage : options.ramp) {
    absl::StrAppend(&text, " ", stage.crop_tokens, "@", stage.begin);
  }
  return text;
}

absl::Status ValidateIds(const TokenStream& stream, int64_t vocab_size,
                         const char* what) {
  for (size_t i = 0; i < stream.ids.size(); ++i) {
    if (stream.ids[i] < 0 || stream.ids[i] >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " token ", i, " is ", stream.ids[i],
                       ", the vocabulary has ", vocab_size));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateOptions(const PretrainOptions& options,
                             const TokenStream& train) {
  KVASIR_RETURN_IF_ERROR(model::ValidateShape(options.shape));
  if (options.shape.family != model::ShapeFamily::kLlama ||
      options.shape.qkv_bias ||
      options.shape.rope_scaling.kind != model::RopeScalingKind::kNone) {
    return absl::InvalidArgumentError(
        "pretrain makes Llama decoders without biases and RoPE scaling");
  }
  const bool timed = options.time_budget > absl::ZeroDuration();
  if (timed == (options.steps > 0)) {
    return absl::InvalidArgumentError(
        "give either a number of steps or a time budget");
  }
  if (options.ramp.empty() || options.ramp.front().begin != 0.0) {
    return absl::InvalidArgumentError("the crop ramp must begin at 0");
  }
  for (const RampStage& stage : options.ramp) {
    if (stage.crop_tokens < 2 ||
        stage.crop_tokens > options.shape.max_position) {
      return absl::InvalidArgumentError(
          absl::StrCat("crops of ", stage.crop_tokens, " tokens, want 2 to ",
                       options.shape.max_position, " (max position)"));
    }
    if (stage.crop_tokens > options.batch_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("a batch of ", options.batch_tokens,
                       " tokens holds no crop of ", stage.crop_tokens));
    }
    const auto have = static_cast<int64_t>(train.ids.size());
    if (have < stage.crop_tokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the training text has ", have, " tokens, want ", stage.crop_tokens));
    }
  }
  return absl::OkStatus();
}

struct Batch {
  torch::Tensor inputs;   // [B, T]
  torch::Tensor targets;  // [B * T]
};

torch::Tensor CropToTensor(const TokenStream& stream, int64_t begin,
                           int64_t length) {
  return torch::from_blob(const_cast<int32_t*>(stream.ids.data() + begin),
                          {length}, torch::kInt32)
      .to(torch::kInt64);
}

class Trainer {
 public:
  Trainer(const PretrainOptions& options, torch::Device device,
          const TokenStream& train, const TokenStream& validation)
      : options_(options),
        train_(train),
        validation_(validation),
        device_(device),
        threads_(ThreadsFor(device, options.threads)),
        decoder_(options.shape, options.seed, device_),
        parameters_(decoder_.parameters()),
        optimizer_(parameters_, {.muon = options.muon,
                                 .weight_decay = options.weight_decay}),
        description_(DescribeRun(options, train)) {
    // Threads work on crops of their own (ForEachIndex).
    at::set_num_threads(1);
    for (const NamedTensor& parameter : parameters_) {
      tensors_.push_back(parameter.tensor);
    }
  }

  absl::StatusOr<PretrainResult> Run(
      const std::function<bool(const PretrainProgress&)>& on_step);

 private:
  double Fraction() const;
  double LearningRate(double fraction) const;
  size_t StageAt(double fraction) const;
  absl::Duration Elapsed() const {
    return elapsed_before_ + (absl::Now() - started_);
  }

  Batch MakeBatch(int64_t first_crop, int64_t crops, int64_t crop_tokens);
  // One optimizer step; the batch's mean loss in nats per token.
  double Step(double fraction);
  struct NatsPer {
    double byte = -1.0;
    double token = -1.0;
  };
  NatsPer Validate(int64_t window_tokens, int64_t max_windows) const;

  absl::Status SaveState() const;
  absl::Status LoadState();
  absl::Status RefuseOldState() const;
  // Rounds the parameters to bf16: what is measured last is what is written.
  void RoundToStored();
  absl::Status Export() const;

  const PretrainOptions& options_;
  const TokenStream& train_;
  const TokenStream& validation_;
  const torch::Device device_;
  const int threads_;
  Decoder decoder_;
  std::vector<NamedTensor> parameters_;
  std::vector<torch::Tensor> tensors_;
  Optimizer optimizer_;
  const std::string description_;

  std::optional<CropSampler> sampler_;
  size_t stage_ = 0;
  int64_t stage_crops_ = 0;  // crops taken in this stage
  int64_t step_ = 0;
  int64_t tokens_seen_ = 0;
  absl::Duration elapsed_before_;
  absl::Time started_ = absl::Now();
};

double Trainer::Fraction() const {
  if (options_.steps > 0) {
    return static_cast<double>(step_) / static_cast<double>(options_.steps);
  }
  return absl::FDivDuration(Elapsed(), options_.time_budget);
}

double Trainer::LearningRate(double fraction) const {
  double scale = 1.0;
  if (fraction < options_.warmup) {
    // Half a step ahead, so that the first step moves.
    scale = (fraction + 0.05 * options_.warmup) / (1.05 * options_.warmup);
  } else {
    const double done =
        std::min((fraction - options_.warmup) / (1.0 - options_.warmup), 1.0);
    const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * done));
    scale = options_.final_learning_rate +
            (1.0 - options_.final_learning_rate) * cosine;
  }
  return options_.learning_rate * scale;
}

size_t Trainer::StageAt(double fraction) const {
  size_t stage = 0;
  while (stage + 1 < options_.ramp.size() &&
         options_.ramp[stage + 1].begin <= fraction) {
    ++stage;
  }
  return stage;
}

Batch Trainer::MakeBatch(int64_t first_crop, int64_t crops,
                         int64_t crop_tokens) {
  // Inputs are the targets shifted by one place: behind the start token in
  // every second crop, as prompts are, else behind the text's own last token.
  torch::Tensor inputs = torch::empty({crops, crop_tokens}, torch::kInt64);
  torch::Tensor targets = torch::empty({crops, crop_tokens}, torch::kInt64);
  for (int64_t i = 0; i < crops; ++i) {
    const int64_t begin = sampler_->CropBegin(first_crop + i);
    const bool as_prompt = begin == 0 || (first_crop + i) % 2 == 0;
    const torch::Tensor crop = CropToTensor(train_, begin, crop_tokens);
    targets[i].copy_(crop);
    inputs[i].slice(0, 1).copy_(crop.slice(0, 0, crop_tokens - 1));
    inputs[i][0].fill_(as_prompt ? options_.shape.bos_token_id
                                 : train_.ids[static_cast<size_t>(begin - 1)]);
  }
  return {inputs.to(device_), targets.reshape({-1}).to(device_)};
}

double Trainer::Step(double fraction) {
  const size_t stage = StageAt(fraction);
  if (!sampler_ || stage != stage_) {
    if (stage != stage_) stage_crops_ = 0;
    stage_ = stage;
    sampler_.emplace(static_cast<int64_t>(train_.ids.size()),
                     options_.ramp[stage].crop_tokens, options_.seed);
  }
  const int64_t crop_tokens = options_.ramp[stage].crop_tokens;
  const int64_t crops = options_.batch_tokens / crop_tokens;
  const int64_t per_micro =
      std::max<int64_t>(options_.micro_batch_tokens / crop_tokens, 1);
  std::vector<Batch> batches;
  for (int64_t i = 0; i < crops; i += per_micro) {
    batches.push_back(MakeBatch(stage_crops_ + i,
                                std::min(per_micro, crops - i), crop_tokens));
  }
  const double batch_tokens = static_cast<double>(crops * crop_tokens);

  // One gradient sum per thread, added in thread order: the same result in
  // every run with this number of threads.
  const auto count = static_cast<int64_t>(batches.size());
  const auto sums = static_cast<size_t>(std::min<int64_t>(threads_, count));
  std::vector<std::vector<torch::Tensor>> gradients(sums);
  std::vector<double> losses(sums, 0.0);
  ForEachIndex(count, threads_, [&](int64_t i) {
    const auto thread = static_cast<size_t>(i % threads_);
    const Batch& batch = batches[static_cast<size_t>(i)];
    const torch::Tensor loss =
        torch::nll_loss(torch::log_softmax(decoder_.Forward(batch.inputs), -1),
                        batch.targets, /*weight=*/{}, at::Reduction::Sum) /
        batch_tokens;
    std::vector<torch::Tensor> parts = torch::autograd::grad({loss}, tensors_);
    torch::NoGradGuard no_grad;
    losses[thread] += loss.item<double>();
    if (gradients[thread].empty()) {
      gradients[thread] = std::move(parts);
    } else {
      for (size_t p = 0; p < parts.size(); ++p) {
        gradients[thread][p].add_(parts[p]);
      }
    }
  });

  torch::NoGradGuard no_grad;
  std::vector<torch::Tensor>& total = gradients[0];
  torch::Tensor square = torch::zeros({}, tensors_[0].options());
  for (size_t p = 0; p < total.size(); ++p) {
    for (size_t t = 1; t < sums; ++t) total[p].add_(gradients[t][p]);
    square += total[p].square().sum();
  }
  const double norm = std::sqrt(square.item<double>());
  if (norm > options_.clip_norm) {
    for (torch::Tensor& gradient : total) {
      gradient.mul_(options_.clip_norm / norm);
    }
  }
  optimizer_.Step(total, LearningRate(fraction), threads_);
  stage_crops_ += crops;
  tokens_seen_ += crops * crop_tokens;
  ++step_;
  double loss = 0.0;
  for (const double part : losses) loss += part;
  return loss;
}

Trainer::NatsPer Trainer::Validate(int64_t window_tokens,
                                   int64_t max_windows) const {
  const auto total = static_cast<int64_t>(validation_.ids.size());
  if (total == 0) return {};
  const int64_t all = (total + window_tokens - 1) / window_tokens;
  const int64_t windows = std::min(all, max_windows);
  std::vector<double> nats(static_cast<size_t>(windows), 0.0);
  std::vector<int64_t> tokens(static_cast<size_t>(windows), 0);
  ForEachIndex(windows, threads_, [&](int64_t i) {
    torch::NoGradGuard no_grad;
    const int64_t begin = (i * all / windows) * window_tokens;
    const int64_t length = std::min(window_tokens, total - begin);
    const torch::Tensor targets =
        CropToTensor(validation_, begin, length).to(device_);
    const torch::Tensor start =
        torch::full({1}, options_.shape.bos_token_id, targets.options());
    const torch::Tensor inputs =
        torch::cat({start, targets.slice(0, 0, length - 1)}).unsqueeze(0);
    nats[static_cast<size_t>(i)] =
        torch::nll_loss(torch::log_softmax(decoder_.Forward(inputs), -1),
                        targets, /*weight=*/{}, at::Reduction::Sum)
            .item<double>();
    tokens[static_cast<size_t>(i)] = length;
  });
  double nats_sum = 0.0;
  int64_t token_sum = 0;
  for (size_t i = 0; i < nats.size(); ++i) {
    nats_sum += nats[i];
    token_sum += tokens[i];
  }
  const double per_token = nats_sum / static_cast<double>(token_sum);
  // Exact when all windows are read; else the sample's bytes are taken to be
  // as many per token as the whole text's.
  const double bytes_per_token =
      static_cast<double>(validation_.text_bytes) / static_cast<double>(total);
  return {per_token / bytes_per_token, per_token};
}

absl::StatusOr<PretrainResult> Trainer::Run(
    const std::function<bool(const PretrainProgress&)>& on_step) {
  KVASIR_RETURN_IF_ERROR(options_.resume ? LoadState() : RefuseOldState());
  started_ = absl::Now();
  absl::Time last_save = started_;
  absl::Time last_validation = started_;
  const int64_t first_tokens = tokens_seen_;
  double loss = 0.0;
  for (double fraction = Fraction(); fraction < 1.0; fraction = Fraction()) {
    loss = Step(fraction);
    if (!std::isfinite(loss)) {
      return absl::InternalError(absl::StrCat(
          "the loss of step ", step_, " is ", loss,
          "; a lower --lr may help (the last saved state is kept)"));
    }
    const absl::Time now = absl::Now();
    PretrainProgress progress;
    progress.step = step_;
    progress.fraction = std::min(Fraction(), 1.0);
    progress.loss = loss;
    progress.learning_rate = LearningRate(fraction);
    progress.crop_tokens = options_.ramp[stage_].crop_tokens;
    progress.tokens_seen = tokens_seen_;
    progress.elapsed = Elapsed();
    progress.tokens_per_second =
        static_cast<double>(tokens_seen_ - first_tokens) /
        absl::ToDoubleSeconds(now - started_);
    progress.left =
        options_.steps > 0
            ? progress.elapsed * (static_cast<double>(options_.steps - step_) /
                                  static_cast<double>(step_))
            : std::max(options_.time_budget - progress.elapsed,
                       absl::ZeroDuration());
    if (now - last_validation >= options_.validation_interval) {
      last_validation = now;
      progress.validation =
          Validate(progress.crop_tokens, options_.validation_windows).byte;
    }
    const bool go_on = on_step(progress);
    if (!go_on || now - last_save >= options_.checkpoint_interval) {
      last_save = now;
      KVASIR_RETURN_IF_ERROR(SaveState());
    }
    if (!go_on) {
      return absl::CancelledError(
          absl::StrCat("stopped after step ", step_, "; --resume goes on"));
    }
  }
  KVASIR_RETURN_IF_ERROR(SaveState());
  RoundToStored();
  KVASIR_RETURN_IF_ERROR(Export());
  PretrainResult result;
  result.steps = step_;
  result.tokens_seen = tokens_seen_;
  result.elapsed = Elapsed();
  result.last_loss = loss;
  const NatsPer nats =
      Validate(std::min<int64_t>(1024, options_.shape.max_position),
               static_cast<int64_t>(validation_.ids.size()));
  result.validation_nats_per_byte = nats.byte;
  result.validation_nats_per_token = nats.token;
  std::error_code ignored;
  std::filesystem::remove(options_.out / kStateFile, ignored);
  return result;
}

absl::Status Trainer::SaveState() const {
  torch::serialize::OutputArchive archive;
  archive.write("description", c10::IValue(description_));
  archive.write("step", c10::IValue(step_));
  archive.write("tokens_seen", c10::IValue(tokens_seen_));
  archive.write("stage", c10::IValue(static_cast<int64_t>(stage_)));
  archive.write("stage_crops", c10::IValue(stage_crops_));
  archive.write("elapsed_seconds",
                c10::IValue(absl::ToDoubleSeconds(Elapsed())));
  // Archive keys must not hold dots, so tensors go by their place.
  torch::NoGradGuard no_grad;
  size_t index = 0;
  for (const NamedTensor& parameter : parameters_) {
    archive.write(absl::StrCat("tensor", index++), parameter.tensor.cpu());
  }
  for (const NamedTensor& moment : optimizer_.state()) {
    archive.write(absl::StrCat("tensor", index++), moment.tensor.cpu());
  }
  const std::filesystem::path path = options_.out / kStateFile;
  const std::string partial = path.string() + ".partial";
  archive.save_to(partial);
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot rename ", partial, ": ", error.message()));
  }
  return absl::OkStatus();
}

absl::Status Trainer::RefuseOldState() const {
  const std::filesystem::path path = options_.out / kStateFile;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(path.string(),
                   " of a stopped run exists: --resume goes on with it, "
                   "removing it starts anew"));
}

absl::Status Trainer::LoadState() {
  const std::filesystem::path path = options_.out / kStateFile;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return absl::NotFoundError(
        absl::StrCat("nothing to resume: no ", path.string()));
  }
  torch::serialize::InputArchive archive;
  archive.load_from(path.string());
  auto read = [&archive](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value;
  };
  const std::string description = read("description").toStringRef();
  if (description != description_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path.string(), " is of another run: it has [", description,
                     "], this is [", description_, "]"));
  }
  step_ = read("step").toInt();
  tokens_seen_ = read("tokens_seen").toInt();
  stage_ = static_cast<size_t>(read("stage").toInt());
  stage_crops_ = read("stage_crops").toInt();
  elapsed_before_ = absl::Seconds(read("elapsed_seconds").toDouble());
  optimizer_.set_steps(step_);
  torch::NoGradGuard no_grad;
  size_t index = 0;
  auto fill = [&](const torch::Tensor& tensor) {
    torch::Tensor stored;
    archive.read(absl::StrCat("tensor", index++), stored);
    tensor.copy_(stored);
  };
  for (const NamedTensor& parameter : parameters_) fill(parameter.tensor);
  for (const NamedTensor& moment : optimizer_.state()) fill(moment.tensor);
  return absl::OkStatus();
}

void Trainer::RoundToStored() {
  torch::NoGradGuard no_grad;
  for (torch::Tensor& tensor : tensors_) {
    tensor.copy_(tensor.to(torch::kBFloat16));
  }
}

absl::Status Trainer::Export() const {
  torch::NoGradGuard no_grad;
  std::vector<TensorEntry> entries;
  for (const NamedTensor& parameter : parameters_) {
    entries.push_back(
        {parameter.name, StoredDtype::kBf16, parameter.tensor.sizes().vec()});
  }
  KVASIR_RETURN_IF_ERROR(
      WriteHfConfig(options_.out, options_.shape, StoredDtype::kBf16));
  KVASIR_ASSIGN_OR_RETURN(
      SafetensorsWriter writer,
      SafetensorsWriter::Create(options_.out / "model.safetensors", entries));
  for (const NamedTensor& parameter : parameters_) {
    const torch::Tensor stored =
        parameter.tensor.cpu().to(torch::kBFloat16).contiguous();
    KVASIR_RETURN_IF_ERROR(
        writer.Append({static_cast<const std::byte*>(stored.data_ptr()),
                       static_cast<size_t>(stored.nbytes())}));
  }
  return writer.Finish();
}

}  // namespace

absl::StatusOr<PretrainResult> Pretrain(
    const PretrainOptions& options, const TokenStream& train,
    const TokenStream& validation,
    const std::function<bool(const PretrainProgress&)>& on_step) {
  KVASIR_RETURN_IF_ERROR(ValidateOptions(options, train));
  KVASIR_RETURN_IF_ERROR(
      ValidateIds(train, options.shape.vocab_size, "training"));
  KVASIR_RETURN_IF_ERROR(
      ValidateIds(validation, options.shape.vocab_size, "validation"));
  KVASIR_ASSIGN_OR_RETURN(
      const torch::Device device,
      OpenDevice(options.device, GpuProducts::kTensorFloat32));
  std::error_code error;
  std::filesystem::create_directories(options.out, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat(
        "cannot create ", options.out.string(), ": ", error.message()));
  }
  try {
    return Trainer(options, device, train, validation).Run(on_step);
  } catch (const std::exception& failure) {  // libtorch throws c10::Error
    return absl::InternalError(absl::StrCat("libtorch: ", failure.what()));
  }
}

}  // namespace kvasir::compress
