#include "worker/testing/saved_checkpoint.h"

#include <google/protobuf/util/json_util.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_matchers.h"
#include "model/checkpoint/random_weights.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/shape_config.h"

namespace kvasir::worker {
namespace {

constexpr uint64_t kSavedSeed = 20260;

struct Names {
  const char* stored;  // the type's name in safetensors
  const char* config;
};
Names NamesOf(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kF16:
      return {"F16", "float16"};
    case kernels::DType::kBf16:
      return {"BF16", "bfloat16"};
    case kernels::DType::kF32:
      break;
  }
  return {"F32", "float32"};
}

}  // namespace

SavedCheckpoint::SavedCheckpoint(const model::ModelShape& shape,
                                 kernels::DType dtype,
                                 const plan::ResolvedPlan* plan) {
  const Names names = NamesOf(dtype);
  folder_.Write("config.json", model::ConfigJsonOfShape(shape, names.config));
  const model::DecoderSpec spec = *model::SpecOfShape(shape);
  const std::vector<model::RandomTensor> tensors =
      plan == nullptr ? model::RandomTensorsOf(shape, spec)
                      : *model::RandomTensorsOf(shape, spec, *plan);
  const std::unique_ptr<RandomSource> source =
      plan == nullptr
          ? std::make_unique<RandomSource>(shape, kSavedSeed, dtype)
          : *RandomSource::Create(shape, spec, *plan, kSavedSeed, dtype);
  if (plan != nullptr) {
    std::string json;
    KVASIR_CHECK(
        google::protobuf::util::MessageToJsonString(plan->source, &json).ok());
    folder_.Write("kv_plan.json", json);
  }
  std::vector<std::string> fields;
  int64_t end = 0;
  for (const model::RandomTensor& tensor : tensors) {
    const int64_t begin = end;
    end += tensor.num_elements() * kernels::DTypeBytes(dtype);
    fields.push_back(
        absl::StrCat("\"", tensor.name, "\":{\"dtype\":\"", names.stored,
                     "\",\"shape\":[", absl::StrJoin(tensor.shape, ","),
                     "],\"data_offsets\":[", begin, ",", end, "]}"));
  }
  const std::string header = absl::StrCat("{", absl::StrJoin(fields, ","), "}");
  const uint64_t size = header.size();
  std::ofstream file(folder_.File("model.safetensors"), std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header;
  std::vector<std::byte> buffer(1 << 20);
  for (const model::RandomTensor& tensor : tensors) {
    const auto all = ReadRange::All(*source->SizeOf(tensor.name));
    KVASIR_EXPECT_OK(
        source->Read(tensor.name, all, buffer, [&](const WeightBlock& block) {
          file.write(
              static_cast<const char*>(block.data),
              block.num_rows * block.columns * kernels::DTypeBytes(dtype));
          return absl::OkStatus();
        }));
  }
  file.close();
  KVASIR_CHECK(file.good());
}

std::string SavedCheckpoint::Copy(const std::string& name) const {
  const std::string copy = folder_.File(name);
  std::filesystem::create_directory(copy);
  for (const char* file : {"/config.json", "/model.safetensors"}) {
    std::filesystem::copy_file(folder() + file, copy + file);
  }
  return copy;
}

void FlipNumber(const std::string& folder, const std::string& tensor,
                int64_t row, int64_t column) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto store,
                              model::TensorStore::Open(folder));
  const model::TensorStore::Entry* const entry = store.Find(tensor);
  ASSERT_NE(entry, nullptr);
  std::fstream file(entry->file->path(),
                    std::ios::binary | std::ios::in | std::ios::out);
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
  const auto at = static_cast<std::streamoff>(
      sizeof(header_bytes) + header_bytes + entry->info->begin_bytes +
      static_cast<uint64_t>(row) * entry->info->row_bytes() +
      static_cast<uint64_t>(column) *
          static_cast<uint64_t>(model::TensorTypeBits(entry->info->type) / 8));
  file.seekg(at);
  char byte = 0;
  file.get(byte);
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 1));
  file.close();
  ASSERT_TRUE(file.good());
}

}  // namespace kvasir::worker
