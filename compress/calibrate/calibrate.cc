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
#include "base/philox.h"
#include "base/status_macros.h"
#include "compress/artifact/tensor_file.h"
#include "compress/calibrate/calibration_cache.h"
#include "compress/calibrate/head_loss.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/layer_program.h"
#include "compress/oracle/outer_forward.h"
#include "compress/runtime/cpu_setup.h"
#include "compress/runtime/for_each_index.h"
#include "compress/runtime/torch_status.h"
#include "compress/tensors/tensor_loader.h"

namespace kvasir::compress {
namespace {

constexpr char kKeyWeight[] = "self_attn.k_proj.weight";
constexpr char kValueWeight[] = "self_attn.v_proj.weight";
// Seed of the random numbers with which labels are drawn from the model's
// predictions.
constexpr uint64_t kLabelSeed = 0x6c6162656c730000;

at::Tensor IdsOf(const std::vector<int32_t>& sequence) {
  return at::from_blob(const_cast<int32_t*>(sequence.data()),
                       {1, static_cast<int64_t>(sequence.size())},
                       at::TensorOptions().dtype(at::kInt))
      .to(at::kLong);
}

// Returns a random number in [0, 1). It depends only on the sequence, the
// position and the draw, which counts the labels at this position.
double LabelUniform(int64_t sequence, int64_t position, int64_t draw) {
  const base::PhiloxCounter bits = base::Philox4x32(
      base::PhiloxKeyFromSeed(kLabelSeed),
      base::PhiloxCounterOf((static_cast<uint64_t>(sequence) << 32) |
                                static_cast<uint64_t>(position),
                            static_cast<uint64_t>(draw)));
  const uint64_t wide = (uint64_t{bits[1]} << 32) | bits[0];
  return static_cast<double>(wide >> 11) * 0x1p-53;
}

// Records the attention input, queries, keys and values of one sequence in one
// layer.
class SequenceObserver : public LayerObserver {
 public:
  void OnAttentionInput(int64_t, const at::Tensor& x) override {
    input_ = x.detach().flatten(0, 1);
  }
  void OnQuery(int64_t, const at::Tensor& query) override {
    query_ = query.detach().flatten(0, 1);
  }
  void OnKey(int64_t, const at::Tensor& key) override {
    key_ = key.detach().flatten(0, 1).flatten(1);
  }
  void OnRotatedKey(int64_t, const at::Tensor& key) override {
    rotated_key_ = key.detach().flatten(0, 1).flatten(1);
  }
  void OnValue(int64_t, const at::Tensor& value) override {
    value_ = value.detach().flatten(0, 1).flatten(1);
  }

  // Adds all observed tokens except the first `sinks` tokens to `sums`.
  void AddTo(LayerSums& sums, int64_t sinks, int threads) const {
    const at::NoGradGuard no_grad;
    const at::Tensor input = input_.slice(0, sinks);
    AddGram(input, threads, sums.input_gram);
    sums.input_sum += input.sum(0, /*keepdim=*/false, at::kDouble);
    sums.query_squares +=
        query_.slice(0, sinks).to(at::kDouble).square().sum(0);
    if (sums.rotated_key_gram.defined()) {
      const at::Tensor key = rotated_key_.slice(0, sinks);
      AddGram(key, threads, sums.rotated_key_gram);
      sums.rotated_key_sum += key.sum(0, false, at::kDouble);
    }
  }

  // Writes the keys and then the values at `positions` [n] into `rows` [n, 2 *
  // Hkv * D].
  void PutRows(const at::Tensor& positions, at::Tensor rows) const {
    const at::NoGradGuard no_grad;
    const at::Tensor index = positions.to(key_.device());
    rows.copy_(at::cat(
        {key_.index_select(0, index), value_.index_select(0, index)}, 1));
  }

 private:
  at::Tensor input_;        // [T, M]
  at::Tensor query_;        // [T, Hq, D]
  at::Tensor key_;          // [T, Hkv * D]
  at::Tensor rotated_key_;  // [T, Hkv * D]
  at::Tensor value_;        // [T, Hkv * D]
};

// Keeps references to the keys and values in the autograd graph, so that
// gradients with respect to them can be requested.
struct KeyValueObserver : public LayerObserver {
  void OnKey(int64_t, const at::Tensor& seen) override { key = seen; }
  void OnValue(int64_t, const at::Tensor& seen) override { value = seen; }
  at::Tensor key;    // [1, T, Hkv, D]
  at::Tensor value;  // [1, T, Hkv, D]
};

// Counts the passes of a run, saves its state from time to time and decides
// whether the run goes on.
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

  // Called after each micro-batch, when the state is consistent and can be
  // saved.
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
        // A state that cannot be saved must not end hours of work.
        events_.on_message(absl::StrCat("warning: ", saved.message(),
                                        "; calibration continues"));
      }
    }
    if (!stops) return absl::OkStatus();
    return absl::CancelledError(
        state_path_.empty()
            ? "calibration stopped; there is no cache, so nothing was saved"
            : absl::StrCat(
                  "calibration stopped; the same command continues it from ",
                  state_path_.string()));
  }

  // Called within a micro-batch, after each layer. Returns false if the user
  // stopped the run; the run then stops at the end of the micro-batch.
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
            at::TensorOptions().dtype(at::kFloat).device(options.device))) {
    if (options.parts.information) {
      rows_ = SpreadRows(sample, options.parts.sample_rows);
    }
  }

  int64_t TotalPasses() const { return PassesThrough(sample_.num_sequences()); }
  int64_t PassesDone(const CalibrationState& state) const {
    return options_.parts.has_gradients()
               ? PassesThrough(state.sequence)
               : state.layer * sample_.num_sequences() + state.sequence;
  }

  // Without gradients: runs all sequences through the first layer, then through
  // the next, and so on.
  absl::Status Stream(CalibrationState& state, Pace& pace) const;
  // With gradients: runs each sequence forward and backward through all layers.
  // Held-out sequences only go forward.
  absl::Status RunWithGradients(CalibrationState& state, Pace& pace,
                                absl::Duration& way_back) const;

 private:
  // Sequences of one micro-batch, which go through the layers together.
  struct MicroBatch {
    int64_t first = 0;
    int64_t count = 0;
    bool goes_back = true;
    // hidden[l][i] is the input [1, T, M] of layer l for sequence i of the
    // batch; hidden[L] is the output of the last layer.
    std::vector<std::vector<at::Tensor>> hidden;
    // Gradients with respect to the output of the layer that Backward handles
    // next: for each backward pass, a list with one tensor per sequence. If
    // Fisher scores are requested, the first pass is for the mean loss. Each
    // other pass is for the log probabilities of one draw of labels.
    std::vector<std::vector<at::Tensor>> gradients;
    std::vector<double> loss;
  };
  struct Resident {
    std::vector<TensorMap> layers;  // tensors in their stored types
    OuterTensors outer;             // embedding and head in their stored types
  };

  absl::StatusOr<Resident> LoadResident() const;
  absl::Status Forward(const Resident& resident, MicroBatch& batch,
                       CalibrationState& state, Pace& pace) const;
  void AddHeadGradients(const Resident& resident, MicroBatch& batch) const;
  void AddOuterProducts(const at::Tensor& gradient, at::Tensor& sum) const;
  absl::Status Backward(const Resident& resident, MicroBatch& batch,
                        CalibrationState& state, Pace& pace) const;

  // Runs one layer on the sequences that begin at index `first`, and adds what
  // was observed to `sums` in the order of the sequences.
  absl::Status RunLayer(const LayerProgram& program, const TensorMap& tensors,
                        int64_t first, const std::vector<at::Tensor>& inputs,
                        std::vector<at::Tensor>& outputs,
                        LayerSums& sums) const;
  // Copies keys and values of the sequence to `sums`, for the tokens that were
  // chosen as sample rows.
  void TakeRows(int64_t sequence, const SequenceObserver& observer,
                LayerSums& sums) const;
  // Returns how many passes the first `sequences` sequences take. A pass takes
  // one sequence through one layer, forward or backward.
  int64_t PassesThrough(int64_t sequences) const {
    const int64_t back = options_.parts.has_gradients()
                             ? std::min(sequences, sample_.counted_sequences())
                             : 0;
    return spec_.num_layers() * (sequences + back);
  }
  int64_t WaysBack() const {
    return (options_.parts.fisher ? 1 : 0) +
           (options_.parts.information ? options_.parts.labels_per_position
                                       : 0);
  }

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
  std::vector<SampledRow> rows_;
};

// Runs `work(i)` for every i < count on several threads. If several fail,
// returns the error with the lowest i.
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

// Returns float32 copies of the tensors for matrix products. Tensors that are
// float32 already are not copied.
TensorMap Widened(const TensorMap& stored) {
  TensorMap wide;
  for (const auto& [name, tensor] : stored) {
    wide.emplace(name, tensor.to(at::kFloat));
  }
  return wide;
}

absl::Status Calibrator::RunLayer(const LayerProgram& program,
                                  const TensorMap& tensors, int64_t first,
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
  for (size_t i = 0; i < observers.size(); ++i) {
    const int64_t sequence = first + static_cast<int64_t>(i);
    if (sequence < sample_.counted_sequences()) {
      observers[i].AddTo(sums, sample_.sink_tokens, options_.threads);
    }
    if (!rows_.empty()) TakeRows(sequence, observers[i], sums);
  }
  return absl::OkStatus();
}

void Calibrator::TakeRows(int64_t sequence, const SequenceObserver& observer,
                          LayerSums& sums) const {
  const auto before = [](const SampledRow& row, int64_t wanted) {
    return row.sequence < wanted;
  };
  const auto begin =
      std::lower_bound(rows_.begin(), rows_.end(), sequence, before);
  const auto end = std::lower_bound(begin, rows_.end(), sequence + 1, before);
  if (begin == end) return;
  std::vector<int64_t> positions;
  for (auto row = begin; row != end; ++row) positions.push_back(row->position);
  observer.PutRows(
      at::tensor(positions),
      sums.sample_rows.slice(0, begin - rows_.begin(), end - rows_.begin()));
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
      // The hidden states of all tokens stay on the CPU; only this batch is
      // copied to the device.
      std::vector<at::Tensor> rows;
      std::vector<at::Tensor> inputs;
      for (int64_t i = 0; i < count; ++i) {
        rows.push_back(
            state.hidden.slice(0, state.sequence + i, state.sequence + i + 1));
        inputs.push_back(rows.back().to(options_.device));
      }
      std::vector<at::Tensor> outputs;
      KVASIR_RETURN_IF_ERROR(
          RunLayer(program, tensors, state.sequence, inputs, outputs, sums));
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
  outer.head = outer.embedding;  // shares memory with the embedding
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
    batch.hidden[0].push_back(
        EmbedTokens(spec_, resident.outer, ids).to(at::kFloat));
  }
  for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
    const auto index = static_cast<size_t>(layer);
    KVASIR_ASSIGN_OR_RETURN(const LayerProgram program, Program(layer));
    KVASIR_RETURN_IF_ERROR(RunLayer(
        program, Widened(resident.layers[index]), batch.first,
        batch.hidden[index], batch.hidden[index + 1], state.layers[index]));
    if (!batch.goes_back) batch.hidden[index].clear();
    pace.Count(batch.count);
  }
  return absl::OkStatus();
}

void Calibrator::AddHeadGradients(const Resident& resident,
                                  MicroBatch& batch) const {
  const CalibrationParts& parts = options_.parts;
  const auto count = static_cast<size_t>(batch.count);
  batch.gradients.assign(static_cast<size_t>(WaysBack()),
                         std::vector<at::Tensor>(count));
  batch.loss.resize(count);
  ForEachIndex(batch.count, options_.threads, [&](int64_t i) {
    const auto index = static_cast<size_t>(i);
    const int64_t sequence = batch.first + i;
    const at::AutoGradMode grad(true);
    const at::Tensor hidden =
        batch.hidden.back()[index].detach().requires_grad_(true);
    const at::Tensor normal = FinalNorm(spec_, resident.outer, hidden);
    const at::Tensor rows = normal.detach()[0];
    const at::Tensor ids = IdsOf(Sequence(sequence))[0].to(options_.device);
    size_t way = 0;
    const auto put = [&](const at::Tensor& gradient) {
      std::vector<at::Tensor>& pass_gradients = batch.gradients[way++];
      pass_gradients[index] =
          torch::autograd::grad({normal}, {hidden}, {gradient.unsqueeze(0)},
                                /*retain_graph=*/true)[0];
    };
    if (parts.fisher) {
      const HeadLoss head = NextTokenLoss(rows, resident.outer.head, ids);
      batch.loss[index] = head.loss;
      put(head.gradient);
    }
    if (parts.information) {
      const LabelScores scores = SampledLabelScores(
          rows, resident.outer.head, ids, parts.labels_per_position,
          [&](int64_t position, int64_t draw) {
            return LabelUniform(sequence, position, draw);
          });
      batch.loss[index] = scores.loss;
      for (const at::Tensor& gradient : scores.gradients) put(gradient);
    }
  });
  batch.hidden.back().clear();
}

// Adds the sum of g gT over tokens to `sum` [Hkv * D, Hkv * D], where g is a
// token's row of `gradient`. Sink tokens are left out.
void Calibrator::AddOuterProducts(const at::Tensor& gradient,
                                  at::Tensor& sum) const {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = gradient.flatten(0, 1)
                              .flatten(1)
                              .slice(0, sample_.sink_tokens)
                              .to(at::kDouble);
  const at::Tensor product = at::mm(rows.t(), rows);
  sum = sum.defined() ? sum.add_(product) : product;
}

absl::Status Calibrator::Backward(const Resident& resident, MicroBatch& batch,
                                  CalibrationState& state, Pace& pace) const {
  const bool fisher = options_.parts.fisher;
  for (int64_t layer = spec_.num_layers() - 1; layer >= 0; --layer) {
    const auto at_layer = static_cast<size_t>(layer);
    KVASIR_ASSIGN_OR_RETURN(const LayerProgram program, Program(layer));
    TensorMap tensors = Widened(resident.layers[at_layer]);
    at::Tensor& key = tensors[kKeyWeight];
    at::Tensor& value = tensors[kValueWeight];
    if (fisher) {
      // Gradients are requested for detached tensors, so that the tensors in
      // `resident` do not record gradients.
      key = key.detach().requires_grad_(true);
      value = value.detach().requires_grad_(true);
    }
    const auto count = static_cast<size_t>(batch.count);
    std::vector<at::Tensor> key_gradients(count);
    std::vector<at::Tensor> value_gradients(count);
    std::vector<SequenceInformation> information(count);
    KVASIR_RETURN_IF_ERROR(ForEachStatus(
        batch.count, options_.threads, [&](int64_t i) -> absl::Status {
          const auto index = static_cast<size_t>(i);
          const at::AutoGradMode grad(true);
          at::Tensor hidden =
              batch.hidden[at_layer][index].detach().requires_grad_(true);
          KeyValueObserver seen;
          KVASIR_ASSIGN_OR_RETURN(const at::Tensor out,
                                  LayerForward(program, tensors, rotation_,
                                               hidden, {.observer = &seen}));
          for (size_t way = 0; way < batch.gradients.size(); ++way) {
            const bool by_weights = fisher && way == 0;
            at::Tensor& gradient = batch.gradients[way][index];
            const std::vector<at::Tensor> gradients = torch::autograd::grad(
                {out},
                {hidden, by_weights ? key : seen.key,
                 by_weights ? value : seen.value},
                {gradient},
                /*retain_graph=*/way + 1 < batch.gradients.size());
            gradient = gradients[0];
            if (by_weights) {
              key_gradients[index] = gradients[1];
              value_gradients[index] = gradients[2];
            } else {
              AddOuterProducts(gradients[1], information[index].key);
              AddOuterProducts(gradients[2], information[index].value);
            }
          }
          return absl::OkStatus();
        }));
    const at::NoGradGuard no_grad;
    LayerSums& sums = state.layers[at_layer];
    for (size_t i = 0; i < count; ++i) {
      if (fisher) {
        sums.key_squares.addcmul_(key_gradients[i], key_gradients[i]);
        sums.value_squares.addcmul_(value_gradients[i], value_gradients[i]);
      }
      if (options_.parts.information) {
        AddInformation(information[i],
                       sample_.DomainOf(batch.first + static_cast<int64_t>(i)),
                       sums);
      }
    }
    batch.hidden[at_layer].clear();
    pace.Count(batch.count);
  }
  return absl::OkStatus();
}

absl::Status Calibrator::RunWithGradients(CalibrationState& state, Pace& pace,
                                          absl::Duration& way_back) const {
  KVASIR_ASSIGN_OR_RETURN(const Resident resident, LoadResident());
  while (state.sequence < sample_.num_sequences()) {
    MicroBatch batch;
    batch.first = state.sequence;
    batch.goes_back = state.sequence < sample_.counted_sequences();
    const int64_t end =
        batch.goes_back ? sample_.counted_sequences() : sample_.num_sequences();
    batch.count =
        std::min(options_.sequences_at_a_time(), end - state.sequence);
    KVASIR_RETURN_IF_ERROR(Forward(resident, batch, state, pace));
    if (batch.goes_back) {
      const absl::Time turned = absl::Now();
      AddHeadGradients(resident, batch);
      KVASIR_RETURN_IF_ERROR(Backward(resident, batch, state, pace));
      way_back += absl::Now() - turned;
      for (const double loss : batch.loss) state.loss_sum += loss;
    }
    state.sequence += batch.count;
    KVASIR_RETURN_IF_ERROR(pace.After(0, state));
  }
  return absl::OkStatus();
}

// Returns `cache` if this folder exists or could be created; otherwise sends a
// message and returns an empty path.
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
  if (options.parts.information && sample.num_domains() < 2) {
    events.on_message(
        "warning: the calibration text has only one domain, so plans cannot be "
        "judged on a domain that is left out");
  }
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
  CalibrationState state = StartState(checkpoint.spec(), sample, options.parts);
  if (cached) {
    KVASIR_ASSIGN_OR_RETURN(
        state, FindState(checkpoint.spec(), sample, id, options, events));
  }
  MoveSums(options.device, state);
  // Each thread works on its own sequence and uses one BLAS thread. If only one
  // sequence is processed at a time, the BLAS gets all threads.
  const ScopedBlasThreads blas_threads(
      options.sequences_at_a_time() == 1 ? options.threads : 1);
  const Calibrator calibrator(checkpoint, sample, options);
  const std::filesystem::path state_path =
      cached ? StatePath(options.cache, id) : std::filesystem::path();
  Pace pace(options, events, state_path, id, calibrator.TotalPasses());
  pace.SetDone(calibrator.PassesDone(state));
  KVASIR_RETURN_IF_ERROR(
      options.parts.has_gradients()
          ? calibrator.RunWithGradients(state, pace, run.way_back)
          : calibrator.Stream(state, pace));
  MoveSums(at::kCPU, state);
  run.loss = state.loss_sum / static_cast<double>(sample.counted_sequences());
  KVASIR_ASSIGN_OR_RETURN(
      run.calibration,
      FinishCalibration(std::move(state), id, sample, options.parts));
  if (cached) {
    const absl::Status saved = WriteTensorFile(
        CalibrationPath(options.cache, id), CalibrationToFile(run.calibration));
    if (!saved.ok()) {
      // Not an error, because the last saved state is kept and contains most of
      // the work.
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

absl::StatusOr<CalibrationRun> Calibrate(const model::Checkpoint& checkpoint,
                                         const CalibrationSample& sample,
                                         const CalibrateOptions& options,
                                         const CalibrateEvents& events) {
  if (sample.sequence_tokens > checkpoint.spec().max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat(
        "calibration sequences must have at most ",
        checkpoint.spec().max_position_embeddings,
        " tokens (the model's context), have ", sample.sequence_tokens));
  }
  if (sample.counted_sequences() < 1 || sample.counted_tokens_each() < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the calibration sample has no tokens to measure: it has ",
        sample.counted_sequences(),
        " sequences that are not held out, each of ", sample.sequence_tokens,
        " tokens, but the first ", sample.sink_tokens,
        " tokens of each are sinks, which are not measured"));
  }
  if (options.parts.information && options.parts.labels_per_position < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the number of labels per position must be at least 1, is ",
        options.parts.labels_per_position));
  }
  return CatchTorch(
      [&] { return CalibrateInTorch(checkpoint, sample, options, events); });
}

}  // namespace kvasir::compress
