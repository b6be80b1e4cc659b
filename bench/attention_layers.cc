#include "bench/attention_layers.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "bench/random_latents.h"
#include "kernels/rowwise/rope.h"
#include "model/checkpoint/random_weights.h"
#include "model/shapes/shape_config.h"
#include "plan/presets.h"
#include "worker/program/served_plan.h"
#include "worker/ranks/rank.h"

namespace kvasir::bench {
namespace {

// Returns a model shape with the attention of `shape`, in which everything else
// is as small as possible.
model::ModelShape AttentionOnly(model::ModelShape shape, int64_t num_layers) {
  shape.num_layers = num_layers;
  shape.intermediate_size = 32;
  shape.vocab_size = 32;
  shape.bos_token_id = 1;
  shape.eos_token_id = 2;
  return shape;
}

absl::StatusOr<std::shared_ptr<const worker::ServedPlan>> ServePreset(
    const std::string& name, const model::DecoderSpec& spec,
    const worker::ServeOptions& options) {
  // "dense-4bit" is not a preset, but other engines have such a cache. Its plan
  // is that of the preset dense-8bit with 4 bits instead of 8.
  const bool dense_4bit = name == "dense-4bit";
  KVASIR_ASSIGN_OR_RETURN(kvasir::v1::KvPlan plan,
                          plan::MakePresetPlan(dense_4bit ? "dense-8bit" : name,
                                               model::AttentionShapeOf(spec)));
  // Stores all tokens as codes. In a real cache a few tokens stay exact, but
  // their number does not grow with the sequence.
  for (kvasir::v1::LayerPlan& layer : *plan.mutable_layers()) {
    layer.clear_exact_sinks();
    layer.mutable_key()->clear_exact_window();
    layer.mutable_value()->clear_exact_window();
    if (!dense_4bit) continue;
    for (kvasir::v1::SidePlan* const side :
         {layer.mutable_key(), layer.mutable_value()}) {
      for (kvasir::v1::Part& part : *side->mutable_parts()) {
        part.mutable_codec()->mutable_bits()->set_schedule(0, 4);
      }
    }
  }
  return worker::ServePlan(plan, model::AttentionShapeOf(spec), options);
}

double LayerBytesPerSlot(const cache::PageLayout& layout) {
  return layout.PayloadBytesPerToken(0, plan::Side::kKey) +
         layout.PayloadBytesPerToken(0, plan::Side::kValue);
}

}  // namespace

absl::StatusOr<double> AttentionLayers::BytesPerSlot(
    const model::ModelShape& shape, const std::string& plan,
    int64_t page_tokens) {
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(AttentionOnly(shape, 1)));
  KVASIR_ASSIGN_OR_RETURN(const auto served, ServePreset(plan, spec, {}));
  KVASIR_ASSIGN_OR_RETURN(const cache::PageLayout layout,
                          cache::PageLayout::Create(
                              *served->resolved, {.page_tokens = page_tokens}));
  return LayerBytesPerSlot(layout);
}

double AttentionLayers::bytes_per_slot() const {
  return LayerBytesPerSlot(*layout_);
}

AttentionLayers::AttentionLayers(const Options& options, base::ThreadPool* pool)
    : pool_(pool),
      cpu_(pool),
      device_(options.device != nullptr ? *options.device : cpu_),
      timer_(options.timer != nullptr ? *options.timer : cpu_timer_),
      activations_{device_.activations()},
      stream_(device_.MakeStream()) {}

template <typename T>
absl::Status AttentionLayers::Put(const std::vector<T>& host,
                                  kernels::DeviceBuffer* buffer) {
  *buffer = {};
  KVASIR_ASSIGN_OR_RETURN(
      *buffer, device_.allocator().Allocate(host.size() * sizeof(T),
                                            kernels::MemoryTag::kOther));
  return device_.Write(buffer->data(), host.data(), buffer->bytes());
}

absl::StatusOr<std::unique_ptr<AttentionLayers>> AttentionLayers::Create(
    const Options& options, base::ThreadPool* pool) {
  auto layers =
      std::unique_ptr<AttentionLayers>(new AttentionLayers(options, pool));
  KVASIR_ASSIGN_OR_RETURN(
      layers->spec_,
      model::SpecOfShape(AttentionOnly(options.shape, options.num_arenas)));
  KVASIR_ASSIGN_OR_RETURN(const auto served,
                          ServePreset(options.plan, layers->spec_, {}));
  layers->plan_ = served->resolved;
  KVASIR_ASSIGN_OR_RETURN(
      cache::PageLayout layout,
      cache::PageLayout::Create(
          *layers->plan_,
          {.page_tokens = options.page_tokens,
           .granule_bytes = layers->device_.page_granule_bytes()}));
  layers->layout_ = std::make_unique<cache::PageLayout>(std::move(layout));
  layers->weights_ = options.weights;
  if (layers->weights_ == nullptr) {
    KVASIR_RETURN_IF_ERROR(layers->LoadWeights(options));
  }
  KVASIR_RETURN_IF_ERROR(layers->MakeArenas(options));
  KVASIR_RETURN_IF_ERROR(layers->MakeLayers(options.slots));
  return layers;
}

absl::Status AttentionLayers::LoadWeights(const Options& options) {
  const model::ModelShape shape = AttentionOnly(options.shape, 1);
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::SpecOfShape(shape));
  KVASIR_ASSIGN_OR_RETURN(
      const auto served,
      ServePreset(options.plan, spec, {.lift_prompts = options.lift_prompts}));
  KVASIR_ASSIGN_OR_RETURN(
      const auto source,
      worker::RandomSource::Create(shape, spec, *served->resolved, options.seed,
                                   kernels::DType::kBf16));
  KVASIR_ASSIGN_OR_RETURN(worker::ModelWeights weights,
                          worker::LoadWeights(spec, served, source.get(),
                                              &device_, {.pool = pool_}));
  weights_ = std::make_shared<worker::ModelWeights>(std::move(weights));
  return absl::OkStatus();
}

absl::Status AttentionLayers::MakeArenas(const Options& options) {
  const int64_t pages =
      (options.slots + options.page_tokens - 1) / options.page_tokens;
  if (pages < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an arena must have at least 1 slot, not ", options.slots));
  }
  const cache::PageCounts counts(layout_->page_groups().size(), pages);
  KVASIR_ASSIGN_OR_RETURN(
      worker::KvArenas arenas,
      worker::KvArenas::Create(*plan_, *layout_, counts, &device_.allocator()));
  arenas_ = std::make_unique<worker::KvArenas>(std::move(arenas));
  uint64_t seed = options.seed;
  for (const worker::KvArenas::Layer& layer : arenas_->layers()) {
    KVASIR_RETURN_IF_ERROR(FillWithRandomLatents(
        layer, pages, options.page_tokens, seed += 100, device_));
  }
  block_tables_.resize(static_cast<size_t>(pages));
  std::iota(block_tables_.begin(), block_tables_.end(), 0);
  std::shuffle(block_tables_.begin(), block_tables_.end(),
               std::mt19937_64(options.seed));
  return Put(block_tables_, &tables_on_device_);
}

absl::Status AttentionLayers::MakeLayers(int64_t max_tokens) {
  for (const double frequency : spec_.rope.frequencies) {
    rope_steps_.push_back(kernels::RopeStep(frequency));
  }
  KVASIR_ASSIGN_OR_RETURN(
      const kernels::DevicePtr<const uint64_t> device_rope_steps,
      tables_.Add<uint64_t>(rope_steps_));
  KVASIR_ASSIGN_OR_RETURN(
      fresh_, device_.allocator().Allocate(
                  static_cast<size_t>(worker::LayerAttention::FreshBytes(
                      arenas_->layers().front(), max_tokens)),
                  kernels::MemoryTag::kWorkspace));
  for (int64_t layer = 0; layer < spec_.num_layers(); ++layer) {
    KVASIR_ASSIGN_OR_RETURN(
        worker::LayerAttention attention,
        worker::LayerAttention::Create(
            {.device = &device_,
             .spec = &spec_,
             .layer = layer,
             .weights = &weights_->layers.front(),
             .arena = &arenas_->layers()[static_cast<size_t>(layer)],
             .rings = &arenas_->rings(),
             .rope_steps = rope_steps_,
             .device_rope_steps = device_rope_steps,
             .hadamard = &hadamard_,
             .fresh = {fresh_.as<char>(), max_tokens},
             .page_tokens = layout_->page_tokens(),
             .profile = &timer_}));
    // `step` is an index into steps_. DivideSteps makes steps_ for the launches
    // of the first layer; all other layers have the same launches.
    size_t step = 0;
    for (worker::LayerAttention::Launch* const launch : attention.launches()) {
      launch->step = step++;
    }
    attention_.push_back(std::move(attention));
  }
  return absl::OkStatus();
}

absl::Status AttentionLayers::DivideSteps() {
  steps_.clear();
  for (const worker::LayerAttention::Launch* const launch :
       attention_.front().launches()) {
    const worker::SequenceRange range =
        worker::SequencesOf(launch->rows, rows_);
    KVASIR_ASSIGN_OR_RETURN(
        steps_.emplace_back(),
        kernels::DivideStep(launch->attention,
                            absl::MakeConstSpan(sequences_)
                                .subspan(static_cast<size_t>(range.first),
                                         static_cast<size_t>(range.count))));
  }
  return absl::OkStatus();
}

absl::Status AttentionLayers::Prepare(const LaunchShape& launch) {
  launch_ = launch;
  const int64_t page_tokens = layout_->page_tokens();
  const int64_t pages = (launch.context + page_tokens - 1) / page_tokens;
  sequences_.clear();
  rows_.clear();
  std::vector<int64_t> slots;
  std::vector<int64_t> positions;
  for (int64_t b = 0; b < launch.batch; ++b) {
    kernels::AttentionSequence sequence;
    sequence.first_row = b * launch.new_tokens;
    sequence.num_rows = launch.new_tokens;
    sequence.first_slot = launch.context - launch.new_tokens;
    const int32_t* const table = block_tables_.data() + b * pages;
    sequence.block_table = tables_on_device_.as<int32_t>() + b * pages;
    for (int64_t slot = sequence.first_slot; slot < launch.context; ++slot) {
      positions.push_back(slot);
      slots.push_back(table[slot / page_tokens] * page_tokens +
                      slot % page_tokens);
    }
    sequences_.push_back(sequence);
    rows_.push_back(
        {sequence.first_row, sequence.num_rows, launch.new_tokens > 1});
  }
  KVASIR_RETURN_IF_ERROR(Put(sequences_, &sequences_on_device_));
  KVASIR_RETURN_IF_ERROR(Put(slots, &slots_));
  KVASIR_RETURN_IF_ERROR(Put(positions, &positions_));
  std::vector<float> numbers(
      static_cast<size_t>(launch.tokens() * spec_.hidden_size));
  model::FillRandom({.name = "normed",
                     .shape = {static_cast<int64_t>(numbers.size())},
                     .deviation = 1.0},
                    1, 0, numbers);
  KVASIR_RETURN_IF_ERROR(
      Put(StoredNumbers(numbers, activations_.dtype), &normed_));
  out_ = {};
  KVASIR_ASSIGN_OR_RETURN(
      out_, device_.allocator().Allocate(normed_.bytes(),
                                         kernels::MemoryTag::kOther));
  KVASIR_RETURN_IF_ERROR(DivideSteps());
  kernels::Workspace counter = kernels::Workspace::Counting();
  KVASIR_RETURN_IF_ERROR(Launch(counter));
  workspace_ = {};
  KVASIR_ASSIGN_OR_RETURN(
      workspace_, device_.allocator().Allocate(counter.peak_bytes(),
                                               kernels::MemoryTag::kWorkspace));
  return absl::OkStatus();
}

absl::Status AttentionLayers::Launch(kernels::Workspace& workspace) {
  const auto sequences =
      sequences_on_device_.as<const kernels::AttentionSequence>();
  return attention_[next_arena_].Run(
      *stream_,
      {.normed = normed_.as<const float>(),
       .num_tokens = launch_.tokens(),
       .padded_tokens = launch_.tokens(),
       .num_sequences = launch_.batch,
       .rows = rows_,
       .positions = positions_.as<const int64_t>(),
       .group = {.slots = slots_.as<const int64_t>(),
                 .sequences = sequences,
                 .on_host = sequences_,
                 // If the sequences decode, all of them do, so this list equals
                 // `sequences`.
                 .output_sequences = sequences},
       .steps = steps_},
      out_.as<float>(), workspace);
}

absl::StatusOr<LaunchTime> AttentionLayers::Run(const LaunchShape& launch) {
  const int64_t page_tokens = layout_->page_tokens();
  const int64_t pages = (launch.context + page_tokens - 1) / page_tokens;
  const auto have = static_cast<int64_t>(block_tables_.size());
  if (launch.batch < 1 || launch.new_tokens < 1 ||
      launch.new_tokens > launch.context || launch.batch * pages > have) {
    return absl::InvalidArgumentError(
        absl::StrCat("a launch has ", launch.batch, " sequences of ",
                     launch.context, " slots each, ", launch.new_tokens,
                     " of them new; want at least 1 sequence, at least 1 new "
                     "slot, no more new slots than slots, and at most ",
                     have, " pages in all"));
  }
  if (!(launch == launch_)) KVASIR_RETURN_IF_ERROR(Prepare(launch));
  kernels::Workspace workspace(workspace_.data(), workspace_.bytes());
  KVASIR_RETURN_IF_ERROR(timer_.Start(*stream_));
  KVASIR_RETURN_IF_ERROR(Launch(workspace));
  KVASIR_ASSIGN_OR_RETURN(const worker::CpuStepProfile::Seconds seconds,
                          timer_.Stop(*stream_));
  next_arena_ = (next_arena_ + 1) % attention_.size();
  LaunchTime time;
  time.layer_seconds = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  time.kernel_seconds =
      worker::SecondsOf(seconds, worker::StepPart::kAttention);
  time.attention_seconds = time.kernel_seconds +
                           worker::SecondsOf(seconds, worker::StepPart::kLifts);
  return time;
}

}  // namespace kvasir::bench
