#include "model/known_models.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "model/shapes/shapes.h"

namespace kvasir::cli {
namespace {

// The names that `models/fetch --list` prints.
constexpr const char* kKnownModels[] = {"smollm2"};

bool IsKnown(std::string_view text) {
  return std::find(std::begin(kKnownModels), std::end(kKnownModels), text) !=
         std::end(kKnownModels);
}

// True if `text` has only characters of model names, so it is not a path.
bool IsName(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.';
         });
}

bool IsFolder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(path, error);
}

}  // namespace

const char kOrKnownModel[] =
    ", or smollm2 after models/fetch has downloaded it; a "
    "folder with that name in the working directory is "
    "preferred";

std::string CacheFolder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return absl::StrCat(cache, "/kvasir");
  const char* home = std::getenv("HOME");
  return home == nullptr ? "" : absl::StrCat(home, "/.cache/kvasir");
}

absl::StatusOr<std::string> FindModel(const std::string& text) {
  if (IsFolder(text)) return text;
  if (!IsKnown(text)) {
    // If the path is wrong, opening the model reports the error.
    std::error_code error;
    if (!IsName(text) || std::filesystem::exists(text, error)) return text;
    return absl::NotFoundError(
        absl::StrCat("there is no folder '", text,
                     "' in the working directory and no known model with this "
                     "name; the known models are ",
                     absl::StrJoin(kKnownModels, ", ")));
  }
  const std::string cache = CacheFolder();
  if (cache.empty()) {
    return absl::NotFoundError(absl::StrCat(
        text,
        " must be in kvasir's cache folder, but neither XDG_CACHE_HOME "
        "nor HOME is set, so there is no cache folder"));
  }
  const std::string folder = absl::StrCat(cache, "/models/", text);
  if (IsFolder(folder)) return folder;
  return absl::NotFoundError(
      absl::StrCat(text, " was not downloaded: there is no folder ", folder,
                   "; run models/fetch ", text,
                   " (known models: ", absl::StrJoin(kKnownModels, ", "), ")"));
}

CLI::Validator ModelName(const CLI::App* command, OtherNames others) {
  return CLI::Validator(
      [command, others](std::string& text) {
        // Environment variables KVASIR_... set flags of all commands. A wrong
        // value must not cause an error in a command that is not run.
        if (!command->parsed()) return std::string();
        if (others == OtherNames::kAllowed && !IsKnown(text)) {
          return std::string();
        }
        const absl::StatusOr<std::string> folder = FindModel(text);
        if (folder.ok()) text = *folder;
        return std::string(folder.status().message());
      },
      "", "");
}

CLI::Validator ShapeName() {
  return Checked(
      [](const std::string& name) { return model::FindShape(name).status(); });
}

}  // namespace kvasir::cli
