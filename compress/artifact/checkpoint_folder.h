// Creates the folder of a checkpoint that is made from another checkpoint.
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

// A folder that appears under its final name only when it is complete and on
// the disk. Until Keep is called, it has a temporary name in the same parent
// folder.
// Owns: the temporary folder. It is locked against other runs, and removed
//   unless Keep was called. If a run is killed at any point, the next run
//   recognizes and repairs what the killed run left.
// Threads: one caller.
// Errors: AlreadyExists for a folder that may not be replaced; InvalidArgument
//   for an output that is an input; Unavailable, with the path, if a file
//   cannot be written or another run writes the same folder.
class NewFolder {
 public:
  // If `overwrite` is false, an existing folder is an error. If it is true,
  // a folder is replaced if it is empty or holds a checkpoint. A link, a folder
  // that contains folders, one of `inputs`, and a folder that contains one of
  // `inputs` are never replaced.
  static absl::StatusOr<std::unique_ptr<NewFolder>> Create(
      const std::filesystem::path& out, bool overwrite,
      std::span<const std::filesystem::path> inputs = {});
  // Returns the error that Create would return, to be checked before long work.
  static absl::Status Check(const std::filesystem::path& out, bool overwrite,
                            std::span<const std::filesystem::path> inputs = {});
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  // The temporary folder, into which the caller writes the files.
  const std::filesystem::path& path() const { return path_; }
  // Gives the folder its final name and replaces the folder that had this name.
  // After an error either the old folder is as it was, or the new one has the
  // name and the next run removes what is left of the old one.
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

// CopyConfigFiles copies config.json and generation_config.json; the other
// functions copy or link the tokenizer's files. Files that do not exist are
// skipped.
absl::Status CopyConfigFiles(const std::filesystem::path& from,
                             const std::filesystem::path& to);
absl::Status CopyTokenizerFiles(const std::filesystem::path& from,
                                const std::filesystem::path& to);
absl::Status LinkTokenizerFiles(const std::filesystem::path& from,
                                const std::filesystem::path& to);

// Makes `folder`/`name` a link to `file`, unless the name exists. The link is
// relative, so it still works if both folders are moved together.
absl::Status LinkFile(const std::filesystem::path& file,
                      const std::filesystem::path& folder,
                      const std::string& name);

}  // namespace kvasir::compress
