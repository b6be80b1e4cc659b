#include "compress/artifact/artifact_writer.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "compress/artifact/checkpoint_folder.h"
#include "compress/artifact/new_file.h"
#include "compress/runtime/torch_status.h"
#include "compress/tensors/tensor_loader.h"
#include "model/checkpoint/family_tensors.h"
#include "model/checkpoint/plan_tensors.h"
#include "model/shapes/attention_shape.h"
#include "nlohmann/json.hpp"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr std::string_view kLayers = "model.layers.";
constexpr size_t kCopyBytes = size_t{8} << 20;

// Returns whether the compressed model has new tensors in place of the base
// model's tensor `name`.
bool IsReplaced(std::string_view name) {
  if (!name.starts_with(kLayers)) return false;
  for (const std::string_view part :
       {".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj.",
        ".self_attn.o_proj."}) {
    if (name.find(part) != name.npos) return true;
  }
  return false;
}

bool IsRange(std::string_view name) {
  return name.ends_with(".range.min") || name.ends_with(".range.scale");
}

// The base model's tensors that are copied as they are stored, in file order:
// first the tensors outside the layers, then those of each layer.
struct CopyList {
  std::vector<const model::TensorStore::Entry*> outer;
  std::vector<std::vector<const model::TensorStore::Entry*>> layers;
  // The copied tensors that a decoder reads; only these must be finite. Other
  // tensors may hold any number: an attention mask stored with GPT-NeoX, for
  // example, holds -infinity.
  std::set<const model::TensorStore::Entry*> read;
  int64_t bytes = 0;
};

CopyList ListCopies(const model::Checkpoint& base) {
  CopyList list;
  std::set<std::string> required;
  for (model::RequiredTensor& tensor : model::RequiredTensors(base.spec())) {
    required.insert(std::move(tensor.name));
  }
  list.layers.resize(static_cast<size_t>(base.spec().num_layers()));
  std::map<std::string, size_t, std::less<>> layer_of;
  for (size_t l = 0; l < list.layers.size(); ++l) {
    layer_of[model::LayerTensorName(static_cast<int64_t>(l), "")] = l;
  }
  for (const auto& [stored_name, entry] : base.tensors().stored()) {
    // A fused tensor (such as q, k and v in one) has one name per projection.
    // Either all of these belong to attention or none does, so the first name
    // decides.
    const std::string name =
        model::OurNamesOf(base.spec(), stored_name).front();
    if (IsReplaced(name) || !model::IsWeightType(entry.info->type)) continue;
    list.bytes += static_cast<int64_t>(entry.info->size_bytes);
    if (required.contains(name)) list.read.insert(&entry);
    const size_t dot = name.starts_with(kLayers)
                           ? name.find('.', kLayers.size())
                           : std::string::npos;
    const auto layer = dot == std::string::npos
                           ? layer_of.end()
                           : layer_of.find(name.substr(0, dot + 1));
    if (layer == layer_of.end()) {
      list.outer.push_back(&entry);
    } else {
      list.layers[layer->second].push_back(&entry);
    }
  }
  return list;
}

TensorEntry EntryOf(const model::TensorInfo& info) {
  return {info.name, info.type, info.shape};
}

int64_t CountGroups(const kvasir::v1::Part& part) {
  return part.low_rank().groups_size() + part.rope_low_rank().groups_size();
}

// Returns an upper bound of the header's size, for the case that one file holds
// all tensors.
int64_t HeaderRoom(const model::Checkpoint& base,
                   const kvasir::v1::KvPlan& plan) {
  int64_t bytes = 0;
  for (const auto& [name, entry] : base.tensors().stored()) {
    bytes += SafetensorsWriter::HeaderBytes(EntryOf(*entry.info));
  }
  // Each part of a layer's keys or values has at most kTensorsPerPart tensors,
  // plus one for each group of heads. `entry` has the longest possible name, so
  // no tensor has a longer entry in the header.
  constexpr int64_t kTensorsPerPart = 8;
  const int64_t entry = SafetensorsWriter::HeaderBytes(
      {model::LayerTensorName(plan.layers_size(),
                              "self_attn.k_proj.part99.up.9999.weight"),
       model::TensorType::kBF16,
       {0, 0, 0}});
  for (const kvasir::v1::LayerPlan& layer : plan.layers()) {
    for (const auto* side : {&layer.key(), &layer.value()}) {
      for (const kvasir::v1::Part& part : side->parts()) {
        bytes += entry * (kTensorsPerPart + CountGroups(part));
      }
    }
    // A joint part has a tensor for keys and one for values of each group.
    for (const kvasir::v1::Part& part : layer.joint()) {
      bytes += entry * (kTensorsPerPart + 2 * CountGroups(part));
    }
  }
  return bytes;
}

// Writes tensors that arrive one at a time into files. When a file is full, a
// new one begins.
class ShardSequence {
 public:
  ShardSequence(fs::path folder, int64_t max_bytes, int64_t header_bytes)
      : folder_(std::move(folder)),
        max_bytes_(max_bytes),
        header_bytes_(header_bytes) {}

  absl::Status Begin(const TensorEntry& entry) {
    const int64_t bytes = TensorBytes(entry);
    if (writer_ && writer_->appended_bytes() > 0 &&
        writer_->appended_bytes() + bytes > max_bytes_) {
      KVASIR_RETURN_IF_ERROR(FinishShard());
    }
    if (!writer_) {
      KVASIR_ASSIGN_OR_RETURN(
          SafetensorsWriter writer,
          SafetensorsWriter::CreateOpen(folder_ / TemporaryName(shards_),
                                        header_bytes_));
      writer_ = std::make_unique<SafetensorsWriter>(std::move(writer));
    }
    writer_->Declare(entry);
    shard_of_[entry.name] = shards_;
    total_bytes_ += bytes;
    return absl::OkStatus();
  }

  absl::Status Append(std::span<const std::byte> bytes) {
    return writer_->Append(bytes);
  }

  // Uses the tensor in the base model's file: makes a link to that file in this
  // folder instead of copying the tensor.
  absl::Status Link(const model::TensorStore::Entry& entry) {
    const fs::path file = entry.file->path();
    const std::string link = absl::StrCat("base-", file.filename().string());
    KVASIR_RETURN_IF_ERROR(LinkFile(file, folder_, link));
    linked_[entry.info->name] = link;
    linked_files_[link] = entry.file;
    total_bytes_ += static_cast<int64_t>(entry.info->size_bytes);
    return absl::OkStatus();
  }

  // Gives the files their names, and writes the index if there are several.
  absl::Status Finish() {
    KVASIR_RETURN_IF_ERROR(FinishShard());
    std::error_code error;
    for (int i = 0; i < shards_ && !error; ++i) {
      fs::rename(folder_ / TemporaryName(i), folder_ / FinalName(i), error);
    }
    if (error) {
      return absl::UnavailableError(
          absl::StrCat("cannot give the weight files in ", folder_.string(),
                       " their final names: ", error.message()));
    }
    if (shards_ == 1 && linked_.empty()) return absl::OkStatus();
    nlohmann::ordered_json index;
    index["metadata"] = {{"total_size", total_bytes_}};
    for (const auto& [link, file] : linked_files_) {
      KVASIR_ASSIGN_OR_RETURN(index["metadata"]["linked_files"][link],
                              file->Fingerprint());
    }
    for (const auto& [name, shard] : shard_of_) {
      index["weight_map"][name] = FinalName(shard);
    }
    for (const auto& [name, file] : linked_) index["weight_map"][name] = file;
    return WriteFileAtomically(folder_ / kIndexFile, index.dump(2) + "\n");
  }

 private:
  static std::string TemporaryName(int shard) {
    return absl::StrFormat("weights-%05d", shard + 1);
  }
  std::string FinalName(int shard) const {
    if (shards_ == 1) return kSingleFile;
    return absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1,
                           shards_);
  }

  absl::Status FinishShard() {
    // No file is open if all tensors so far were linked.
    if (!writer_) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(writer_->Finish());
    writer_.reset();
    ++shards_;
    return absl::OkStatus();
  }

  const fs::path folder_;
  const int64_t max_bytes_;
  const int64_t header_bytes_;
  std::unique_ptr<SafetensorsWriter> writer_;
  int shards_ = 0;  // number of finished files
  int64_t total_bytes_ = 0;
  std::map<std::string, int> shard_of_;
  std::map<std::string, std::string> linked_;  // file name by tensor name
  std::map<std::string, const model::TensorFile*> linked_files_;
};

// Checks that all numbers in `piece`, which begins at byte `at` of the tensor,
// are finite. A server refuses to load numbers that are not.
absl::Status CheckFinite(const model::TensorInfo& info, uint64_t at,
                         std::span<std::byte> piece) {
  const at::ScalarType type = ScalarTypeOf(info.type);
  const auto width = static_cast<int64_t>(c10::elementSize(type));
  const at::Tensor numbers = at::from_blob(
      piece.data(), {static_cast<int64_t>(piece.size()) / width}, type);
  const at::Tensor finite = at::isfinite(numbers);
  if (finite.all().item<bool>()) return absl::OkStatus();
  const int64_t found = finite.to(at::kByte).argmin().item<int64_t>();
  const int64_t index = static_cast<int64_t>(at) / width + found;
  const int64_t columns = info.shape.empty() ? 1 : info.shape.back();
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", info.name, ": the number in row ",
                   index / columns, ", column ", index % columns,
                   " must be finite, is ", numbers[found].item<double>()));
}

// Reads a tensor in pieces of the buffer's size and passes each piece to
// `append`.
absl::Status ForPieces(
    const model::TensorStore::Entry& entry, std::vector<std::byte>& buffer,
    bool must_be_finite,
    const std::function<absl::Status(std::span<const std::byte>)>& append) {
  const uint64_t size = entry.info->size_bytes;
  for (uint64_t at = 0; at < size; at += buffer.size()) {
    const std::span<std::byte> piece = std::span(buffer).first(
        static_cast<size_t>(std::min<uint64_t>(buffer.size(), size - at)));
    KVASIR_RETURN_IF_ERROR(entry.file->Read(*entry.info, at, piece));
    entry.file->Release(*entry.info, at, piece.size());
    if (must_be_finite) {
      KVASIR_RETURN_IF_ERROR(CheckFinite(*entry.info, at, piece));
    }
    KVASIR_RETURN_IF_ERROR(append(piece));
  }
  return absl::OkStatus();
}

// Returns the entry of the base model that has this name and exactly these
// numbers, or nullptr if there is none.
absl::StatusOr<const model::TensorStore::Entry*> FindEqual(
    const model::Checkpoint& base, const std::string& name,
    model::TensorType dtype, const at::Tensor& values) {
  const auto found = base.tensors().stored().find(name);
  if (found == base.tensors().stored().end()) return nullptr;
  const model::TensorInfo& info = *found->second.info;
  if (!model::IsWeightType(info.type) || info.type != dtype ||
      values.sizes() != at::IntArrayRef(info.shape)) {
    return nullptr;
  }
  std::vector<std::byte> stored(info.size_bytes);
  KVASIR_RETURN_IF_ERROR(found->second.file->Read(info, 0, stored));
  return std::memcmp(stored.data(), values.data_ptr(), stored.size()) == 0
             ? &found->second
             : nullptr;
}

absl::Status AppendTensor(const model::Checkpoint& base,
                          const ArtifactOptions& options,
                          const std::string& name, const at::Tensor& tensor,
                          model::TensorType dtype, ShardSequence& shards) {
  const model::TensorType stored =
      IsRange(name) ? model::TensorType::kF32 : dtype;
  const at::Tensor values = tensor.to(ScalarTypeOf(stored)).contiguous();
  if (!at::isfinite(values).all().item<bool>()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": a number becomes infinite or NaN when stored as ",
                     std::string(model::TensorTypeName(stored))));
  }
  const model::TensorStore::Entry* equal = nullptr;
  if (options.link_base) {
    KVASIR_ASSIGN_OR_RETURN(equal, FindEqual(base, name, stored, values));
  }
  if (equal != nullptr) return shards.Link(*equal);
  KVASIR_RETURN_IF_ERROR(shards.Begin({name, stored, values.sizes().vec()}));
  return shards.Append({static_cast<const std::byte*>(values.data_ptr()),
                        static_cast<size_t>(values.nbytes())});
}

absl::Status WriteWeights(
    const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
    const ArtifactOptions& options, const fs::path& folder,
    const LayerTensorSource& source,
    const std::function<bool(const ArtifactProgress&)>& on_progress) {
  KVASIR_ASSIGN_OR_RETURN(
      const model::TensorStore::Entry key,
      base.Tensor(model::LayerTensorName(0, "self_attn.k_proj.weight")));
  const model::TensorType dtype = options.dtype.value_or(key.info->type);
  const CopyList copies = ListCopies(base);
  std::vector<std::byte> buffer(kCopyBytes);
  ShardSequence shards(folder, options.max_shard_bytes, HeaderRoom(base, plan));
  const auto take =
      [&](const model::TensorStore::Entry& entry) -> absl::Status {
    const bool is_read = copies.read.contains(&entry);
    if (options.link_base) {
      if (is_read) {
        KVASIR_RETURN_IF_ERROR(
            ForPieces(entry, buffer, is_read,
                      [](const auto&) { return absl::OkStatus(); }));
      }
      return shards.Link(entry);
    }
    KVASIR_RETURN_IF_ERROR(shards.Begin(EntryOf(*entry.info)));
    return ForPieces(
        entry, buffer, is_read,
        [&](std::span<const std::byte> piece) { return shards.Append(piece); });
  };
  for (const model::TensorStore::Entry* entry : copies.outer) {
    KVASIR_RETURN_IF_ERROR(take(*entry));
  }
  ArtifactProgress progress{.total_layers = base.spec().num_layers()};
  for (int64_t layer = 0; layer < progress.total_layers; ++layer) {
    for (const model::TensorStore::Entry* entry :
         copies.layers[static_cast<size_t>(layer)]) {
      KVASIR_RETURN_IF_ERROR(take(*entry));
    }
    KVASIR_ASSIGN_OR_RETURN(const TensorMap tensors, source(layer));
    for (const auto& [name, tensor] : tensors) {
      KVASIR_RETURN_IF_ERROR(AppendTensor(base, options,
                                          model::LayerTensorName(layer, name),
                                          tensor, dtype, shards));
    }
    progress.layers = layer + 1;
    if (!on_progress(progress)) {
      return absl::CancelledError(absl::StrCat(
          "the run was stopped; ", options.out.string(), " was not written"));
    }
  }
  return shards.Finish();
}

// Returns the folders that the writer reads.
std::vector<fs::path> InputsOf(const model::Checkpoint& base,
                               const ArtifactOptions& options) {
  std::vector<fs::path> inputs = {base.folder()};
  if (options.tokenizer) inputs.push_back(*options.tokenizer);
  return inputs;
}

}  // namespace

absl::Status CheckArtifactOutput(const model::Checkpoint& base,
                                 const ArtifactOptions& options) {
  if (base.kv_plan_json().has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(base.folder(), " has a ", kPlanFile,
                     ": it is already compressed; give the checkpoint that it "
                     "was made from"));
  }
  const fs::path& out = options.out;
  // Creates the folder and removes it again, because only this shows whether it
  // can be created.
  KVASIR_ASSIGN_OR_RETURN(
      const std::unique_ptr<NewFolder> trial,
      NewFolder::Create(out, options.overwrite, InputsOf(base, options)));
  std::error_code error;
  const fs::space_info space = fs::space(trial->path(), error);
  const int64_t copied = options.link_base ? 0 : ListCopies(base).bytes;
  if (!error && space.available < static_cast<uint64_t>(copied)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        out.string(), ": the artifact needs at least ", copied,
        " bytes, but only ", space.available, " bytes are free on its disk"));
  }
  return absl::OkStatus();
}

absl::Status WriteArtifact(
    const model::Checkpoint& base, const kvasir::v1::KvPlan& plan,
    const ArtifactOptions& options, const LayerTensorSource& source,
    const std::function<bool(const ArtifactProgress&)>& on_progress) {
  KVASIR_ASSIGN_OR_RETURN(
      const plan::ResolvedPlan resolved,
      plan::ResolvePlan(plan, model::AttentionShapeOf(base.spec())));
  KVASIR_RETURN_IF_ERROR(CheckArtifactOutput(base, options));
  KVASIR_ASSIGN_OR_RETURN(const std::unique_ptr<NewFolder> partial,
                          NewFolder::Create(options.out, options.overwrite,
                                            InputsOf(base, options)));
  const fs::path& folder = partial->path();
  KVASIR_RETURN_IF_ERROR(CopyConfigFiles(base.folder(), folder));
  const fs::path tokenizer = options.tokenizer.value_or(base.folder());
  KVASIR_RETURN_IF_ERROR(options.link_base
                             ? LinkTokenizerFiles(tokenizer, folder)
                             : CopyTokenizerFiles(tokenizer, folder));
  KVASIR_RETURN_IF_ERROR(CatchTorch([&] {
    return WriteWeights(base, plan, options, folder, source, on_progress);
  }));
  KVASIR_RETURN_IF_ERROR(
      WriteFileAtomically(folder / kPlanFile, plan::PlanToJson(plan)));
  if (options.prediction) {
    KVASIR_RETURN_IF_ERROR(
        WriteFileAtomically(folder / kPredictionFile, *options.prediction));
  }
  const absl::StatusOr<model::Checkpoint> written =
      model::Checkpoint::Open(folder.string());
  const absl::Status sound =
      written.ok() ? written->CheckTensors(resolved) : written.status();
  if (!sound.ok()) {
    return absl::InternalError(absl::StrCat(
        "the written checkpoint does not match its plan: ", sound.message()));
  }
  return partial->Keep();
}

}  // namespace kvasir::compress
