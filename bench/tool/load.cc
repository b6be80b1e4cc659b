// `kvasir bench load`: measures the time until a checkpoint is loaded, and the
// memory that the process then holds.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/cli/process.h"
#include "base/cli/progress.h"
#include "base/machine.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "bench/tool/bench.h"
#include "bench/tool/report.h"
#include "compress/artifact/random_checkpoint.h"
#include "kernels/device/allocator.h"
#include "worker/load/loaded_model.h"

namespace kvasir::cli {
namespace {

using bench::Quantile;
using bench::RatioOf;
using bench::SecondsOf;

struct LoadFlags {
  BenchFlags bench;
  ModelOptions model;
  // The page pool is small, because the time in which the system clears its
  // memory should not count as loading.
  int64_t kv_cache_bytes = int64_t{128} << 20;
};

// Makes a folder with a random checkpoint, and removes it at the end.
class TemporaryCheckpoint {
 public:
  static absl::StatusOr<std::unique_ptr<TemporaryCheckpoint>> Write(
      const ModelOptions& model) {
    KVASIR_ASSIGN_OR_RETURN(std::string folder, MakePrivateFolder());
    auto made = std::unique_ptr<TemporaryCheckpoint>(
        new TemporaryCheckpoint(std::move(folder)));
    compress::RandomCheckpointOptions options;
    KVASIR_ASSIGN_OR_RETURN(options.shape, model::FindShape(model.shape));
    options.seed = model.weights_seed;
    options.out = made->folder();
    options.threads = base::ReadMachineLimits().cpus;
    Progress progress("writing a checkpoint", 0, "MiB", true);
    KVASIR_RETURN_IF_ERROR(compress::WriteRandomCheckpoint(
        options, [&](const compress::RandomCheckpointProgress& written) {
          progress.Update(written.written_bytes >> 20);
          return !ShutdownRequested();
        }));
    return made;
  }
  ~TemporaryCheckpoint() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  TemporaryCheckpoint(const TemporaryCheckpoint&) = delete;
  TemporaryCheckpoint& operator=(const TemporaryCheckpoint&) = delete;

  const std::string& folder() const { return folder_; }

 private:
  explicit TemporaryCheckpoint(std::string folder)
      : folder_(std::move(folder)) {}
  const std::string folder_;
};

// The memory into which the baseline reads. The baseline reads the folder's
// weight files piece by piece, from front to back, with plain read() calls.
struct ReadTarget {
  char* data;
  size_t bytes;
  // True: each piece has its own place in `data`, so that at the end all pieces
  // are in memory. False: each piece overwrites the previous one.
  bool keep;
};

constexpr size_t kPieceBytes = size_t{4} << 20;

absl::StatusOr<int64_t> ReadWeightFiles(const std::string& folder,
                                        const ReadTarget& target) {
  int64_t total = 0;
  size_t place = 0;
  std::error_code error_code;
  std::filesystem::directory_iterator entries(folder, error_code);
  if (error_code) {
    return absl::NotFoundError(
        absl::StrCat("--model ", folder, ": ", error_code.message()));
  }
  for (const auto& entry : entries) {
    if (entry.path().extension() != ".safetensors") continue;
    const int descriptor = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    ssize_t got = descriptor < 0 ? -1 : 1;
    while (got > 0) {
      got = ::read(descriptor, target.data + place,
                   std::min(kPieceBytes, target.bytes - place));
      if (got <= 0) break;
      total += got;
      if (target.keep) place += static_cast<size_t>(got);
    }
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    if (got < 0) {
      return absl::InternalError(absl::StrCat(
          entry.path().string(), ": cannot read: ", std::strerror(error)));
    }
  }
  return total;
}

struct LoadTimes {
  std::vector<double> read;  // seconds to read into one small buffer
  std::vector<double> keep;  // seconds to read into fresh memory
  std::vector<double> load;
  std::vector<double> resident;
  // bytes of weights and pool, by the allocator's counters
  std::vector<double> held;
  int64_t file_bytes = 0;
  int64_t workspace_bytes = 0;
};

absl::StatusOr<LoadTimes> Measure(const LoadFlags& flags) {
  LoadTimes times;
  std::vector<char> buffer(kPieceBytes);
  const ReadTarget small = {buffer.data(), buffer.size(), false};
  kernels::CpuAllocator allocator;
  Progress progress("load", BenchPairs(flags.bench), "pairs", true);
  for (int pair = 0; pair < BenchPairs(flags.bench); ++pair) {
    if (ShutdownRequested()) return absl::CancelledError("stopped");
    absl::StatusOr<int64_t> bytes = int64_t{0};
    // Loading drops the file's pages from the page cache. The first read warms
    // the cache again; the second is timed and leaves the cache warm for the
    // other measurements.
    for (int pass = 0; pass < 2; ++pass) {
      const double seconds =
          SecondsOf([&] { bytes = ReadWeightFiles(flags.model.model, small); });
      KVASIR_RETURN_IF_ERROR(bytes.status());
      if (pass == 1) times.read.push_back(seconds);
    }
    times.file_bytes = *bytes;
    // Reads the files into fresh memory and reports this time. If a
    // hypervisor has taken free memory away, getting it back takes longer
    // than reading or loading.
    {
      absl::StatusOr<kernels::DeviceBuffer> memory;
      times.keep.push_back(SecondsOf([&] {
        memory = allocator.Allocate(static_cast<size_t>(times.file_bytes),
                                    kernels::MemoryTag::kOther);
        if (!memory.ok()) return;
        bytes = ReadWeightFiles(
            flags.model.model,
            {memory->as<char>().device_address(), memory->bytes(), true});
      }));
      KVASIR_RETURN_IF_ERROR(memory.status());
      KVASIR_RETURN_IF_ERROR(bytes.status());
    }
    absl::StatusOr<std::unique_ptr<LoadedModel>> model;
    times.load.push_back(SecondsOf([&] {
      model = LoadedModel::Load({.model = flags.model,
                                 .max_num_seqs = 8,
                                 .kv_cache_bytes = flags.kv_cache_bytes});
    }));
    KVASIR_RETURN_IF_ERROR(model.status());
    times.resident.push_back(
        static_cast<double>(base::ReadResidentMemory().bytes));
    times.held.push_back(static_cast<double>((*model)->weight_bytes() +
                                             (*model)->kv_pool_bytes()));
    times.workspace_bytes = (*model)->workspace_bytes();
    progress.Update(pair + 1);
  }
  return times;
}

absl::StatusOr<BenchReport> RunLoad(LoadFlags flags) {
  std::unique_ptr<TemporaryCheckpoint> temporary;
  if (flags.model.model.empty()) {
    DefaultBenchModel(flags.bench, &flags.model);
    // Handles signals, so that the temporary folder is removed if a signal ends
    // the run.
    HoldShutdownSignals();
    KVASIR_ASSIGN_OR_RETURN(temporary, TemporaryCheckpoint::Write(flags.model));
    flags.model.model = temporary->folder();
    flags.model.random_weights = false;
    flags.model.shape.clear();
  }
  UseQuick(flags.bench, "--kv-cache-bytes", int64_t{16} << 20,
           &flags.kv_cache_bytes);
  KVASIR_ASSIGN_OR_RETURN(const LoadTimes times, Measure(flags));

  base::ThreadPool pool(base::ReadMachineLimits().cpus);
  KVASIR_ASSIGN_OR_RETURN(MachineCeilings ceilings,
                          MachineCeilings::Create(&pool, flags.bench.quick));
  BenchReport report(ceilings.ToJson());
  report.AddRatio("load_over_read", RatioOf(times.load, times.read),
                  Target{3.0, false},
                  "time until ready, divided by the time to read the files "
                  "from the page cache");
  report.AddRatio("load_over_read_and_keep", RatioOf(times.load, times.keep),
                  std::nullopt,
                  "time until ready, divided by the time to read the files "
                  "into fresh memory");
  report.AddRatio("rss_over_weights_and_pool",
                  RatioOf(times.resident, times.held), Target{1.15, false});
  report.AddFigure("load_seconds", Quantile(times.load, 0.5));
  report.AddFigure("read_seconds", Quantile(times.read, 0.5));
  report.AddFigure("read_and_keep_seconds", Quantile(times.keep, 0.5));
  report.AddFigure("file_bytes", static_cast<double>(times.file_bytes));
  report.AddFigure("resident_bytes", Quantile(times.resident, 0.5));
  report.AddFigure("weights_and_pool_bytes", Quantile(times.held, 0.5));
  report.AddFigure("workspace_bytes",
                   static_cast<double>(times.workspace_bytes));
  return report;
}

}  // namespace

void AddBenchLoad(CLI::App* group, int* exit_code) {
  auto flags = std::make_shared<LoadFlags>();
  CLI::App* command = group->add_subcommand(
      "load",
      "compare the time to load a checkpoint with the time to "
      "read its files, and report the memory held; without "
      "--model, of a random checkpoint in a temporary folder");
  AddModelFlags(command, &flags->model);
  AddBytes(command, "--kv-cache-bytes", flags->kv_cache_bytes,
           "size of the KV cache pool");
  AddBenchFlags(command, &flags->bench);
  SetBench(
      command, std::shared_ptr<const BenchFlags>(flags, &flags->bench),
      [flags] { return RunLoad(*flags); }, exit_code);
}

}  // namespace kvasir::cli
