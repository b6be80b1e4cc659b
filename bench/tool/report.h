// Code that all `kvasir bench` commands share: common flags, the machine's
// limits, which are measured during the same run, and the printed report.
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
  bool avx2 = false;
  // True if the command calls a server. If the server is unavailable, the exit
  // code is then kExitUnavailable instead of kExitFailed.
  bool calls_server = false;
};
void AddBenchFlags(CLI::App* command, BenchFlags* flags);
// Adds --avx2, for commands that run kernels in this process.
void AddSimdFlag(CLI::App* command, BenchFlags* flags);

// The number of pairs in --pairs; fewer with --quick if --pairs was not given.
int BenchPairs(const BenchFlags& flags);

// True if the command line, the environment or the config file has the flag.
bool WasAsked(const BenchFlags& flags, const std::string& name);

// With --quick, limits the value of a flag to `small`, unless the flag was
// given.
template <typename T>
void UseQuick(const BenchFlags& flags, const std::string& name, T small,
              T* value) {
  if (flags.quick && !WasAsked(flags, name) && small < *value) {
    *value = small;
  }
}

// Sets the default model if the flags name none. With --quick it is a tiny
// shape, otherwise a model with 1.1 billion parameters, whose weights do not
// fit into any CPU cache.
void DefaultBenchModel(const BenchFlags& flags, ModelOptions* model);

// Measures the machine's limits repeatedly during a run.
//
// Threads: used by one thread only.
class MachineCeilings {
 public:
  // With `quick`, the buffer is small and fits into the CPU's caches.
  // RESOURCE_EXHAUSTED if there is not enough memory for the buffer.
  static absl::StatusOr<MachineCeilings> Create(base::ThreadPool* pool,
                                                bool quick);

  // Four times the size of the last-level cache, or 256 MiB if that is more.
  // Data of this size is read from memory, even if it is read repeatedly.
  static int64_t FootprintBytes();

  // Measures the read bandwidth by one pass over a buffer of FootprintBytes.
  double MeasureBytesPerSecond();
  // Measures the read bandwidth, and the rate of multiply-adds in registers.
  bench::Ceilings Measure();

  // {cpu, threads, simd, llc_bytes, read_bandwidth_bytes_per_second, f32_flops,
  // ...} with the medians of all measurements.
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
  bool at_least = true;  // false: the result must be at most the limit
};

// A report of named results, rows and notes, each kind in the order in which
// they were added.
class BenchReport {
 public:
  explicit BenchReport(nlohmann::ordered_json machine)
      : machine_(std::move(machine)) {}
  // Sets the description of the machine, for benchmarks that measure its limits
  // while they add rows.
  void SetMachine(nlohmann::ordered_json machine) {
    machine_ = std::move(machine);
  }

  void AddFigure(const std::string& name, double value,
                 std::optional<Target> target = std::nullopt,
                 const std::string& note = "");
  // Adds a result that is a median over pairs. It is marked as undecided if the
  // spread is too large or there are too few pairs.
  void AddRatio(const std::string& name, const bench::PairedRatio& ratio,
                std::optional<Target> target = std::nullopt,
                const std::string& note = "");
  // Marks a result as undecided independently of its spread.
  void MarkUndecided(const std::string& name);
  // Adds a note, for example why a target does not apply to this run or a
  // result is missing.
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
  bool noted_too_few_pairs_ = false;
};

// Sets the command's callback, which runs the benchmark and prints its report
// or its error.
void SetBench(CLI::App* command, std::shared_ptr<const BenchFlags> flags,
              std::function<absl::StatusOr<BenchReport>()> run, int* exit_code);

}  // namespace kvasir::cli
