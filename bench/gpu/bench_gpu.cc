// Takes GPU measurements for gpu_bench.py: attention over caches with the
// shapes of real models, decode steps, and the device's own copy and matrix
// products. It reads one JSON request per line and prints one JSON answer per
// line, so that gpu_bench.py can measure its baselines between two requests. It
// does not link gRPC.
//
//   {"do": "open", "device": "cuda:0" | "emulated", "module": FILE}
//   {"do": "bytes", "shape": S, "plan": P}
//   {"do": "make", "name": N, "shape": S, "plan": P, "slots": n, "arenas": n}
//   {"do": "run", "name": N, "batch": b, "context": c, "new_tokens": n}:
//   new_tokens of each sequence, 1 by default
//   {"do": "drop", "name": N}
//   {"do": "copy", "bytes": n}
//   {"do": "multiply", "steps": n}: the highest rate of mma.sync
//   {"do": "decode_make", "shape": S, "plan": P, "batch": b, "context": c,
//    "graphs": bool}: with graphs, steps are captured and replayed; both kinds
//    can exist at the same time
//   {"do": "decode_run", "batch": b, "context": c, "steps": n, "graphs": bool}:
//   batch and context at most those of decode_make
//   {"do": "decode_drop"}: drops the steps with and those without graphs
//   {"do": "all_reduce", "gpus": n, "bytes": b, "calls": c, "rounds": r,
//    "libraries": [FILE]}: between cuda:0 and cuda:n-1, or n emulated devices
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "bench/attention_layers.h"
#include "bench/cache_reads.h"
#include "bench/gpu/all_reduce.h"
#include "bench/gpu/gpu_device.h"
#include "bench/paired.h"
#include "bench/random_latents.h"
#include "bench/step_timer.h"
#include "model/shapes/shape_config.h"
#include "nlohmann/json.hpp"
#include "plan/presets.h"
#include "worker/offline/direct_runner.h"
#include "worker/ranks/rank.h"

namespace kvasir::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kPageTokens = 64;

// Runs decode steps of a model with random weights, for sequences whose cache
// holds random latents.
class DecodeSteps {
 public:
  struct Options {
    model::ModelShape shape;
    std::string plan;
    int64_t batch = 0;
    int64_t context = 0;
    bool graphs = false;
  };

  // Makes the model and its sequences. The rank opens and owns a separate
  // device.
  static absl::StatusOr<std::unique_ptr<DecodeSteps>> Create(
      const Options& options,
      const std::function<std::unique_ptr<kernels::Device>()>& device) {
    auto steps = std::unique_ptr<DecodeSteps>(new DecodeSteps());
    steps->most_ = {options.batch, options.context};
    KVASIR_ASSIGN_OR_RETURN(steps->spec_, model::SpecOfShape(options.shape));
    // The length may exceed the model's, because weights are random and the
    // cost does not depend on positions.
    const int64_t longest = options.context + kSteps;
    steps->spec_.max_position_embeddings =
        std::max(steps->spec_.max_position_embeddings, longest);
    const plan::AttentionShape shape = model::AttentionShapeOf(steps->spec_);
    KVASIR_ASSIGN_OR_RETURN(const kvasir::v1::KvPlan plan,
                            plan::MakePresetPlan(options.plan, shape));
    KVASIR_ASSIGN_OR_RETURN(const auto served,
                            worker::ServePlan(plan, shape, {}));
    KVASIR_ASSIGN_OR_RETURN(const auto source,
                            worker::RandomSource::Create(
                                options.shape, steps->spec_, *served->resolved,
                                1, kernels::DType::kBf16));
    worker::RankOptions rank;
    rank.num_threads = base::ReadMachineLimits().cpus;
    rank.make_device = [&device](base::ThreadPool*, kernels::CpuBackend,
                                 int64_t) { return device(); };
    rank.page_tokens = kPageTokens;
    KVASIR_ASSIGN_OR_RETURN(rank.pages,
                            PagesOf(*served, options.batch, longest));
    rank.executor.max_model_len = longest;
    rank.executor.max_num_seqs = options.batch;
    rank.executor.max_batched_tokens = options.batch;
    rank.executor.graphs = options.graphs;
    KVASIR_ASSIGN_OR_RETURN(
        steps->rank_,
        worker::Rank::Create(steps->spec_, served, source.get(), rank));
    KVASIR_RETURN_IF_ERROR(steps->Fill());
    worker::Rank& made = *steps->rank_;
    steps->runner_ = std::make_unique<worker::DirectRunner>(
        &made.executor(), &made.layout(), made.pages(),
        made.executor().last_step_id());
    return steps;
  }

  // Sets the sequences of the next steps: `batch` sequences with `context`
  // tokens each. At most kSteps steps may follow before the next call.
  absl::Status Start(int64_t batch, int64_t context) {
    if (batch < 1 || batch > most_.batch || context < 1 ||
        context > most_.context) {
      return absl::InvalidArgumentError(absl::StrCat(
          "batch ", batch, " and context ", context,
          " must be within the limits of decode_make: a batch of 1 to ",
          most_.batch, " and a context of 1 to ", most_.context));
    }
    for (int64_t i = 1; i <= batch_; ++i) {
      runner_->Release(static_cast<uint64_t>(i));
    }
    batch_ = batch;
    for (int64_t i = 1; i <= batch; ++i) {
      runner_->StartAt(static_cast<uint64_t>(i), context);
    }
    return absl::OkStatus();
  }

  // Runs a step with a random token for each sequence.
  absl::Status Run() {
    std::vector<int32_t> ids(static_cast<size_t>(batch_));
    std::vector<worker::DirectStep> steps;
    for (size_t i = 0; i < ids.size(); ++i) {
      random_ = random_ * 6364136223846793005u + 1442695040888963407u;
      ids[i] = static_cast<int32_t>((random_ >> 33) %
                                    static_cast<uint64_t>(spec_.vocab_size));
      steps.push_back({.sequence_id = i + 1,
                       .token_ids = absl::MakeConstSpan(&ids[i], 1),
                       .sample = worker::GreedySample(),
                       .output = true});
    }
    return runner_->Run(steps).status();
  }

  // The bytes of weights that one step reads: each weight once, but only the
  // used rows of the embedding.
  double weight_bytes() const {
    const double all = static_cast<double>(
        rank_->allocator().use(kernels::MemoryTag::kWeights).bytes);
    const double embedding = 2.0 * static_cast<double>(spec_.vocab_size) *
                             static_cast<double>(spec_.hidden_size);
    return spec_.tied_head ? all : all - embedding;
  }
  double cache_bytes(int64_t batch, int64_t context) const {
    return static_cast<double>(batch) *
           CacheBytesRead(rank_->layout(), context + 1);
  }

  // The number of steps that were replayed from CUDA graphs so far.
  int64_t replayed() const { return rank_->executor().totals().replayed_steps; }
  // The numerics id of the device on which the steps run.
  std::string numerics() const { return rank_->device().numerics(); }

  static constexpr int64_t kSteps = 256;

 private:
  DecodeSteps() = default;

  static absl::StatusOr<cache::PageCounts> PagesOf(
      const worker::ServedPlan& plan, int64_t batch, int64_t tokens) {
    KVASIR_ASSIGN_OR_RETURN(const cache::PageLayout layout,
                            cache::PageLayout::Create(
                                *plan.resolved, {.page_tokens = kPageTokens}));
    cache::PageCounts pages;
    for (const auto& group : layout.page_groups()) {
      pages.push_back(batch * layout.PagesHeld(group.id, tokens, 1));
    }
    return pages;
  }

  absl::Status Fill() {
    const worker::KvArenas& arenas = rank_->executor().arenas();
    uint64_t seed = 1;
    for (const worker::KvArenas::Layer& layer : arenas.layers()) {
      KVASIR_RETURN_IF_ERROR(FillWithRandomLatents(
          layer, arenas.num_pages()[static_cast<size_t>(layer.page_group)],
          kPageTokens, seed += 100, rank_->device()));
    }
    for (const worker::KvArenas::Layer& layer : arenas.layers()) {
      KVASIR_RETURN_IF_ERROR(
          FillWithRandomExactRows(arenas, layer, seed += 100, rank_->device()));
    }
    return absl::OkStatus();
  }

  model::DecoderSpec spec_;
  std::unique_ptr<worker::Rank> rank_;
  std::unique_ptr<worker::DirectRunner> runner_;
  struct Most {
    int64_t batch = 0;
    int64_t context = 0;
  } most_;
  int64_t batch_ = 0;
  uint64_t random_ = 1;
};

// Answers the requests. Threads: used by one thread only.
class Bench {
 public:
  absl::StatusOr<Json> Do(const Json& asked) {
    const auto what = asked.at("do").get<std::string>();
    if (what == "open") return Open(asked);
    if (what == "bytes") return Bytes(asked);
    if (device_ == nullptr) {
      return absl::FailedPreconditionError(
          "no device is open: send open first");
    }
    if (what == "make") return Make(asked);
    if (what == "run") return Run(asked);
    if (what == "drop") {
      layers_.erase(asked.at("name"));
      return Json::object();
    }
    if (what == "copy") return Copy(asked.at("bytes"));
    if (what == "multiply") return Multiply(asked.at("steps"));
    if (what == "decode_make") return MakeDecode(asked);
    if (what == "decode_run") return RunDecode(asked);
    if (what == "decode_drop") {
      decodes_ = {};
      return Json::object();
    }
    if (what == "all_reduce") return AllReduce(asked);
    return absl::InvalidArgumentError(
        absl::StrCat("unknown request: \"do\" is \"", what, "\""));
  }

 private:
  absl::StatusOr<Json> Open(const Json& asked) {
    name_ = asked.at("device");
    module_ = asked.value("module", "");
    // Uses our own matrix products, because this device runs only attention;
    // decode steps open their own device.
    KVASIR_ASSIGN_OR_RETURN(device_, OpenGpu(name_, module_, Products::kOwn));
    KVASIR_ASSIGN_OR_RETURN(clock_, ClockOf(*device_));
    timer_ = std::make_unique<DeviceStepTimer>(clock_.get());
    stream_ = device_->MakeStream();
    KVASIR_ASSIGN_OR_RETURN(const GpuFacts facts, FactsOf(*device_));
    return Json{{"name", facts.name},
                {"numerics", device_->numerics()},
                {"multiprocessors", facts.multiprocessors},
                {"l2_bytes", facts.l2_bytes},
                {"memory_bytes", facts.memory_bytes},
                {"free_bytes", facts.free_bytes},
                {"gpus", facts.gpus},
                {"timed_by", facts.timed_by}};
  }

  absl::StatusOr<Json> Bytes(const Json& asked) {
    KVASIR_ASSIGN_OR_RETURN(
        const model::ModelShape shape,
        model::FindShape(asked.at("shape").get<std::string>()));
    KVASIR_ASSIGN_OR_RETURN(
        const double bytes,
        AttentionLayers::BytesPerSlot(shape, asked.at("plan"), kPageTokens));
    return Json{{"bytes_per_slot", bytes}};
  }

  absl::StatusOr<Json> Make(const Json& asked) {
    const auto name = asked.at("name").get<std::string>();
    const auto plan = asked.at("plan").get<std::string>();
    layers_.erase(name);
    KVASIR_ASSIGN_OR_RETURN(
        const model::ModelShape shape,
        model::FindShape(asked.at("shape").get<std::string>()));
    if (shape.name != shape_of_weights_) weights_.clear();
    shape_of_weights_ = shape.name;
    KVASIR_ASSIGN_OR_RETURN(
        layers_[name],
        AttentionLayers::Create({.shape = shape,
                                 .plan = plan,
                                 .page_tokens = kPageTokens,
                                 .slots = asked.at("slots"),
                                 .num_arenas = asked.value("arenas", 1),
                                 .weights = weights_[plan],
                                 .device = device_.get(),
                                 .timer = timer_.get()},
                                &pool_));
    weights_[plan] = layers_[name]->weights();
    return Json{{"bytes_per_slot", layers_[name]->bytes_per_slot()},
                {"arenas", layers_[name]->num_arenas()},
                {"allocated_bytes", device_->allocator().total_use().bytes}};
  }

  absl::StatusOr<Json> Run(const Json& asked) {
    const auto layers = layers_.find(asked.at("name"));
    if (layers == layers_.end() || layers->second == nullptr) {
      return absl::NotFoundError(absl::StrCat(
          "no layers have the name \"", asked.at("name").get<std::string>(),
          "\": send make first"));
    }
    const LaunchShape launch = {.batch = asked.at("batch"),
                                .context = asked.at("context"),
                                .new_tokens = asked.value("new_tokens", 1)};
    KVASIR_ASSIGN_OR_RETURN(const LaunchTime time, layers->second->Run(launch));
    const kernels::AttentionKernels& by = layers->second->kernels();
    return Json{{"attended_by", launch.new_tokens > 1 ? by.prompts : by.decode},
                {"why", by.why},
                {"seconds", time.attention_seconds},
                {"kernel_seconds", time.kernel_seconds},
                {"layer_seconds", time.layer_seconds}};
  }

  // Times the device's own copy, which reads and writes each byte once.
  absl::StatusOr<Json> Copy(int64_t bytes) {
    if (copy_.bytes() != 2 * static_cast<size_t>(bytes)) {
      copy_ = {};
      KVASIR_ASSIGN_OR_RETURN(
          copy_, device_->allocator().Allocate(2 * static_cast<size_t>(bytes),
                                               kernels::MemoryTag::kOther));
    }
    const auto from = copy_.as<char>();
    KVASIR_RETURN_IF_ERROR(clock_->Take(*stream_).status());
    KVASIR_RETURN_IF_ERROR(clock_->Mark(*stream_));
    KVASIR_RETURN_IF_ERROR(
        clock_->Copy(*stream_, from + bytes, from, static_cast<size_t>(bytes)));
    KVASIR_RETURN_IF_ERROR(clock_->Mark(*stream_));
    KVASIR_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                            clock_->Take(*stream_));
    return Json{
        {"seconds", seconds[0]},
        {"bytes_per_second", 2.0 * static_cast<double>(bytes) / seconds[0]}};
  }

  absl::StatusOr<Json> Multiply(uint32_t steps) {
    KVASIR_ASSIGN_OR_RETURN(
        const kernels::DeviceBuffer out,
        device_->allocator().Allocate(clock_->MultipliedBytes(*stream_),
                                      kernels::MemoryTag::kOther));
    KVASIR_RETURN_IF_ERROR(clock_->Take(*stream_).status());
    KVASIR_RETURN_IF_ERROR(clock_->Mark(*stream_));
    KVASIR_ASSIGN_OR_RETURN(const double operations,
                            clock_->Multiply(*stream_, out.as<float>(), steps));
    KVASIR_RETURN_IF_ERROR(clock_->Mark(*stream_));
    KVASIR_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                            clock_->Take(*stream_));
    return Json{{"seconds", seconds[0]},
                {"operations_per_second", operations / seconds[0]}};
  }

  std::unique_ptr<DecodeSteps>& DecodeOf(const Json& asked) {
    return decodes_[asked.value("graphs", false) ? 1 : 0];
  }

  absl::StatusOr<Json> MakeDecode(const Json& asked) {
    std::unique_ptr<DecodeSteps>& decode = DecodeOf(asked);
    decode = nullptr;
    KVASIR_ASSIGN_OR_RETURN(
        const model::ModelShape shape,
        model::FindShape(asked.at("shape").get<std::string>()));
    // Opens the device here just to return its errors, because the function
    // below, which opens it again, cannot return errors.
    KVASIR_RETURN_IF_ERROR(
        OpenGpu(name_, module_, Products::kLibrary).status());
    KVASIR_ASSIGN_OR_RETURN(
        decode,
        DecodeSteps::Create(
            {.shape = shape,
             .plan = asked.at("plan"),
             .batch = asked.at("batch"),
             .context = asked.at("context"),
             .graphs = asked.value("graphs", false)},
            [this] { return *OpenGpu(name_, module_, Products::kLibrary); }));
    return Json{{"weight_bytes", decode->weight_bytes()},
                {"numerics", decode->numerics()}};
  }

  // Times decode steps. The reported number of cache bytes is what the first
  // step reads.
  absl::StatusOr<Json> RunDecode(const Json& asked) {
    DecodeSteps* const decode = DecodeOf(asked).get();
    if (decode == nullptr) {
      return absl::FailedPreconditionError(
          "there are no decode steps: send decode_make first");
    }
    const auto batch = asked.at("batch").get<int64_t>();
    const auto context = asked.at("context").get<int64_t>();
    const auto steps = std::clamp<int64_t>(asked.at("steps").get<int64_t>(), 1,
                                           DecodeSteps::kSteps);
    KVASIR_RETURN_IF_ERROR(decode->Start(batch, context));
    const int64_t replayed = decode->replayed();
    absl::Status status;
    const double seconds = SecondsOf([&] {
      for (int64_t i = 0; i < steps && status.ok(); ++i) {
        status = decode->Run();
      }
    });
    KVASIR_RETURN_IF_ERROR(status);
    return Json{{"seconds", seconds / static_cast<double>(steps)},
                {"cache_bytes", decode->cache_bytes(batch, context)},
                {"replayed", decode->replayed() - replayed}};
  }

  absl::StatusOr<Json> AllReduce(const Json& asked) {
    std::vector<std::unique_ptr<kernels::Device>> devices;
    for (int64_t i = 0; i < asked.at("gpus").get<int64_t>(); ++i) {
      KVASIR_ASSIGN_OR_RETURN(
          auto device,
          OpenGpu(name_ == "emulated" ? name_ : absl::StrCat("cuda:", i),
                  module_, Products::kOwn));
      devices.push_back(std::move(device));
    }
    KVASIR_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                            TimeAllReduces({.bytes = asked.at("bytes"),
                                            .calls = asked.at("calls"),
                                            .rounds = asked.at("rounds"),
                                            .libraries = asked.at("libraries")},
                                           devices));
    return Json{{"seconds", seconds}};
  }

  base::ThreadPool pool_{base::ReadMachineLimits().cpus};
  std::string name_;
  std::string module_;
  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<DeviceClock> clock_;
  std::unique_ptr<DeviceStepTimer> timer_;
  std::unique_ptr<kernels::Stream> stream_;
  kernels::DeviceBuffer copy_;
  // Weights by plan, for the shape that was used last.
  std::map<std::string, std::shared_ptr<const worker::ModelWeights>> weights_;
  std::string shape_of_weights_;
  std::map<std::string, std::unique_ptr<AttentionLayers>> layers_;
  std::array<std::unique_ptr<DecodeSteps>, 2> decodes_;  // [1]: with graphs
};

int Main() {
  Bench bench;
  for (std::string line; std::getline(std::cin, line);) {
    Json answer;
    // If a request is invalid, its answer is an error, and the program
    // continues.
    try {
      const absl::StatusOr<Json> done = bench.Do(Json::parse(line));
      answer =
          done.ok()
              ? *done
              : Json{{"error", done.status().ToString()},
                     {"unimplemented", absl::IsUnimplemented(done.status())}};
    } catch (const nlohmann::json::exception& error) {
      answer = Json{{"error", error.what()}, {"unimplemented", false}};
    }
    std::printf("%s\n", answer.dump().c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace kvasir::bench

int main() { return kvasir::bench::Main(); }
