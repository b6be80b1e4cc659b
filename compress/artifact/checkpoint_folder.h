// Folders of checkpoints that are made from another one.
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

// A folder that appears under its name when it is complete and on the disk, and
// not before: until Keep it has a temporary name beside it.
// Owns: the temporary folder, locked against other runs; one that is not kept
//   is removed. What a killed run has left, at any point, is recognized and put
//   right by the next.
// Threads: one.
// Errors: AlreadyExists for what is not to be replaced; InvalidArgument for an
//   output that is an input; Unavailable with the path, also while another run
//   writes the same folder.
class NewFolder {
 public:
  // Without `overwrite` a folder that exists is refused; with it a checkpoint
  // is replaced, and nothing else: no link, no folder with folders in it, and
  // none that is one of `inputs` or holds one.
  static absl::StatusOr<std::unique_ptr<NewFolder>> Create(
      const std::filesystem::path& out, bool overwrite,
      std::span<const std::filesystem::path> inputs = {});
  // Whether Create would work, for before long work.
  static absl::Status Check(const std::filesystem::path& out, bool overwrite,
                            std::span<const std::filesystem::path> inputs = {});
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  // Where to write.
  const std::filesystem::path& path() const { return path_; }
  // Gives the folder its name, in place of what has it now. An error leaves
  // that as it was, or says what could not be cleaned up.
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

// What a checkpoint's folder has beside weights and plan, as far as it is
// there: config.json and generation_config.json; files of the tokenizer.
absl::Status CopyConfigFiles(const std::filesystem::path& from,
                             const std::filesystem::path& to);
absl::Status CopyTokenizerFiles(const std::filesystem::path& from,
                                const std::filesystem::path& to);
absl::Status LinkTokenizerFiles(const std::filesystem::path& from,
                                const std::filesystem::path& to);

// Makes `folder`/`name` a link to a file, or leaves the one that is there.
// Relative, so that both folders may be moved together.
absl::Status LinkFile(const std::filesystem::path& file,
                      const std::filesystem::path& folder,
                      const std::string& name);

}  // namespace kvasir::compress
