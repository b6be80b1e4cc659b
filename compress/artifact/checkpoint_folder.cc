#include "compress/artifact/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/artifact/new_file.h"

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

// The name of a file that marks a folder as written by this program. A marked
// folder with a temporary name may be removed. A marked folder with its final
// name is complete, but the folder that it replaced must still be removed. The
// marker is locked as long as the run that made it is alive.
constexpr char kMarkerFile[] = "kvasir-compress.unfinished";
constexpr char kMarkerText[] =
    "kvasir-compress writes this folder, or was killed while it did.\n";

constexpr std::array kConfigFiles = {kConfigFile, "generation_config.json"};
constexpr std::array kTokenizerFiles = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "chat_template.jinja",
                                        "tokenizer.model",
                                        "vocab.json",
                                        "merges.txt"};

fs::path WithoutTrailingSlash(const fs::path& path) {
  const fs::path normal = path.lexically_normal();
  return normal.has_filename() ? normal : normal.parent_path();
}

fs::path PartialPath(const fs::path& out) { return out.string() + ".partial"; }

// Returns the temporary name that the old folder gets while it is being
// replaced, on file systems that cannot exchange two names at once.
fs::path ReplacedPath(const fs::path& out) {
  return PartialPath(out).string() + ".replaced";
}

bool Exists(const fs::path& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path, error));
}

// Returns whether the folder holds a config.json and weights, and no
// subfolders. The last condition excludes project folders that happen to have a
// config.json.
bool IsCheckpoint(const fs::path& path) {
  std::error_code error;
  bool config = false;
  bool weights = false;
  for (fs::directory_iterator it(path, error), end; !error && it != end;
       it.increment(error)) {
    if (it->is_directory(error)) return false;
    const fs::path name = it->path().filename();
    config = config || name == kConfigFile;
    weights =
        weights || name == kPlanFile || name.extension() == ".safetensors";
  }
  return !error && config && weights;
}

// Returns whether --overwrite may remove the folder.
bool IsReplaceable(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(fs::symlink_status(path, error)) &&
         (IsCheckpoint(path) || fs::is_empty(path, error));
}

absl::Status CheckName(const fs::path& out, bool overwrite) {
  if (!Exists(out)) return absl::OkStatus();
  if (!overwrite) {
    return absl::AlreadyExistsError(absl::StrCat(
        out.string(),
        " already exists; give --overwrite to replace a checkpoint"));
  }
  if (IsReplaceable(out)) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      out.string(),
      " exists and is not a checkpoint, so --overwrite does not replace it"));
}

// Returns whether `folder` is `path` or contains it.
bool Holds(const fs::path& folder, const fs::path& path) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(path, error);
  const fs::path prefix = fs::weakly_canonical(folder, error);
  return !prefix.empty() &&
         std::mismatch(prefix.begin(), prefix.end(), whole.begin(), whole.end())
                 .first == prefix.end();
}

absl::Status CheckInputs(const fs::path& out,
                         std::span<const fs::path> inputs) {
  std::error_code error;
  for (const fs::path& input : inputs) {
    if (fs::equivalent(out, input, error)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the output ", out.string(),
                       " is an input of this run; choose another folder"));
    }
    if (Holds(out, input)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the output ", out.string(), " holds the input ",
                       input.string(), "; choose another folder"));
    }
  }
  return absl::OkStatus();
}

bool IsMarked(const fs::path& folder) {
  std::error_code error;
  return fs::is_directory(fs::symlink_status(folder, error)) &&
         Exists(folder / kMarkerFile);
}

// Removes a marked folder. The marker is removed last, so that a run that is
// killed in this function leaves a marked folder.
void RemoveMarked(const fs::path& folder) {
  std::error_code ignored;
  for (fs::directory_iterator it(folder, ignored), end; !ignored && it != end;
       it.increment(ignored)) {
    std::error_code kept;
    if (it->path().filename() != kMarkerFile) fs::remove_all(it->path(), kept);
  }
  fs::remove_all(folder, ignored);
}

absl::Status InTheWay(const fs::path& path) {
  return absl::AlreadyExistsError(absl::StrCat(
      path.string(),
      " already exists, but this name is needed for a temporary folder, and "
      "no interrupted run left it: rename or remove it"));
}

absl::Status RenameError(const fs::path& from, const fs::path& to,
                         const std::error_code& error) {
  return absl::UnavailableError(absl::StrCat("cannot rename ", from.string(),
                                             " to ", to.string(), ": ",
                                             error.message()));
}

// Locks the marker files of folders. The locks are held until the object is
// destroyed.
class MarkerLocks {
 public:
  MarkerLocks() = default;
  ~MarkerLocks() {
    for (const int lock : locks_) ::close(lock);
  }
  MarkerLocks(const MarkerLocks&) = delete;
  MarkerLocks& operator=(const MarkerLocks&) = delete;

  // Locks the folder's marker file, which is created if there is none. Returns
  // Unavailable if another run holds the lock.
  absl::Status Add(const fs::path& folder) {
    KVASIR_ASSIGN_OR_RETURN(const int lock, OpenLocked(folder / kMarkerFile));
    locks_.push_back(lock);
    return absl::OkStatus();
  }

 private:
  std::vector<int> locks_;
};

// Repairs what a killed run has left at `out` and under the two temporary names
// beside it.
absl::Status CleanUp(const fs::path& out) {
  const fs::path partial = PartialPath(out);
  const fs::path replaced = ReplacedPath(out);
  MarkerLocks locks;
  for (const fs::path& folder : {out, partial, replaced}) {
    if (IsMarked(folder)) KVASIR_RETURN_IF_ERROR(locks.Add(folder));
  }
  std::error_code error;
  // A run was killed between the two renames of Replace, so the old folder gets
  // its name back.
  if (!Exists(out) && IsReplaceable(replaced)) {
    fs::rename(replaced, out, error);
    if (error) return RenameError(replaced, out, error);
  }
  const bool complete = IsMarked(out);
  for (const fs::path& left : {partial, replaced}) {
    if (IsMarked(left)) {
      RemoveMarked(left);
    } else if (complete && IsReplaceable(left)) {
      fs::remove_all(left, error);
    }
    if (Exists(left)) return InTheWay(left);
  }
  if (complete) fs::remove(out / kMarkerFile, error);
  return absl::OkStatus();
}

// Renames `path` to `out`. A folder that was at `out` before gets another name,
// which is returned.
absl::StatusOr<fs::path> Replace(const fs::path& path, const fs::path& out) {
  std::error_code error;
  if (::renameat2(AT_FDCWD, path.c_str(), AT_FDCWD, out.c_str(),
                  RENAME_EXCHANGE) == 0) {
    return path;
  }
  const int reason = errno;
  if (reason != EINVAL && reason != ENOSYS && reason != ENOTSUP) {
    return RenameError(path, out, {reason, std::generic_category()});
  }
  // The file system cannot exchange names, so there are two renames. If the run
  // is killed between them, the next run undoes the first.
  const fs::path old = ReplacedPath(out);
  fs::rename(out, old, error);
  if (error) return RenameError(out, old, error);
  fs::rename(path, out, error);
  if (error) {
    std::error_code ignored;
    fs::rename(old, out, ignored);
    return RenameError(path, out, error);
  }
  return old;
}

// Waits until all files of the folder and their names are on the disk,
// including files that the caller wrote.
absl::Status SyncFolder(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    KVASIR_RETURN_IF_ERROR(SyncToDisk(it->path()));
  }
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot list ", folder.string(), ": ", error.message()));
  }
  return SyncToDisk(folder);
}

fs::path ParentOf(const fs::path& path) {
  const fs::path parent = path.parent_path();
  return parent.empty() ? fs::path(".") : parent;
}

absl::Status CopyFiles(const fs::path& from, const fs::path& to,
                       std::span<const char* const> names) {
  std::error_code error;
  for (const char* name : names) {
    if (!fs::exists(from / name, error)) continue;
    fs::copy_file(from / name, to / name, fs::copy_options::overwrite_existing,
                  error);
    if (error) {
      return absl::UnavailableError(
          absl::StrCat("cannot copy ", (from / name).string(), " to ",
                       to.string(), ": ", error.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<NewFolder>> NewFolder::Create(
    const fs::path& out, bool overwrite, std::span<const fs::path> inputs) {
  const fs::path name = WithoutTrailingSlash(out);
  KVASIR_RETURN_IF_ERROR(CheckInputs(name, inputs));
  KVASIR_RETURN_IF_ERROR(CleanUp(name));
  KVASIR_RETURN_IF_ERROR(CheckName(name, overwrite));
  const fs::path path = PartialPath(name);
  std::error_code error;
  fs::create_directories(ParentOf(path), error);
  const bool made = !error && fs::create_directory(path, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot create ", path.string(), ": ", error.message()));
  }
  // Another run created the folder in the meantime.
  if (!made) return InTheWay(path);
  const absl::StatusOr<int> lock = OpenLocked(path / kMarkerFile);
  if (!lock.ok()) {
    fs::remove(path, error);
    return lock.status();
  }
  std::unique_ptr<NewFolder> folder(
      new NewFolder(name, path, overwrite, *lock));
  if (::write(*lock, kMarkerText, sizeof(kMarkerText) - 1) < 0) {
    const std::error_code reason(errno, std::generic_category());
    return absl::UnavailableError(absl::StrCat(
        "cannot write in ", path.string(), ": ", reason.message()));
  }
  return folder;
}

absl::Status NewFolder::Check(const fs::path& out, bool overwrite,
                              std::span<const fs::path> inputs) {
  // Creates the folder and removes it again, because only this shows whether it
  // can be created.
  return Create(out, overwrite, inputs).status();
}

NewFolder::~NewFolder() {
  if (!kept_) RemoveMarked(path_);
  ::close(lock_);
}

absl::Status NewFolder::Keep() {
  // A folder that appeared at `out_` after Create is also replaced only if
  // `overwrite_` allows it.
  KVASIR_RETURN_IF_ERROR(CheckName(out_, overwrite_));
  KVASIR_RETURN_IF_ERROR(SyncFolder(path_));
  fs::path old;
  std::error_code error;
  if (Exists(out_)) {
    KVASIR_ASSIGN_OR_RETURN(old, Replace(path_, out_));
  } else {
    fs::rename(path_, out_, error);
    if (error) return RenameError(path_, out_, error);
  }
  kept_ = true;
  KVASIR_RETURN_IF_ERROR(SyncToDisk(ParentOf(out_)));
  // The new folder is complete now. If the run is killed below, the next run
  // removes what remains of the old one.
  if (!old.empty()) {
    MarkerLocks locks;
    KVASIR_RETURN_IF_ERROR(locks.Add(old));
    RemoveMarked(old);
  }
  fs::remove(out_ / kMarkerFile, error);
  return absl::OkStatus();
}

absl::Status CopyConfigFiles(const fs::path& from, const fs::path& to) {
  return CopyFiles(from, to, kConfigFiles);
}

absl::Status CopyTokenizerFiles(const fs::path& from, const fs::path& to) {
  return CopyFiles(from, to, kTokenizerFiles);
}

absl::Status LinkTokenizerFiles(const fs::path& from, const fs::path& to) {
  std::error_code error;
  for (const char* name : kTokenizerFiles) {
    if (!fs::exists(from / name, error)) continue;
    KVASIR_RETURN_IF_ERROR(LinkFile(from / name, to, name));
  }
  return absl::OkStatus();
}

absl::Status LinkFile(const fs::path& file, const fs::path& folder,
                      const std::string& name) {
  const fs::path link = folder / name;
  if (Exists(link)) return absl::OkStatus();
  std::error_code error;
  const fs::path target = fs::canonical(file, error);
  const fs::path here = error ? fs::path() : fs::canonical(folder, error);
  if (!error) {
    fs::create_symlink(target.lexically_relative(here), link, error);
  }
  if (!error) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot make ", link.string(),
                                             " a link to ", file.string(), ": ",
                                             error.message()));
}

}  // namespace kvasir::compress
