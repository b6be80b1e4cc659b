// Models that flags accept by a name: models/fetch downloads them into the
// user's cache.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/cli/flags.h"

namespace kvasir::cli {

// The folder for this user's data that can be made again:
// $XDG_CACHE_HOME/kvasir, else ~/.cache/kvasir. Empty if the environment names
// neither.
std::string CacheFolder();

// The folder of the model that `text` names. An existing folder, a path and any
// text that cannot be a name are returned unchanged; the name of a known model
// gives its folder in the cache. NOT_FOUND for a known model that was not
// downloaded and for an unknown name; the error says what to do and lists the
// known names.
absl::StatusOr<std::string> FindModel(const std::string& text);

// Replaces the names of known models by their folders, for ->transform() of a
// flag of `command`. An error of FindModel is wrong usage; with kAllowed, other
// names are kept unchanged.
enum class OtherNames { kRefused, kAllowed };
CLI::Validator ModelName(const CLI::App* command,
                         OtherNames others = OtherNames::kRefused);

// Adds a flag whose value or values are folders of models.
template <typename T>
CLI::Option* AddModelFlag(CLI::App* app, const std::string& name, T& value,
                          const std::string& help) {
  return AddFlag(app, name, value, help)
      ->transform(ModelName(app))
      ->type_name("DIR");
}

// Names of unknown shapes are wrong usage.
CLI::Validator ShapeName();

// Follows "folder of a checkpoint" in the help of --model.
extern const char kOrKnownModel[];

}  // namespace kvasir::cli
