// Resolves the names of known models, which models/fetch downloads into the
// user's cache.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "base/cli/flags.h"

namespace kvasir::cli {

// The folder for the user's cached data: $XDG_CACHE_HOME/kvasir, or
// ~/.cache/kvasir if that variable is unset. Empty if HOME is unset as well.
std::string CacheFolder();

// Returns the folder of a known model in the cache if `text` is its name. If
// `text` is an existing folder, a path, or cannot be a name, it is returned
// unchanged. NOT_FOUND if the known model was not downloaded or the name is
// unknown; the error says what to do and lists the known names.
absl::StatusOr<std::string> FindModel(const std::string& text);

// A CLI11 transform for a flag of `command`: replaces the name of a known model
// by its folder. An error of FindModel is reported as wrong usage. With
// kAllowed, unknown names are kept unchanged.
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

// A CLI11 check that accepts only the names of known model shapes.
CLI::Validator ShapeName();

// The help text of --model continues with this after "folder of a checkpoint".
extern const char kOrKnownModel[];

}  // namespace kvasir::cli
