// Folders of checkpoints that are made from another checkpoint.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvasir::compress {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kPlanFile[] = "kv_plan.json";
inline constexpr char kPredictionFile[] = "kv_plan.prediction.json";

// A folder that appears under its name only when it is complete and on the
// disk. Until Keep is called, it has a temporary name beside the final one.
// Owns: the temporary folder, locked against other runs and removed unless it
//   is kept. If a run is killed at any point, the next run recognizes and
//   repairs what it left.
// Threads: one.
// Errors: AlreadyExists for a folder that may not be replaced; InvalidArgument
//   for an output that is an input; Unavailable with the path, also while
//   another run writes the same folder.
class NewFolder {
 public:
  // Without `overwrite` an existing folder is refused. With it, only a
  // checkpoint is replaced: no link, no folder that contains folders, and none
  // of `inputs` or a folder that holds one of them.
  static absl::StatusOr<std::unique_ptr<NewFolder>> Create(
      const std::filesystem::path& out, bool overwrite,
      std::span<const std::filesystem::path> inputs = {});
  // Returns whether Create would succeed, to be checked before long work.
  static absl::Status Check(const std::filesystem::path& out, bool overwrite,
                            std::span<const std::filesystem::path> inputs = {});
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  // Where the files are to be written.
  const std::filesystem::path& path() const { return path_; }
  // Gives the folder its name, in place of a folder that has it now. After an
  // error the old folder is as it was, or the error says what could not be
  // cleaned up.
  absl::Status Keep();

 private:
  NewFolder(std::filesystem::path out, std::filesystem::path path,
            bool overwrite, int lock)
      : out_(std::move(out)),
        path_(std::move(path)),
        overwrite_(overwrite),
        lock_(lock) {}

  const std::filesystem::path out_;
  const std::filesystem::path path_;
  const bool overwrite_;
  const int lock_;
  bool kept_ = false;
};

// Copies or links the files that are there beside weights and plan: config.json
// and generation_config.json, and the tokenizer's files.
absl::Status CopyConfigFiles(const std::filesystem::path& from,
                             const std::filesystem::path& to);
absl::Status CopyTokenizerFiles(const std::filesystem::path& from,
                                const std::filesystem::path& to);
absl::Status LinkTokenizerFiles(const std::filesystem::path& from,
                                const std::filesystem::path& to);

// Makes `folder`/`name` a link to a file, unless the name exists. The link is
// relative, so both folders may be moved together.
absl::Status LinkFile(const std::filesystem::path& file,
                      const std::filesystem::path& folder,
                      const std::string& name);

}  // namespace kvasir::compress
