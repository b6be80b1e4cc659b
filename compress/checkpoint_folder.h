// Folders of checkpoints that are made from another one.
#pragma once

#include <filesystem>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kPlanFile[] = "kv_plan.json";

// A folder that appears under its name when it is complete, and not before:
// until Keep it has a temporary name beside it.
// Owns: the temporary folder; one that is not kept is removed. What an
//   interrupted run has left is recognized and removed by the next.
// Threads: one.
// Errors: AlreadyExists for what is not to be replaced; Unavailable with the
//   path.
class NewFolder {
 public:
  // Without `overwrite` a folder that exists is refused; with it a checkpoint
  // is replaced, and nothing else.
  static absl::StatusOr<std::unique_ptr<NewFolder>> Create(
      const std::filesystem::path& out, bool overwrite);
  // Whether Create would work, for before long work.
  static absl::Status Check(const std::filesystem::path& out, bool overwrite);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  // Where to write.
  const std::filesystem::path& path() const { return path_; }
  // Gives the folder its name, in place of what has it now.
  absl::Status Keep();

 private:
  NewFolder(std::filesystem::path out, std::filesystem::path path)
      : out_(std::move(out)), path_(std::move(path)) {}

  const std::filesystem::path out_;
  const std::filesystem::path path_;
  bool kept_ = false;
};

// What a checkpoint's folder has beside weights and plan, as far as it is
// there: config.json and generation_config.json; files of the tokenizer.
absl::Status CopyConfigFiles(const std::filesystem::path& from,
                             const std::filesystem::path& to);
absl::Status CopyTokenizerFiles(const std::filesystem::path& from,
                                const std::filesystem::path& to);

}  // namespace kvasir::compress
