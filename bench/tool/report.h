// What all `kvasir bench` commands have in common: their flags, the machine's
// ceilings measured beside the figures, and the one object that they print.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/thread_pool.h"
#include "bench/ceilings.h"
#include "bench/floors.h"
#include "bench/paired.h"
#include "nlohmann/json.hpp"
#include "worker/load/model_options.h"

namespace CLI {
class App;
}  // namespace CLI

namespace kvasir::cli {

struct BenchFlags {
  const CLI::App* command = nullptr;
  int pairs = 9;
  bool quick = false;
  bool json = false;
  // Of a command that asks a server: one that is not there has an exit code of
  // its own.
  bool calls_server = false;
};
void AddBenchFlags(CLI::App* command, BenchFlags* flags);

// As many as asked for; with --quick, fewer where nobody asked.
int BenchPairs(const BenchFlags& flags);

// Whether the command line, the environment or a file has the flag.
bool WasAsked(const BenchFlags& flags, const std::string& name);

// With --quick, at most `small` in place of a default. What was asked for
// stays.
template <typename T>
void UseQuick(const BenchFlags& flags, const std::string& name, T small,
              T* value) {
  if (flags.quick && !WasAsked(flags, name) && small < *value) {
    *value = small;
  }
}

// With --quick and no model named: a tiny shape; else a model of 1.1 billion
// parameters, so that weights do not fit into any cache.
void DefaultBenchModel(const BenchFlags& flags, ModelOptions* model);

// Measures what the machine can do at most, again and again during a run.
//
// Threads: one.
class MachineCeilings {
 public:
  // `quick`: over a small buffer, which fits into caches. RESOURCE_EXHAUSTED
  // when there is no memory for it.
  static absl::StatusOr<MachineCeilings> Create(base::ThreadPool* pool,
                                                bool quick);

  // Four times the last-level cache: what is read in turn within so much comes
  // from memory.
  static int64_t FootprintBytes();

  // One pass over a buffer of FootprintBytes.
  double MeasureBytesPerSecond();
  // The same, and multiply-adds in registers.
  bench::Ceilings Measure();

  // {cpu, threads, simd, llc_bytes, read_bandwidth_bytes_per_second,
  // f32_flops, ...}: medians of what was measured.
  nlohmann::ordered_json ToJson();

 private:
  MachineCeilings(base::ThreadPool* pool,
                  std::unique_ptr<kernels::ReadBandwidthProbe> probe)
      : pool_(pool), probe_(std::move(probe)) {}

  base::ThreadPool* pool_;
  std::unique_ptr<kernels::ReadBandwidthProbe> probe_;
  std::vector<double> bytes_per_second_;
  std::vector<double> flops_;
};

struct Target {
  double value = 0.0;
  bool at_least = true;  // else at most
};

// Figures by name, in the order in which they were added.
class BenchReport {
 public:
  explicit BenchReport(nlohmann::ordered_json machine)
      : machine_(std::move(machine)) {}
  // For one that measures its ceilings while rows come in.
  void SetMachine(nlohmann::ordered_json machine) {
    machine_ = std::move(machine);
  }

  void AddFigure(const std::string& name, double value,
                 std::optional<Target> target = std::nullopt,
                 const std::string& note = "");
  // A median over pairs; marks it undecided when they spread too far, or are
  // too few.
  void AddRatio(const std::string& name, const bench::PairedRatio& ratio,
                std::optional<Target> target = std::nullopt,
                const std::string& note = "");
  // Says that a figure means nothing, whatever its own spread.
  void MarkUndecided(const std::string& name);
  // A target that this run was not made for, or a figure that is left out.
  void AddNote(const std::string& note) { notes_.push_back(note); }
  void AddRow(nlohmann::ordered_json row) { rows_.push_back(std::move(row)); }

  const std::vector<nlohmann::ordered_json>& rows() const { return rows_; }
  nlohmann::ordered_json ToJson() const;
  void Print(bool json) const;

 private:
  struct Figure {
    std::string name;
    double value = 0.0;
    std::optional<double> spread;
    std::optional<Target> target;
    bool undecided = false;
    std::string note;
  };

  nlohmann::ordered_json machine_;
  std::vector<Figure> figures_;
  std::vector<nlohmann::ordered_json> rows_;
  std::vector<std::string> notes_;
  bool told_too_few_pairs_ = false;
};

// Runs and prints it, or says why not. The command's callback.
void SetBench(CLI::App* command, std::shared_ptr<const BenchFlags> flags,
              std::function<absl::StatusOr<BenchReport>()> run, int* exit_code);

}  // namespace kvasir::cli
