#include "compress/checkpoint_folder.h"

#include <array>
#include <span>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/safetensors_writer.h"

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

// Says that a folder is one of ours, not finished, and may be removed.
constexpr char kMarkerFile[] = "kvasir-compress.unfinished";

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

absl::Status CheckName(const fs::path& out, bool overwrite) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(out, error))) return absl::OkStatus();
  if (!overwrite) {
    return absl::AlreadyExistsError(absl::StrCat(
        out.string(), " exists; --overwrite replaces a checkpoint"));
  }
  const bool ours =
      fs::is_directory(out, error) &&
      (fs::exists(out / kConfigFile, error) || fs::is_empty(out, error));
  if (ours) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      out.string(), " exists and is no checkpoint: it is not replaced"));
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
    const fs::path& out, bool overwrite) {
  const fs::path name = WithoutTrailingSlash(out);
  KVASIR_RETURN_IF_ERROR(CheckName(name, overwrite));
  const fs::path path = name.string() + ".partial";
  std::error_code error;
  if (fs::exists(path, error)) {
    if (!fs::exists(path / kMarkerFile, error)) {
      return absl::AlreadyExistsError(absl::StrCat(
          path.string(), " is in the way, and not of an interrupted run"));
    }
    fs::remove_all(path, error);
  }
  fs::create_directories(path, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("cannot create ", path.string(), ": ", error.message()));
  }
  std::unique_ptr<NewFolder> folder(new NewFolder(name, path));
  KVASIR_RETURN_IF_ERROR(WriteFileAtomically(
      path / kMarkerFile, "A run that was interrupted left this folder.\n"));
  return folder;
}

absl::Status NewFolder::Check(const fs::path& out, bool overwrite) {
  // Whether a folder can be made is found out by making it.
  return Create(out, overwrite).status();
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!kept_) fs::remove_all(path_, ignored);
}

absl::Status NewFolder::Keep() {
  std::error_code error;
  fs::remove(path_ / kMarkerFile, error);
  const fs::path old = path_.string() + ".replaced";
  const bool replaces = fs::exists(out_, error);
  if (replaces) {
    fs::remove_all(old, error);
    fs::rename(out_, old, error);
  }
  if (!error) fs::rename(path_, out_, error);
  if (error) {
    std::error_code ignored;
    if (replaces && !fs::exists(out_, ignored)) fs::rename(old, out_, ignored);
    return absl::UnavailableError(absl::StrCat("cannot rename ", path_.string(),
                                               " to ", out_.string(), ": ",
                                               error.message()));
  }
  kept_ = true;
  fs::remove_all(old, error);
  return absl::OkStatus();
}

absl::Status CopyConfigFiles(const fs::path& from, const fs::path& to) {
  return CopyFiles(from, to, kConfigFiles);
}

absl::Status CopyTokenizerFiles(const fs::path& from, const fs::path& to) {
  return CopyFiles(from, to, kTokenizerFiles);
}

}  // namespace kvasir::compress
