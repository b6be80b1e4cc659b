#include "compress/artifact/random_checkpoint.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "compress/artifact/hf_config.h"
#include "compress/artifact/new_file.h"
#include "model/checkpoint/random_weights.h"
#include "model/shapes/shape_config.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";

// Number of elements that a thread generates at a time; they fit into the
// core's cache.
constexpr int64_t kChunkElements = int64_t{1} << 16;
constexpr int64_t kChunksPerThread = 8;

struct Shard {
  std::string file;
  std::vector<model::RandomTensor> tensors;
  std::vector<TensorEntry> entries;
  int64_t bytes = 0;
};

// Assigns tensors to shards in file order; a tensor is never split.
std::vector<Shard> MakeShards(const RandomCheckpointOptions& options) {
  std::vector<Shard> shards(1);
  for (model::RandomTensor& tensor : model::RandomTensorsOf(options.shape)) {
    TensorEntry entry{tensor.name, options.dtype, tensor.shape};
    const int64_t bytes = TensorBytes(entry);
    if (shards.back().bytes > 0 &&
        shards.back().bytes + bytes > options.max_shard_bytes) {
      shards.emplace_back();
    }
    shards.back().tensors.push_back(std::move(tensor));
    shards.back().entries.push_back(std::move(entry));
    shards.back().bytes += bytes;
  }
  if (shards.size() == 1) {
    shards[0].file = kSingleFile;
  } else {
    for (size_t i = 0; i < shards.size(); ++i) {
      shards[i].file = absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1,
                                       shards.size());
    }
  }
  return shards;
}

bool IsWeightFile(const std::filesystem::path& path) {
  return path.extension() == ".safetensors" || path.filename() == kIndexFile;
}

absl::Status ClearFolder(const RandomCheckpointOptions& options) {
  std::error_code error;
  std::filesystem::create_directories(options.out, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat(
        "cannot create ", options.out.string(), ": ", error.message()));
  }
  for (const auto& file :
       std::filesystem::directory_iterator(options.out, error)) {
    if (!IsWeightFile(file.path())) continue;
    if (!options.overwrite) {
      return absl::AlreadyExistsError(absl::StrCat(
          file.path().string(),
          " already exists; give --overwrite to replace the checkpoint"));
    }
    std::filesystem::remove(file.path(), error);
    if (error) break;
  }
  if (error) {
    return absl::UnavailableError(absl::StrCat(
        "cannot clear ", options.out.string(), ": ", error.message()));
  }
  return absl::OkStatus();
}

void StoreChunk(std::span<const float> values, model::TensorType dtype,
                std::byte* out) {
  if (dtype == model::TensorType::kF32) {
    std::memcpy(out, values.data(), values.size_bytes());
    return;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = ToBf16Bits(values[i]);
    std::memcpy(out + 2 * i, &bits, sizeof(bits));
  }
}

// Writes the tensors one after the other. The threads together generate a few
// chunks of kChunkElements each, which are then written.
class TensorStreamer {
 public:
  TensorStreamer(
      const RandomCheckpointOptions& options, int64_t total_bytes,
      const std::function<bool(const RandomCheckpointProgress&)>& on_progress)
      : options_(options),
        threads_(std::max(options.threads, 1)),
        on_progress_(on_progress) {
    progress_.total_bytes = total_bytes;
  }

  absl::Status Write(const model::RandomTensor& tensor,
                     SafetensorsWriter& writer) {
    const int64_t count = tensor.num_elements();
    const int64_t batch = threads_ * kChunksPerThread * kChunkElements;
    for (int64_t begin = 0; begin < count; begin += batch) {
      Make(tensor, begin, std::min(batch, count - begin));
      KVASIR_RETURN_IF_ERROR(writer.Append(bytes_));
      progress_.written_bytes += static_cast<int64_t>(bytes_.size());
      if (!on_progress_(progress_)) {
        return absl::CancelledError(
            "the run was stopped; the checkpoint is not complete");
      }
    }
    return absl::OkStatus();
  }

 private:
  void Make(const model::RandomTensor& tensor, int64_t begin, int64_t count) {
    const int64_t element_bytes = model::TensorTypeBits(options_.dtype) / 8;
    bytes_.resize(static_cast<size_t>(count * element_bytes));
    const int64_t chunks = (count + kChunkElements - 1) / kChunkElements;
    auto work = [&](int64_t thread) {
      std::vector<float> values;
      for (int64_t chunk = thread; chunk < chunks; chunk += threads_) {
        const int64_t first = chunk * kChunkElements;
        values.resize(
            static_cast<size_t>(std::min(kChunkElements, count - first)));
        model::FillRandom(tensor, options_.seed, begin + first, values);
        StoreChunk(values, options_.dtype,
                   bytes_.data() + first * element_bytes);
      }
    };
    std::vector<std::jthread> helpers;
    for (int64_t thread = 1; thread < std::min(threads_, chunks); ++thread) {
      helpers.emplace_back(work, thread);
    }
    work(0);
  }

  const RandomCheckpointOptions& options_;
  const int64_t threads_;
  const std::function<bool(const RandomCheckpointProgress&)>& on_progress_;
  RandomCheckpointProgress progress_;
  std::vector<std::byte> bytes_;
};

absl::Status WriteIndex(const RandomCheckpointOptions& options,
                        const std::vector<Shard>& shards, int64_t total_bytes) {
  nlohmann::ordered_json index;
  index["metadata"] = {{"total_size", total_bytes}};
  for (const Shard& shard : shards) {
    for (const TensorEntry& entry : shard.entries) {
      index["weight_map"][entry.name] = shard.file;
    }
  }
  return WriteFileAtomically(options.out / kIndexFile, index.dump(2) + "\n");
}

}  // namespace

absl::Status WriteRandomCheckpoint(
    const RandomCheckpointOptions& options,
    const std::function<bool(const RandomCheckpointProgress&)>& on_progress) {
  // The bytes of numbers are copied from memory to a little-endian file.
  static_assert(std::endian::native == std::endian::little);
  KVASIR_RETURN_IF_ERROR(model::SpecOfShape(options.shape).status());
  KVASIR_RETURN_IF_ERROR(ClearFolder(options));
  KVASIR_RETURN_IF_ERROR(
      WriteHfConfig(options.out, options.shape, options.dtype));
  if (options.tokenizer) {
    KVASIR_RETURN_IF_ERROR(CopyTokenizer(*options.tokenizer, options.out));
  }
  const std::vector<Shard> shards = MakeShards(options);
  int64_t total_bytes = 0;
  for (const Shard& shard : shards) total_bytes += shard.bytes;
  TensorStreamer streamer(options, total_bytes, on_progress);
  for (const Shard& shard : shards) {
    KVASIR_ASSIGN_OR_RETURN(
        SafetensorsWriter writer,
        SafetensorsWriter::Create(options.out / shard.file, shard.entries));
    for (const model::RandomTensor& tensor : shard.tensors) {
      KVASIR_RETURN_IF_ERROR(streamer.Write(tensor, writer));
    }
    KVASIR_RETURN_IF_ERROR(writer.Finish());
  }
  if (shards.size() == 1) return absl::OkStatus();
  return WriteIndex(options, shards, total_bytes);
}

}  // namespace kvasir::compress
