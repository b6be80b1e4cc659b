// Test support: a small random model, its calibration, and an observer that
// records tensors of each layer.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "compress/artifact/random_checkpoint.h"
#include "compress/calibrate/calibrate.h"
#include "compress/calibrate/calibration_cache.h"
#include "compress/oracle/layer_forward.h"
#include "compress/testing/folder_fixture.h"

namespace kvasir::compress {

inline model::ModelShape SmallShape() {
  return {.name = "small",
          .family = model::Family::kQwen2,
          .num_layers = 3,
          .hidden_size = 24,
          .intermediate_size = 40,
          .num_query_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 6,
          .vocab_size = 50,
          .max_position = 512,
          .qkv_bias = true};
}

class CalibrateTest : public FolderTest {
 protected:
  void SetUp() override { Write(SmallShape()); }

  void Write(const model::ModelShape& shape) {
    RandomCheckpointOptions options;
    options.shape = shape;
    options.dtype = model::TensorType::kF32;
    options.out = folder_ / "model";
    options.overwrite = true;
    KVASIR_ASSERT_OK(WriteRandomCheckpoint(
        options, [](const RandomCheckpointProgress&) { return true; }));
    Open();
  }

  void Open() {
    auto opened = model::Checkpoint::Open((folder_ / "model").string());
    KVASIR_ASSERT_OK(opened.status());
    checkpoint_ = std::make_unique<model::Checkpoint>(*std::move(opened));
  }

  // Returns sequences whose token ids are spread over the vocabulary.
  CalibrationSample Sample(int64_t sequences, int64_t tokens) const {
    CalibrationSample sample;
    sample.sequence_tokens = tokens;
    int64_t id = 7;
    for (int64_t s = 0; s < sequences; ++s) {
      std::vector<int32_t>& sequence = sample.sequences.emplace_back();
      for (int64_t t = 0; t < tokens; ++t) {
        id = (id * 31 + s + t) % checkpoint_->spec().vocab_size;
        sequence.push_back(static_cast<int32_t>(id));
      }
    }
    return sample;
  }

  absl::StatusOr<CalibrationRun> Run(const CalibrationSample& sample,
                                     const CalibrateOptions& options) {
    messages_.clear();
    passes_ = 0;
    return Calibrate(
        *checkpoint_, sample, options,
        {.on_progress =
             [&](const CalibrateProgress& progress) {
               ++passes_;
               EXPECT_LE(progress.done, progress.total);
               return !stop_after_ || passes_ < *stop_after_;
             },
         .on_message =
             [&](const std::string& text) { messages_ += text + "\n"; }});
  }

  // Replaces the last number of a float32 tensor in its file.
  void PutLastNumber(const char* tensor, float number) {
    const auto* entry = checkpoint_->tensors().Find(tensor);
    const std::filesystem::path path = entry->file->path();
    const auto size = static_cast<int64_t>(entry->info->size_bytes);
    const auto begin = static_cast<int64_t>(entry->info->begin_bytes);
    const std::string bytes = ReadFile(path);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    {
      std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
      out.seekp(8 + static_cast<int64_t>(header) + begin + size - 4);
      out.write(reinterpret_cast<const char*>(&number), sizeof(number));
    }
    Open();
  }

  std::string Id(const CalibrationSample& sample,
                 const CalibrationParts& parts) const {
    const absl::StatusOr<std::string> weights_id = WeightsId(*checkpoint_);
    KVASIR_EXPECT_OK(weights_id.status());
    return IdOf(*weights_id, sample, parts);
  }

  // Returns the path of this calibration's state or result in the cache.
  std::filesystem::path CachePath(const CalibrationSample& sample,
                                  const CalibrateOptions& options,
                                  const char* ending) const {
    return options.cache /
           absl::StrCat("calibration-", Id(sample, options.parts), ending);
  }

  // Returns the bytes of the only file in the cache.
  std::string CacheBytes(const std::filesystem::path& cache) const {
    std::string bytes;
    int files = 0;
    for (const auto& file : std::filesystem::directory_iterator(cache)) {
      bytes = ReadFile(file.path());
      ++files;
    }
    EXPECT_EQ(files, 1);
    return bytes;
  }

  std::unique_ptr<model::Checkpoint> checkpoint_;
  std::optional<int> stop_after_;
  int passes_ = 0;
  std::string messages_;
};

inline at::Tensor Ids(const std::vector<int32_t>& sequence) {
  std::vector<int64_t> wide(sequence.begin(), sequence.end());
  return at::tensor(wide).unsqueeze(0);
}

// Records the tensors of each layer as float64.
class Recorder : public LayerObserver {
 public:
  void OnAttentionInput(int64_t layer, const at::Tensor& x) override {
    Put(inputs, layer, x);
  }
  void OnQuery(int64_t layer, const at::Tensor& query) override {
    Put(queries, layer, query);
  }
  void OnKey(int64_t layer, const at::Tensor& key) override {
    Put(keys, layer, key);
  }
  void OnRotatedKey(int64_t layer, const at::Tensor& key) override {
    Put(rotated_keys, layer, key);
  }
  void OnValue(int64_t layer, const at::Tensor& value) override {
    Put(values, layer, value);
  }
  // For each layer, a tensor [rows, width].
  std::vector<at::Tensor> inputs, queries, keys, rotated_keys, values;

 private:
  static void Put(std::vector<at::Tensor>& to, int64_t layer,
                  const at::Tensor& seen) {
    const auto index = static_cast<size_t>(layer);
    if (to.size() <= index) to.resize(index + 1);
    const at::Tensor rows =
        seen.detach().flatten(0, 1).flatten(1).to(at::kDouble);
    to[index] = to[index].defined() ? at::cat({to[index], rows}) : rows;
  }
};

inline double RelativeError(const at::Tensor& have, const at::Tensor& want) {
  return ((have - want).norm() / want.norm()).item<double>();
}

}  // namespace kvasir::compress
