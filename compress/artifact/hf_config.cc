#include "compress/artifact/hf_config.h"

#include <array>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/artifact/new_file.h"
#include "model/shapes/shape_config.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

const char* TorchDtypeName(model::TensorType dtype) {
  switch (dtype) {
    case model::TensorType::kF32:
      return "float32";
    case model::TensorType::kF16:
      return "float16";
    default:
      return "bfloat16";
  }
}

}  // namespace

absl::Status WriteHfConfig(const std::filesystem::path& folder,
                           const model::ModelShape& shape,
                           model::TensorType dtype) {
  nlohmann::ordered_json generation;
  generation["bos_token_id"] = shape.bos_token_id;
  generation["eos_token_id"] = shape.eos_token_id;
  KVASIR_RETURN_IF_ERROR(WriteFileAtomically(
      folder / "config.json",
      model::ConfigJsonOfShape(shape, TorchDtypeName(dtype))));
  return WriteFileAtomically(folder / "generation_config.json",
                             generation.dump(2) + "\n");
}

absl::Status CopyTokenizer(const std::filesystem::path& from,
                           const std::filesystem::path& to) {
  constexpr std::array kFiles = {"tokenizer.json", "tokenizer_config.json",
                                 "special_tokens_map.json",
                                 "added_tokens.json"};
  std::error_code error;
  if (!std::filesystem::exists(from / kFiles[0], error)) {
    return absl::NotFoundError(
        absl::StrCat("no tokenizer.json in ", from.string()));
  }
  std::filesystem::create_directories(to, error);
  if (std::filesystem::equivalent(from, to, error)) return absl::OkStatus();
  for (const char* file : kFiles) {
    if (!std::filesystem::exists(from / file, error)) continue;
    std::filesystem::copy_file(
        from / file, to / file,
        std::filesystem::copy_options::overwrite_existing, error);
    if (error) {
      return absl::UnavailableError(
          absl::StrCat("cannot copy ", (from / file).string(), " to ",
                       to.string(), ": ", error.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::compress
