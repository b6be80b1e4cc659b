#include "compress/calibrate/calibrate.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "compress/artifact/tensor_file.h"
#include "compress/calibrate/head_loss.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/layer_program.h"
#include "compress/oracle/tensor_loader.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/for_each_index.h"
#include "compress/runtime/torch_status.h"

namespace kvasir::compress {
namespace {

constexpr char kKeyWeight[] = "self_attn.k_proj.weight";
constexpr char kValueWeight[] = "self_attn.v_proj.weight";
constexpr size_t kFingerprintBuffer = size_t{8} << 20;

at::Tensor IdsOf(const std::vector<int32_t>& sequence) {
  return at::from_blob(const_cast<int32_t*>(sequence.data()),
                       {1, static_cast<int64_t>(sequence.size())},
                       at::TensorOptions().dtype(at::kInt))
      .to(at::kLong);
}

// What is added up of one sequence in one layer.
class SequenceObserver : public LayerObserver {
 public:
  void OnAttentionInput(int64_t, const at::Tensor& x) override {
    input_ = x.detach().flatten(0, 1);
  }
  void OnQuery(int64_t, const at::Tensor& query) override {
    query_squares_ =
        query.detach().flatten(0, 1).to(at::kDouble).square().sum(0);
  }
  void OnRotatedKey(int64_t, const at::Tensor& key) override {
    rotated_key_ = key.detach().flatten(0, 1).flatten(1);
  }

  void AddTo(LayerSums& sums, int threads) const {
    const at::NoGradGuard no_grad;
    AddGram(input_, threads, sums.input_gram);
    sums.input_sum += input_.sum(0, /*keepdim=*/false, at::kDouble);
    sums.query_squares += query_squares_;
    if (sums.rotated_key_gram.defined()) {
      AddGram(rotated_key_, threads, sums.rotated_key_gram);
      sums.rotated_key_sum += rotated_key_.sum(0, false, at::kDouble);
    }
  }

 private:
  at::Tensor input_;          // [T, M]
  at::Tensor query_squares_;  // [Hq, D]
  at::Tensor rotated_key_;    // [T, Hkv * D]
};

// Saves, counts and asks whether to go on.
class Pace {
 public:
  Pace(const CalibrateOptions& options, const CalibrateEvents& events,
       std::filesystem::path state_path, std::string id, int64_t total)
      : options_(options),
        events_(events),
        state_path_(std::move(state_path)),
        id_(std::move(id)) {
    progress_.total = total;
  }

  void SetDone(int64_t done) { progress_.done = done; }

  // Between units that a state can stand between.
  absl::Status After(int64_t passes, const CalibrationState& state) {
    const bool go_on = Count(passes);
    const bool due = absl::Now() - last_save_ >= options_.save_interval;
    const bool stops = !go_on || stopped_;
    if (!state_path_.empty() && (stops || due)) {
      last_save_ = absl::Now();
      const absl::Status saved =
          WriteTensorFile(state_path_, StateToFile(state, id_));
      if (!saved.ok() && stops) return saved;
      if (!saved.ok()) {
        // Hours of work are worth more than a state of theirs.
        events_.on_message(absl::StrCat("warning: ", saved.message(),
                                        "; calibration goes on"));
      }
    }
    if (!stops) return absl::OkStatus();
    return absl::CancelledError(
        state_path_.empty()
            ? "calibration stopped; without a cache nothing is kept"
            : absl::StrCat("calibration stopped; the same command goes on: ",
                           state_path_.string()));
  }

  // In the middle of a unit: a stop takes effect at its end.
  bool Count(int64_t passes) {
    progress_.done += passes;
    stopped_ = !events_.on_progress(progress_) || stopped_;
    return !stopped_;
  }

 private:
  const CalibrateOptions& options_;
  const CalibrateEvents& events_;
  const std::filesystem::path state_path_;
  const std::string id_;
  CalibrateProgress progress_;
  absl::Time last_save_ = absl::Now();
  bool stopped_ = false;
};

class Calibrator {
 public:
  Calibrator(const model::Checkpoint& checkpoint,
             const CalibrationSample& sample, const CalibrateOptions& options)
      : checkpoint_(checkpoint),
        spec_(checkpoint.spec()),
        sample_(sample),
        options_(options),
        rotation_(MakeRotation(
            spec_.rope, sample.sequence_tokens,
            at::TensorOptions().dtype(at::kFloat).device(options.device))) {}

  int64_t TotalPasses() const {
    const int64_t directions = options_.parts.fisher ? 2 : 1;
    return directions * spec_.num_layers() * sample_.num_sequences();
  }
  int64_t PassesDone(const CalibrationState& state) const {
    return options_.parts.fisher
               ? 2 * spec_.num_layers() * state.sequence
               : state.layer * sample_.num_sequences() + state.sequence;
  }

  // Layer by layer, all sequences.
  absl::Status Stream(CalibrationState& state, Pace& pace) const;
  // Sequence by sequence, all layers, there and back.
  absl::Status RunWithFisher(CalibrationState& state, Pace& pace,
                             absl::Duration& fisher_time) const;

 private:
  // Of a few sequences that go through the layers together.
  struct MicroBatch {
    int64_t first = 0;
    int64_t count = 0;
    // Inputs of the layers [L + 1][count], each [1, T, M].
    std::vector<std::vector<at::Tensor>> hidden;
    // Of the mean loss, by the layer's output [count].
    std::vector<at::Tensor> gradient;
    std::vector<double> loss;
  };
  struct Resident {
    std::vector<TensorMap> layers;  // as stored
    OuterTensors outer;             // embedding and head as stored
  };

  absl::StatusOr<Resident> LoadResident() const;
  absl::Status Forward(const Resident& resident, MicroBatch& batch,
                       CalibrationState& state, Pace& pace) const;
  void AddHeadGradient(const Resident& resident, MicroBatch& batch) const;
  absl::Status Backward(const Resident& resident, MicroBatch& batch,
                        CalibrationState& state, Pace& pace) const;

  // Runs one layer over sequences, and adds what it saw in their order.
  absl::Status RunLayer(const LayerProgram& program, const TensorMap& tensors,
                        const std::vector<at::Tensor>& inputs,
                        std::vector<at::Tensor>& outputs,
                        LayerSums& sums) const;

  const std::vector<int32_t>& Sequence(int64_t index) const {
    return sample_.sequences[static_cast<size_t>(index)];
  }
  absl::StatusOr<LayerProgram> Program(int64_t layer) const {
    return MakeLayerProgram(spec_, nullptr, layer, options_.device);
  }

  const model::Checkpoint& checkpoint_;
  const model::DecoderSpec& spec_;
  const CalibrationSample& sample_;
  const CalibrateOptions& options_;
  const Rotation rotation_;
};

// Runs `work(i)` for i < count in threads; the first error by index.
absl::Status ForEachStatus(int64_t count, int threads,
                           const std::function<absl::Status(int64_t)>& work) {
  std::vector<absl::Status> results(static_cast<size_t>(count));
  ForEachIndex(count, threads,
               [&](int64_t i) { results[static_cast<size_t>(i)] = work(i); });
  for (absl::Status& result : results) {
    KVASIR_RETURN_IF_ERROR(result);
  }
  return absl::OkStatus();
}

// Float32, for the products; shared where it is that already.
TensorMap Widened(const TensorMap& stored) {
  TensorMap wide;
  for (const auto& [name, tensor] : stored) {
    wide.emplace(name, tensor.to(at::kFloat));
  }
  return wide;
}

absl::Status Calibrator::RunLayer(const LayerProgram& program,
                                  const TensorMap& tensors,
                                  const std::vector<at::Tensor>& inputs,
                                  std::vector<at::Tensor>& outputs,
                                  LayerSums& sums) const {
  std::vector<SequenceObserver> observers(inputs.size());
  outputs.resize(inputs.size());
  KVASIR_RETURN_IF_ERROR(ForEachStatus(
      static_cast<int64_t>(inputs.size()), options_.threads,
      [&](int64_t i) -> absl::Status {
        const at::NoGradGuard no_grad;
        const auto index = static_cast<size_t>(i);
        KVASIR_ASSIGN_OR_RETURN(
            outputs[index],
            LayerForward(program, tensors, rotation_, inputs[index],
                         {.observer = &observers[index]}));
        return absl::OkStatus();
      }));
  for (const SequenceObserver& observer : observers) {
    observer.AddTo(sums, options_.threads);
  }
  return absl::OkStatus();
}

absl::Status Calibrator::Stream(CalibrationState& state, Pace& pace) const {
  const int64_t sequences = sample_.num_sequences();
  if (!state.hidden.defined()) {
    state.hidden = at::empty(
        {sequences, sample_.sequence_tokens, spec_.hidden_size}, at::kFloat);
    OuterTensors outer;
    KVASIR_RETURN_IF_ERROR(LoadSmallOuter(checkpoint_, outer));
    for (int64_t i = 0; i < sequences; ++i) {
      KVASIR_ASSIGN_OR_RETURN(
          const at::Tensor rows,
          LoadRows(checkpoint_, model::kEmbeddingName, Sequence(i)));
      state.hidden[i].copy_(rows);
      if (outer.positions.defined()) {
        state.hidden[i].add_(
            outer.positions.slice(0, 0, sample_.sequence_tokens));
      }
    }
  }
  for (; state.layer < spec_.num_layers(); ++state.layer, state.sequence = 0) {
    KVASIR_ASSIGN_OR_RETURN(const LayerProgram program, Program(state.layer));
    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors,
                            LoadLayer(checkpoint_, state.layer));
    for (auto& [name, tensor] : tensors) tensor = tensor.to(options_.device);
    LayerSums& sums = state.layers[static_cast<size_t>(state.layer)];
    while (state.sequence < sequences) {
      const int64_t count =
          std::min(options_.sequences_at_a_time(), sequences - state.sequence);
      // Of all tokens they stay on the CPU.
      std::vector<at::Tensor> rows;
      std::vector<at::Tensor> inputs;
      for (int64_t i = 0; i < count; ++i) {
        rows.push_back(
            state.hidden.slice(0, state.sequence + i, state.sequence + i + 1));
        inputs.push_back(rows.back().to(options_.device));
      }
      std::vector<at::Tensor> outputs;
      KVASIR_RETURN_IF_ERROR(RunLayer(program, tensors, inputs, outputs, sums));
      for (size_t i = 0; i < rows.size(); ++i) rows[i].copy_(outputs[i]);
      state.sequence += count;
      KVASIR_RETURN_IF_ERROR(pace.After(count, state));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Calibrator::Resident> Calibrator::LoadResident() const {
  Resident resident;
  auto narrowed = [&](const std::string& name,
                      const at::Tensor& tensor) -> absl::StatusOr<at::Tensor> {
    KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                            checkpoint_.Tensor(name));
    return tensor.to(ScalarTypeOf(entry.info->type)).to(options_.device);
  };
  for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, LoadLayer(checkpoint_, layer));
    for (auto& [name, tensor] : tensors) {
      KVASIR_ASSIGN_OR_RETURN(
          tensor, narrowed(model::LayerTensorName(layer, name), tensor));
    }
    resident.layers.push_back(std::move(tensors));
  }
  OuterTensors& outer = resident.outer;
  KVASIR_ASSIGN_OR_RETURN(outer.embedding,
                          LoadStored(checkpoint_, model::kEmbeddingName));
  KVASIR_RETURN_IF_ERROR(LoadSmallOuter(checkpoint_, outer));
  for (at::Tensor* tensor : {&outer.embedding, &outer.positions,
                             &outer.final_norm, &outer.final_norm_bias}) {
    if (tensor->defined()) *tensor = tensor->to(options_.device);
  }
  outer.head = outer.embedding;  // one copy, wherever it is
  if (!spec_.tied_head) {
    KVASIR_ASSIGN_OR_RETURN(outer.head,
                            LoadStored(checkpoint_, model::kHeadName));
    outer.head = outer.head.to(options_.device);
  }
  return resident;
}

absl::Status Calibrator::Forward(const Resident& resident, MicroBatch& batch,
                                 CalibrationState& state, Pace& pace) const {
  batch.hidden.resize(static_cast<size_t>(spec_.num_layers()) + 1);
  for (int64_t i = 0; i < batch.count; ++i) {
    const at::Tensor ids = IdsOf(Sequence(batch.first + i)).to(options_.device);
    batch.hidden[0].push_back(EmbedTokens(resident.outer, ids).to(at::kFloat));
  }
  for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
    const auto index = static_cast<size_t>(layer);
    KVASIR_ASSIGN_OR_RETURN(const LayerProgram program, Program(layer));
    KVASIR_RETURN_IF_ERROR(
        RunLayer(program, Widened(resident.layers[index]), batch.hidden[index],
                 batch.hidden[index + 1], state.layers[index]));
    pace.Count(batch.count);
  }
  return absl::OkStatus();
}

void Calibrator::AddHeadGradient(const Resident& resident,
                                 MicroBatch& batch) const {
  batch.gradient.resize(static_cast<size_t>(batch.count));
  batch.loss.resize(static_cast<size_t>(batch.count));
  ForEachIndex(batch.count, options_.threads, [&](int64_t i) {
    const auto index = static_cast<size_t>(i);
    const at::AutoGradMode grad(true);
    const at::Tensor hidden =
        batch.hidden.back()[index].detach().requires_grad_(true);
    const at::Tensor normal = FinalNorm(spec_, resident.outer, hidden);
    const HeadLoss head =
        NextTokenLoss(normal.detach()[0], resident.outer.head,
                      IdsOf(Sequence(batch.first + i))[0].to(options_.device));
    batch.loss[index] = head.loss;
    batch.gradient[index] = torch::autograd::grad(
        {normal}, {hidden}, {head.gradient.unsqueeze(0)})[0];
  });
  batch.hidden.back().clear();
}

absl::Status Calibrator::Backward(const Resident& resident, MicroBatch& batch,
                                  CalibrationState& state, Pace& pace) const {
  for (int64_t layer = spec_.num_layers() - 1; layer >= 0; --layer) {
    const auto at_layer = static_cast<size_t>(layer);
    KVASIR_ASSIGN_OR_RETURN(const LayerProgram program, Program(layer));
    TensorMap tensors = Widened(resident.layers[at_layer]);
    // Leaves of their own: the stored tensors stay without gradients.
    at::Tensor& key = tensors[kKeyWeight];
    at::Tensor& value = tensors[kValueWeight];
    key = key.detach().requires_grad_(true);
    value = value.detach().requires_grad_(true);
    std::vector<at::Tensor> key_gradients(batch.gradient.size());
    std::vector<at::Tensor> value_gradients(batch.gradient.size());
    KVASIR_RETURN_IF_ERROR(ForEachStatus(
        batch.count, options_.threads, [&](int64_t i) -> absl::Status {
          const auto index = static_cast<size_t>(i);
          const at::AutoGradMode grad(true);
          at::Tensor hidden =
              batch.hidden[at_layer][index].detach().requires_grad_(true);
          KVASIR_ASSIGN_OR_RETURN(
              const at::Tensor out,
              LayerForward(program, tensors, rotation_, hidden));
          const std::vector<at::Tensor> gradients = torch::autograd::grad(
              {out}, {hidden, key, value}, {batch.gradient[index]});
          batch.gradient[index] = gradients[0];
          key_gradients[index] = gradients[1];
          value_gradients[index] = gradients[2];
          return absl::OkStatus();
        }));
    const at::NoGradGuard no_grad;
    LayerSums& sums = state.layers[at_layer];
    for (size_t i = 0; i < key_gradients.size(); ++i) {
      sums.key_squares.addcmul_(key_gradients[i], key_gradients[i]);
      sums.value_squares.addcmul_(value_gradients[i], value_gradients[i]);
    }
    batch.hidden[at_layer].clear();
    pace.Count(batch.count);
  }
  return absl::OkStatus();
}

absl::Status Calibrator::RunWithFisher(CalibrationState& state, Pace& pace,
                                       absl::Duration& fisher_time) const {
  KVASIR_ASSIGN_OR_RETURN(const Resident resident, LoadResident());
  while (state.sequence < sample_.num_sequences()) {
    MicroBatch batch;
    batch.first = state.sequence;
    batch.count = std::min(options_.sequences_at_a_time(),
                           sample_.num_sequences() - state.sequence);
    KVASIR_RETURN_IF_ERROR(Forward(resident, batch, state, pace));
    const absl::Time turned = absl::Now();
    AddHeadGradient(resident, batch);
    KVASIR_RETURN_IF_ERROR(Backward(resident, batch, state, pace));
    fisher_time += absl::Now() - turned;
    for (const double loss : batch.loss) state.loss_sum += loss;
    state.sequence += batch.count;
    KVASIR_RETURN_IF_ERROR(pace.After(0, state));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> WeightsId(const model::Checkpoint& checkpoint) {
  model::WeightsIdBuilder builder;
  std::vector<std::byte> buffer(kFingerprintBuffer);
  for (const auto& [name, entry] : checkpoint.tensors().entries()) {
    if (!model::IsWeightType(entry.info->type)) continue;
    buffer.resize(std::max<size_t>(buffer.size(), entry.info->row_bytes()));
    model::TensorStream stream(entry, buffer);
    while (true) {
      KVASIR_ASSIGN_OR_RETURN(const model::TensorStream::Block block,
                              stream.Next());
      if (block.num_rows == 0) break;
    }
    builder.Add(name, stream.info(), stream.tiles());
  }
  return builder.Finish(checkpoint.spec());
}

std::string IdOf(const std::string& weights_id, const CalibrationSample& sample,
                 const CalibrationParts& parts) {
  std::string tokens;
  for (const std::vector<int32_t>& sequence : sample.sequences) {
    tokens.append(reinterpret_cast<const char*>(sequence.data()),
                  sequence.size() * sizeof(int32_t));
  }
  // Goes up when the same inputs would give other numbers.
  constexpr int kVersion = 2;
  return TextHash(absl::StrCat("calibration ", kVersion, " weights ",
                               weights_id, " tokens ", TextHash(tokens), " ",
                               sample.num_sequences(), " of ",
                               sample.sequence_tokens, " fisher ", parts.fisher,
                               " rotated keys ", parts.rotated_keys));
}

std::filesystem::path CalibrationPath(const std::filesystem::path& cache,
                                      const std::string& id) {
  return cache / absl::StrCat("calibration-", id, ".safetensors");
}

std::filesystem::path StatePath(const std::filesystem::path& cache,
                                const std::string& id) {
  return cache / absl::StrCat("calibration-", id, ".state");
}

// Neither one that is not there nor a damaged one ends a calibration, but one
// that cannot be read: it may be hours of work.
bool CanBeMadeAnew(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsDataLoss(status);
}

// Leaves out what was not asked for: the result does not depend on what else
// the cache had.
Calibration WithParts(Calibration calibration, const CalibrationParts& parts,
                      const std::string& id) {
  calibration.id = id;
  for (LayerCalibration& layer : calibration.layers) {
    if (!parts.fisher) {
      layer.key_fisher = at::Tensor();
      layer.value_fisher = at::Tensor();
      layer.key_fisher_root = at::Tensor();
      layer.value_fisher_root = at::Tensor();
    }
    if (!parts.rotated_keys) {
      layer.rotated_key_gram = at::Tensor();
      layer.rotated_key_sum = at::Tensor();
    }
  }
  return calibration;
}

// What is asked for, of a finished calibration with these parts or more.
absl::StatusOr<std::optional<Calibration>> FindCached(
    const std::string& weights_id, const CalibrationSample& sample,
    const CalibrateOptions& options, const CalibrateEvents& events) {
  for (const bool rotated_keys : {false, true}) {
    for (const bool fisher : {false, true}) {
      const CalibrationParts parts = {fisher, rotated_keys};
      if (!parts.Includes(options.parts)) continue;
      const std::string id = IdOf(weights_id, sample, parts);
      const std::filesystem::path path = CalibrationPath(options.cache, id);
      const absl::StatusOr<TensorFile> file = ReadTensorFile(path);
      absl::Status status = file.status();
      if (file.ok()) {
        absl::StatusOr<Calibration> calibration =
            CalibrationFromFile(*file, id);
        if (calibration.ok()) {
          return WithParts(*std::move(calibration), options.parts,
                           IdOf(weights_id, sample, options.parts));
        }
        status = calibration.status();
      }
      if (!CanBeMadeAnew(status)) return status;
      if (!absl::IsNotFound(status)) {
        events.on_message(
            absl::StrCat("warning: ", status.message(), "; it is made again"));
      }
    }
  }
  return std::nullopt;
}

CalibrationState StartState(const model::DecoderSpec& spec,
                            const CalibrationParts& parts) {
  CalibrationState state;
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    state.layers.push_back(ZeroSums(spec, parts));
  }
  return state;
}

absl::StatusOr<CalibrationState> FindState(const model::DecoderSpec& spec,
                                           const std::string& id,
                                           const CalibrateOptions& options,
                                           const CalibrateEvents& events) {
  const absl::StatusOr<TensorFile> file =
      ReadTensorFile(StatePath(options.cache, id));
  absl::Status status = file.status();
  if (file.ok()) {
    absl::StatusOr<CalibrationState> state =
        StateFromFile(*file, id, spec, options.parts);
    if (state.ok()) {
      events.on_message("going on where the last run was stopped");
      return *std::move(state);
    }
    status = state.status();
  }
  if (!CanBeMadeAnew(status)) return status;
  if (!absl::IsNotFound(status)) {
    events.on_message(absl::StrCat("warning: ", status.message(),
                                   "; calibration begins anew"));
  }
  return StartState(spec, options.parts);
}

// An empty path, with a message, where the folder cannot be used.
std::filesystem::path UsableCache(const std::filesystem::path& cache,
                                  const CalibrateEvents& events) {
  if (cache.empty()) return cache;
  std::error_code error;
  std::filesystem::create_directories(cache, error);
  if (!error) return cache;
  events.on_message(absl::StrCat("warning: no cache in ", cache.string(), ": ",
                                 error.message()));
  return {};
}

absl::StatusOr<CalibrationRun> CalibrateInTorch(
    const model::Checkpoint& checkpoint, const CalibrationSample& sample,
    CalibrateOptions options, const CalibrateEvents& events) {
  const absl::Time start = absl::Now();
  const at::NoGradGuard no_grad;
  CalibrationRun run;
  options.cache = UsableCache(options.cache, events);
  const bool cached = !options.cache.empty();
  KVASIR_ASSIGN_OR_RETURN(const std::string weights_id, WeightsId(checkpoint));
  const std::string id = IdOf(weights_id, sample, options.parts);
  if (cached) {
    KVASIR_ASSIGN_OR_RETURN(std::optional<Calibration> found,
                            FindCached(weights_id, sample, options, events));
    if (found) {
      run.calibration = *std::move(found);
      run.from_cache = true;
      run.elapsed = absl::Now() - start;
      return run;
    }
  }
  if (events.on_start) KVASIR_RETURN_IF_ERROR(events.on_start());
  CalibrationState state = StartState(checkpoint.spec(), options.parts);
  if (cached) {
    KVASIR_ASSIGN_OR_RETURN(state,
                            FindState(checkpoint.spec(), id, options, events));
  }
  MoveSums(options.device, state);
  // Threads work on sequences of their own; a single one gets all threads.
  const ScopedBlasThreads blas_threads(
      options.sequences_at_a_time() == 1 ? options.threads : 1);
  const Calibrator calibrator(checkpoint, sample, options);
  const std::filesystem::path state_path =
      cached ? StatePath(options.cache, id) : std::filesystem::path();
  Pace pace(options, events, state_path, id, calibrator.TotalPasses());
  pace.SetDone(calibrator.PassesDone(state));
  KVASIR_RETURN_IF_ERROR(options.parts.fisher
                             ? calibrator.RunWithFisher(state, pace, run.fisher)
                             : calibrator.Stream(state, pace));
  MoveSums(at::kCPU, state);
  run.loss = state.loss_sum / static_cast<double>(sample.num_sequences());
  KVASIR_ASSIGN_OR_RETURN(
      run.calibration,
      FinishCalibration(std::move(state), id, sample.num_sequences(),
                        sample.sequence_tokens));
  if (cached) {
    const absl::Status saved = WriteTensorFile(
        CalibrationPath(options.cache, id), CalibrationToFile(run.calibration));
    if (!saved.ok()) {
      // The last state is still good for most of the work.
      events.on_message(absl::StrCat("warning: ", saved.message()));
    } else {
      std::error_code ignored;
      std::filesystem::remove(state_path, ignored);
    }
  }
  run.elapsed = absl::Now() - start;
  return run;
}

}  // namespace

absl::StatusOr<std::string> CalibrationId(const model::Checkpoint& checkpoint,
                                          const CalibrationSample& sample,
                                          const CalibrationParts& parts) {
  KVASIR_ASSIGN_OR_RETURN(const std::string weights_id, WeightsId(checkpoint));
  return IdOf(weights_id, sample, parts);
}

absl::StatusOr<CalibrationRun> Calibrate(const model::Checkpoint& checkpoint,
                                         const CalibrationSample& sample,
                                         const CalibrateOptions& options,
                                         const CalibrateEvents& events) {
  if (sample.sequence_tokens > checkpoint.spec().max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequences of ", sample.sequence_tokens, " tokens, the model takes ",
        checkpoint.spec().max_position_embeddings));
  }
  return CatchTorch(
      [&] { return CalibrateInTorch(checkpoint, sample, options, events); });
}

}  // namespace kvasir::compress
