// `kvasir bench rope`: heads that kept pairs of their own, and look their
// angles up, against the contiguous rotation.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "bench/tool/bench.h"
#include "bench/tool/report.h"
#include "kernels/device/device.h"
#include "kernels/rowwise/ops.h"

namespace kvasir::cli {
namespace {

using bench::RatioOf;
using bench::SecondsOf;

struct RopeFlags {
  BenchFlags bench;
  int64_t tokens = 2048;
  int64_t heads = 32;
  int64_t kv_heads = 8;
  int64_t head_dim = 128;  // before pruning

  int64_t num_pairs() const { return head_dim / 2; }
};

// One launch over queries and keys whose heads have `kept` pairs.
class Rotation {
 public:
  // looks_up: every KV head turns by angles of a list of its own, else all of
  // them by the first `kept` ones.
  Rotation(const RopeFlags& flags, int64_t kept, bool looks_up,
           kernels::Device* device)
      : flags_(flags),
        kept_(kept),
        positions_(static_cast<size_t>(flags.tokens)),
        steps_(static_cast<size_t>(flags.num_pairs())) {
    for (int64_t t = 0; t < flags.tokens; ++t) {
      positions_[static_cast<size_t>(t)] = t;
    }
    for (int64_t f = 0; f < flags.num_pairs(); ++f) {
      // As quick as any other angles.
      steps_[static_cast<size_t>(f)] =
          kernels::RopeStep(1.0 / static_cast<double>(f + 1));
    }
    for (int64_t j = 0; looks_up && j < flags.kv_heads; ++j) {
      lists_.push_back(KeptPairs(j));
    }
    kernels::RopeParams shape;
    shape.rotary_dim = 2 * (looks_up ? flags.num_pairs() : kept);
    shape.q = Tensor(flags.heads, &q_heads_, &q_);
    shape.k = Tensor(flags.kv_heads, &k_heads_, &k_);
    rope_ = kernels::Prepare(*device, shape, {q_heads_, k_heads_, steps_});
  }
  Rotation(const Rotation&) = delete;

  absl::Status Run(kernels::Stream* stream) {
    KVASIR_RETURN_IF_ERROR(rope_.status());
    // The host's memory is the CPU's.
    const kernels::RopeRows rows = {
        kernels::DevicePtr<float>(q_.data()),
        kernels::DevicePtr<float>(k_.data()),
        kernels::DevicePtr<const int64_t>(positions_.data()), flags_.tokens};
    if (workspace_.empty()) {
      kernels::Workspace counter = kernels::Workspace::Counting();
      KVASIR_RETURN_IF_ERROR(kernels::Rope(*stream, *rope_, rows, counter));
      workspace_.resize(counter.peak_bytes() +
                        kernels::Workspace::kAlignmentBytes);
    }
    kernels::Workspace workspace(kernels::DevicePtr<char>(workspace_.data()),
                                 workspace_.size());
    return kernels::Rope(*stream, *rope_, rows, workspace);
  }

 private:
  // Ascending, spread over all pairs, and unlike from head to head.
  std::vector<int32_t> KeptPairs(int64_t kv_head) const {
    const int64_t dropped = flags_.num_pairs() - kept_;
    std::vector<int32_t> list;
    for (int64_t i = 0; i < kept_; ++i) {
      const int64_t gap = (i + kv_head) * dropped / (kept_ + flags_.kv_heads);
      list.push_back(static_cast<int32_t>(i + gap));
    }
    return list;
  }

  kernels::RopeTensor Tensor(int64_t num_heads,
                             std::vector<kernels::RopeHead>* heads,
                             std::vector<float>* numbers) {
    kernels::RopeTensor tensor;
    tensor.num_heads = num_heads;
    tensor.head_dim = 2 * kept_;
    tensor.row_stride = num_heads * tensor.head_dim;
    numbers->assign(static_cast<size_t>(flags_.tokens * tensor.row_stride),
                    1.0f);
    for (int64_t h = 0; !lists_.empty() && h < num_heads; ++h) {
      const auto kv_head = static_cast<size_t>(h * flags_.kv_heads / num_heads);
      heads->push_back({h * tensor.head_dim, kept_, lists_[kv_head].data()});
    }
    return tensor;
  }

  const RopeFlags flags_;
  const int64_t kept_;
  std::vector<int64_t> positions_;
  std::vector<uint64_t> steps_;
  std::vector<std::vector<int32_t>> lists_;  // of the KV heads
  std::vector<kernels::RopeHead> q_heads_;
  std::vector<kernels::RopeHead> k_heads_;
  std::vector<float> q_;
  std::vector<float> k_;
  absl::StatusOr<kernels::PreparedRope> rope_;
  std::vector<char> workspace_;
};

// Rotations in turn, so that what else the machine does meets all of them.
absl::Status Measure(const RopeFlags& flags,
                     const std::vector<Rotation*>& rotations,
                     kernels::Stream* stream,
                     std::vector<std::vector<double>>* seconds) {
  seconds->assign(rotations.size(), {});
  const int pairs = BenchPairs(flags.bench);
  for (int pair = -1; pair < pairs; ++pair) {  // one to warm up
    for (size_t i = 0; i < rotations.size(); ++i) {
      absl::Status status;
      const double took =
          SecondsOf([&] { status = rotations[i]->Run(stream); });
      KVASIR_RETURN_IF_ERROR(status);
      if (pair >= 0) (*seconds)[i].push_back(took);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSizes(const RopeFlags& flags) {
  if (flags.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--head-dim ", flags.head_dim, " is odd; a rotation turns pairs"));
  }
  // Of three rotations; the flags' ranges keep it far below 64 bits.
  const int64_t bytes = 3 * flags.tokens * (flags.heads + flags.kv_heads) *
                        flags.head_dim * static_cast<int64_t>(sizeof(float));
  const int64_t available = base::ReadMachineLimits().available_bytes;
  if (bytes <= available / 2) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--tokens, --heads, --kv-heads and --head-dim together take ", bytes,
      " bytes, more than half of the ", available, " available"));
}

absl::StatusOr<BenchReport> RunRope(RopeFlags flags) {
  UseQuick<int64_t>(flags.bench, "--tokens", 64, &flags.tokens);
  KVASIR_RETURN_IF_ERROR(CheckSizes(flags));
  base::ThreadPool pool(base::ReadMachineLimits().cpus);
  kernels::CpuDevice device(&pool);
  const std::unique_ptr<kernels::Stream> stream = device.MakeStream();
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  Rotation full(flags, flags.num_pairs(), false, &device);
  for (const int64_t percent : {90, 70, 50}) {
    const int64_t kept =
        std::max<int64_t>(1, flags.num_pairs() * percent / 100);
    Rotation chosen(flags, kept, true, &device);
    Rotation contiguous(flags, kept, false, &device);
    std::vector<std::vector<double>> seconds;
    KVASIR_RETURN_IF_ERROR(
        Measure(flags, {&full, &chosen, &contiguous}, stream.get(), &seconds));
    const std::string name = std::to_string(percent);
    report.AddRatio("speedup_kept_" + name, RatioOf(seconds[0], seconds[1]),
                    std::nullopt, "all pairs, contiguous, over kept ones");
    report.AddRatio("lookup_cost_kept_" + name, RatioOf(seconds[1], seconds[2]),
                    std::nullopt, "kept pairs over as many contiguous ones");
    const auto tokens = static_cast<double>(flags.tokens);
    const auto nanoseconds = [&](size_t i) {
      return bench::Quantile(seconds[i], 0.5) / tokens * 1e9;
    };
    report.AddRow({{"kept_percent", percent},
                   {"kept_pairs", kept},
                   {"full_ns_per_token", nanoseconds(0)},
                   {"kept_ns_per_token", nanoseconds(1)},
                   {"contiguous_ns_per_token", nanoseconds(2)}});
  }
  return report;
}

}  // namespace

void AddBenchRope(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<RopeFlags>();
  CLI::App* command = group->add_subcommand(
      "rope", "rotating heads that kept pairs of their own against all pairs");
  AddFlag(command, "--tokens", flags->tokens, "of a launch")
      ->check(CLI::Range(1, 1 << 16));
  AddFlag(command, "--heads", flags->heads, "query heads")
      ->check(CLI::Range(1, 1024));
  AddFlag(command, "--kv-heads", flags->kv_heads, "KV heads")
      ->check(CLI::Range(1, 1024));
  AddFlag(command, "--head-dim", flags->head_dim, "before pruning")
      ->check(CLI::Range(2, 2048));
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunRope(*flags); }, exit_code);
}

}  // namespace kvasir::cli
