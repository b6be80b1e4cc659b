#include "compress/train/recover_writer.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/artifact/checkpoint_folder.h"
#include "compress/runtime/torch_status.h"
#include "compress/tensors/tensor_loader.h"

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

constexpr char kIndexFile[] = "model.safetensors.index.json";

absl::Status CopyFile(const fs::path& from, const fs::path& folder) {
  std::error_code error;
  const fs::path to = folder / from.filename();
  fs::copy_file(from, to, error);
  // The copy must be writable even if the original is not.
  if (!error) {
    fs::permissions(to, fs::perms::owner_write, fs::perm_options::add, error);
  }
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot copy ", from.string(),
                                             " to ", to.string(), ": ",
                                             error.message()));
}

// Replaces the bytes of one tensor in a copy of its file.
absl::Status ReplaceTensor(const model::TensorStore::Entry& entry,
                           const at::Tensor& values, const fs::path& folder) {
  if (!entry.info->rows.all()) {
    return absl::UnimplementedError(
        absl::StrCat(entry.file->path(), ": tensor ", entry.info->name,
                     " also holds rows that were not trained; such a tensor "
                     "cannot be written"));
  }
  const fs::path path = folder / fs::path(entry.file->path()).filename();
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  // A safetensors file has three parts: the length of its header, the header,
  // and the data.
  uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
  const at::Tensor stored =
      values.to(ScalarTypeOf(entry.info->type)).contiguous();
  file.seekp(static_cast<std::streamoff>(sizeof(header_bytes) + header_bytes +
                                         entry.info->begin_bytes));
  file.write(static_cast<const char*>(stored.data_ptr()),
             static_cast<std::streamsize>(stored.nbytes()));
  file.close();
  if (!file) {
    return absl::UnavailableError(absl::StrCat("cannot write ", path.string()));
  }
  return absl::OkStatus();
}

absl::Status ReplaceLayer(const model::Checkpoint& source, int64_t layer,
                          const TensorMap& tensors, const fs::path& folder) {
  for (const auto& [part, values] : tensors) {
    const std::string name = model::LayerTensorName(layer, part);
    KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                            source.Tensor(name));
    if (values.sizes() != at::IntArrayRef(entry.info->shape)) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, " must have the shape ", model::ShapeText(entry.info->shape),
          ", has ", model::ShapeText(values.sizes())));
    }
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor before, LoadTensor(source, name));
    if (before.equal(values)) continue;
    KVASIR_RETURN_IF_ERROR(ReplaceTensor(entry, values, folder));
  }
  return absl::OkStatus();
}

absl::Status CopyAll(const model::Checkpoint& source, const fs::path& folder) {
  KVASIR_RETURN_IF_ERROR(CopyConfigFiles(source.folder(), folder));
  KVASIR_RETURN_IF_ERROR(CopyTokenizerFiles(source.folder(), folder));
  std::set<fs::path> files;
  for (const auto& [name, entry] : source.tensors().entries()) {
    files.insert(entry.file->path());
  }
  for (const char* name : {kPlanFile, kIndexFile}) {
    const fs::path path = fs::path(source.folder()) / name;
    if (fs::exists(path)) files.insert(path);
  }
  for (const fs::path& file : files) {
    KVASIR_RETURN_IF_ERROR(CopyFile(file, folder));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RoundToStored(const model::Checkpoint& source,
                           std::vector<TensorMap>& layers) {
  return CatchTorch([&]() -> absl::Status {
    const at::NoGradGuard no_grad;
    for (size_t l = 0; l < layers.size(); ++l) {
      for (auto& [part, tensor] : layers[l]) {
        const std::string name =
            model::LayerTensorName(static_cast<int64_t>(l), part);
        KVASIR_ASSIGN_OR_RETURN(const model::TensorStore::Entry entry,
                                source.Tensor(name));
        tensor = tensor.to(ScalarTypeOf(entry.info->type)).to(at::kFloat);
        if (!at::isfinite(tensor).all().item<bool>()) {
          return absl::InvalidArgumentError(absl::StrCat(
              name,
              ": a trained weight becomes infinite or NaN when stored as ",
              std::string(model::TensorTypeName(entry.info->type))));
        }
      }
    }
    return absl::OkStatus();
  });
}

absl::Status WriteRecovered(const model::Checkpoint& source,
                            const std::vector<TensorMap>& layers,
                            const fs::path& out, bool overwrite) {
  const std::array inputs = {fs::path(source.folder())};
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<NewFolder> folder,
                          NewFolder::Create(out, overwrite, inputs));
  KVASIR_RETURN_IF_ERROR(CopyAll(source, folder->path()));
  const absl::Status replaced = CatchTorch([&]() -> absl::Status {
    for (size_t l = 0; l < layers.size(); ++l) {
      KVASIR_RETURN_IF_ERROR(ReplaceLayer(source, static_cast<int64_t>(l),
                                          layers[l], folder->path()));
    }
    return absl::OkStatus();
  });
  KVASIR_RETURN_IF_ERROR(replaced);
  const absl::StatusOr<model::Checkpoint> written =
      model::Checkpoint::Open(folder->path().string());
  if (!written.ok()) {
    return absl::InternalError(
        absl::StrCat("the written checkpoint cannot be opened: ",
                     written.status().message()));
  }
  return folder->Keep();
}

}  // namespace kvasir::compress
