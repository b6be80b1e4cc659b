// Models that a command's flags take by a name: those that models/fetch gets
// and keeps in the user's cache.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/cli/flags.h"

namespace kvasir::cli {

// Where this user's programs keep what can be made again:
// $XDG_CACHE_HOME/kvasir, else ~/.cache/kvasir. Empty where the environment
// names neither.
std::string CacheFolder();

// The folder of the model that `text` names. A folder that is called so, a path
// and any text that is no name are themselves; the name of a known model is its
// folder in the cache. NOT_FOUND for a known model that is not there, and for a
// name of neither: both say what to do and which names are known.
absl::StatusOr<std::string> FindModel(const std::string& text);

// Turns the names of known models into their folders, for ->transform() of a
// flag of `command`. Wrong usage where FindModel refuses; with kAllowed, names
// of neither folder nor model are somebody else's.
enum class OtherNames { kRefused, kAllowed };
CLI::Validator ModelName(const CLI::App* command,
                         OtherNames others = OtherNames::kRefused);

// A flag whose value, or values, are folders of models.
template <typename T>
CLI::Option* AddModelFlag(CLI::App* app, const std::string& name, T& value,
                          const std::string& help) {
  return AddFlag(app, name, value, help)
      ->transform(ModelName(app))
      ->type_name("DIR");
}

// Wrong usage for names that no shape has.
CLI::Validator ShapeName();

// For the help of a --model: "folder of a checkpoint" and this.
extern const char kOrKnownModel[];

}  // namespace kvasir::cli
