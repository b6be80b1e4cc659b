#include "bench/tool/report.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "base/cli/flags.h"
#include "base/log.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "hwy/targets.h"
#include "kernels/device/stream.h"

namespace kvasir::cli {
namespace {

constexpr int kQuickPairs = 2;
constexpr int64_t kQuickFootprintBytes = int64_t{16} << 20;
// The last-level cache is assumed to have at least this size, also if the CPU
// reports none.
constexpr int64_t kLeastCacheBytes = int64_t{64} << 20;

}  // namespace

int64_t MachineCeilings::FootprintBytes() {
  return 4 * std::max(base::LastLevelCacheBytes(), kLeastCacheBytes);
}

void AddBenchFlags(CLI::App* command, BenchFlags* flags) {
  flags->command = command;
  AddFlag(command, "--pairs", flags->pairs,
          "interleaved pairs of measurements; a ratio is their "
          "median, and with fewer than 7 pairs all ratios are "
          "undecided")
      ->check(CLI::Range(1, 10000));
  AddSwitch(command, "--quick", flags->quick,
            "only test that the benchmark runs: small sizes, results "
            "without meaning");
  AddSwitch(command, "--json", flags->json, "print one JSON object");
}

void AddSimdFlag(CLI::App* command, BenchFlags* flags) {
  AddSwitch(command, "--avx2", flags->avx2,
            "do not use AVX-512, to measure what a CPU without it would do");
}

bool WasAsked(const BenchFlags& flags, const std::string& name) {
  return flags.command->count(name) > 0;
}

int BenchPairs(const BenchFlags& flags) {
  int pairs = flags.pairs;
  UseQuick(flags, "--pairs", kQuickPairs, &pairs);
  return pairs;
}

void DefaultBenchModel(const BenchFlags& flags, ModelOptions* model) {
  if (!model->model.empty()) return;
  model->random_weights = true;
  if (!model->shape.empty()) return;
  model->shape = flags.quick ? "kvasir-tiny" : "tinyllama-1.1b";
}

absl::StatusOr<MachineCeilings> MachineCeilings::Create(base::ThreadPool* pool,
                                                        bool quick) {
  KVASIR_ASSIGN_OR_RETURN(
      auto probe, kernels::ReadBandwidthProbe::Create(
                      pool, quick ? kQuickFootprintBytes : FootprintBytes()));
  return MachineCeilings(pool, std::move(probe));
}

double MachineCeilings::MeasureBytesPerSecond() {
  return Measure().bytes_per_second;
}

bench::Ceilings MachineCeilings::Measure() {
  flops_.push_back(kernels::MeasureFlops(pool_, 20));
  bytes_per_second_.push_back(probe_->BytesPerSecond());
  return {.bytes_per_second = bytes_per_second_.back(), .flops = flops_.back()};
}

nlohmann::ordered_json MachineCeilings::ToJson() {
  constexpr size_t kFewest = 7;
  while (bytes_per_second_.size() < kFewest) MeasureBytesPerSecond();
  return {
      {"cpu", base::CpuModelName()},
      {"threads", pool_->num_threads()},
      {"simd", kernels::CpuTargetName()},
      {"llc_bytes", base::LastLevelCacheBytes()},
      {"memory_bytes", base::ReadMachineLimits().memory_bytes},
      {"read_bandwidth_bytes_per_second",
       bench::Quantile(bytes_per_second_, 0.5)},
      {"read_bandwidth_spread", (bench::Quantile(bytes_per_second_, 0.75) -
                                 bench::Quantile(bytes_per_second_, 0.25)) /
                                    bench::Quantile(bytes_per_second_, 0.5)},
      {"read_bandwidth_footprint_bytes", probe_->footprint_bytes()},
      {"f32_flops", bench::Quantile(flops_, 0.5)},
      {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(),
                                absl::UTCTimeZone())}};
}

void BenchReport::AddFigure(const std::string& name, double value,
                            std::optional<Target> target,
                            const std::string& note) {
  Figure figure;
  figure.name = name;
  figure.value = value;
  figure.target = target;
  figure.note = note;
  figures_.push_back(std::move(figure));
}

void BenchReport::AddRatio(const std::string& name,
                           const bench::PairedRatio& ratio,
                           std::optional<Target> target,
                           const std::string& note) {
  AddFigure(name, ratio.median, target, note);
  figures_.back().spread = ratio.spread;
  figures_.back().undecided = ratio.undecided();
  if (!ratio.too_few_pairs() || noted_too_few_pairs_) return;
  noted_too_few_pairs_ = true;
  AddNote(
      absl::StrFormat("only %d pairs: with fewer than %d, no ratio is decided",
                      ratio.pairs, bench::PairedRatio::kFewestPairs));
}

void BenchReport::MarkUndecided(const std::string& name) {
  for (Figure& figure : figures_) {
    if (figure.name == name) figure.undecided = true;
  }
}

nlohmann::ordered_json BenchReport::ToJson() const {
  using Json = nlohmann::ordered_json;
  Json figures = Json::object();
  Json spread = Json::object();
  Json targets = Json::object();
  Json undecided = Json::array();
  for (const Figure& figure : figures_) {
    figures[figure.name] = figure.value;
    if (figure.spread.has_value()) spread[figure.name] = *figure.spread;
    if (figure.target.has_value()) {
      targets[figure.name] = {{figure.target->at_least ? "at_least" : "at_most",
                               figure.target->value}};
    }
    if (figure.undecided) undecided.push_back(figure.name);
  }
  Json object{{"machine", machine_},    {"figures", figures},
              {"spread", spread},       {"targets", targets},
              {"undecided", undecided}, {"rows", rows_},
              {"notes", notes_}};
  return object;
}

namespace {

std::string CellOf(const nlohmann::ordered_json& row, const std::string& key) {
  const auto cell = row.find(key);
  if (cell == row.end()) return "";
  if (cell->is_string()) return cell->get<std::string>();
  if (cell->is_number_float()) {
    return absl::StrFormat("%.5g", cell->get<double>());
  }
  return cell->dump();
}

// Prints the rows as a table with all columns that occur in them. Nested
// numbers have separate columns like "e2e_ms/p50".
void PrintRows(std::vector<nlohmann::ordered_json> rows) {
  if (rows.empty()) return;
  for (auto& row : rows) row = row.flatten();
  std::vector<std::pair<std::string, size_t>> columns;
  for (const auto& row : rows) {
    for (const auto& [key, value] : row.items()) {
      auto column = std::find_if(
          columns.begin(), columns.end(),
          [&key = key](const auto& each) { return each.first == key; });
      if (column == columns.end()) {
        column = columns.insert(columns.end(), {key, key.size()});
      }
      column->second = std::max(column->second, CellOf(row, key).size());
    }
  }
  std::string lines = "rows\n";
  for (const auto& [key, width] : columns) {
    absl::StrAppendFormat(&lines, "  %*s", static_cast<int>(width),
                          key.substr(1));
  }
  for (const auto& row : rows) {
    lines += "\n";
    for (const auto& [key, width] : columns) {
      absl::StrAppendFormat(&lines, "  %*s", static_cast<int>(width),
                            CellOf(row, key));
    }
  }
  std::printf("%s\n", lines.c_str());
}

}  // namespace

void BenchReport::Print(bool json) const {
  if (json) {
    std::printf("%s\n", ToJson().dump(2).c_str());
    return;
  }
  std::printf("machine\n");
  for (const auto& [key, value] : machine_.items()) {
    std::printf("  %-34s %s\n", key.c_str(),
                base::Printable(value.is_string() ? value.get<std::string>()
                                                  : value.dump())
                    .c_str());
  }
  std::printf("figures\n");
  for (const Figure& figure : figures_) {
    std::string line =
        absl::StrFormat("  %-34s %.5g", figure.name, figure.value);
    if (figure.spread.has_value()) {
      absl::StrAppendFormat(&line, "  (spread %.1f %%)",
                            100.0 * *figure.spread);
    }
    if (figure.undecided) line += "  undecided";
    if (figure.target.has_value()) {
      absl::StrAppendFormat(
          &line, "  target %s %g",
          figure.target->at_least ? ">=" : "<=", figure.target->value);
    }
    if (!figure.note.empty()) line += "  " + figure.note;
    std::printf("%s\n", line.c_str());
  }
  PrintRows(rows_);
  for (const std::string& note : notes_) std::printf("%s\n", note.c_str());
}

void SetBench(CLI::App* command, std::shared_ptr<const BenchFlags> flags,
              std::function<absl::StatusOr<BenchReport>()> run,
              int* exit_code) {
  command->callback([command, flags, run = std::move(run), exit_code] {
    base::InitLogging(base::LogFormat::kText, base::LogLevel::kWarning);
#if HWY_ARCH_X86
    // Better targets have lower bits.
    if (flags->avx2) hwy::DisableTargets(HWY_AVX2 - 1);
#endif
    const absl::StatusOr<BenchReport> report = run();
    if (report.ok()) {
      report->Print(flags->json);
      return;
    }
    PrintError("kvasir bench " + command->get_name(),
               report.status().ToString());
    *exit_code = flags->calls_server && absl::IsUnavailable(report.status())
                     ? kExitUnavailable
                     : kExitFailed;
  });
}

}  // namespace kvasir::cli
