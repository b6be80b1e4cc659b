#include "router/facades/text/tokenizer_bundle.h"

#include <archive.h>
#include <archive_entry.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_macros.h"

namespace kvasir::router {
namespace {

namespace fs = std::filesystem;

bool BelongsToTokenizer(std::string_view name) {
  static constexpr std::array<std::string_view, 8> kNames = {
      "tokenizer.json",
      "tokenizer_config.json",
      "config.json",
      "generation_config.json",
      "special_tokens_map.json",
      "added_tokens.json",
      "vocab.json",
      "merges.txt"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
         name == "tokenizer.model" || name.starts_with("chat_template") ||
         name.ends_with(".jinja") || name.ends_with(".tiktoken");
}

// Returns the sorted paths of the tokenizer's files. A symbolic link to a file
// counts as a file.
absl::StatusOr<std::vector<fs::path>> TokenizerFiles(
    const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  size_t bytes = 0;
  for (fs::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code skip;
    if (!BelongsToTokenizer(it->path().filename().string()) ||
        !it->is_regular_file(skip)) {
      continue;
    }
    const auto size = it->file_size(skip);
    if (!skip) bytes += size;
    files.push_back(it->path());
  }
  if (error) {
    return absl::NotFoundError(absl::StrCat(folder, ": ", error.message()));
  }
  if (files.empty()) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": the folder has no tokenizer file"));
  }
  if (files.size() > kMaxBundleFiles || bytes > kMaxBundleBytes) {
    return absl::FailedPreconditionError(absl::StrCat(
        folder, ": want at most ", kMaxBundleFiles, " tokenizer files of ",
        kMaxBundleBytes, " bytes together, have ", files.size(), " files of ",
        bytes, " bytes"));
  }
  std::sort(files.begin(), files.end());
  return files;
}

absl::StatusOr<std::string> ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)),
                    std::istreambuf_iterator<char>());
  if (!file) {
    return absl::UnavailableError(
        absl::StrCat(path.string(), ": cannot be read"));
  }
  return bytes;
}

la_ssize_t AppendTo(archive*, void* zip, const void* bytes, size_t size) {
  static_cast<std::string*>(zip)->append(static_cast<const char*>(bytes), size);
  return static_cast<la_ssize_t>(size);
}

// Writes a zip archive into memory.
class ZipWriter {
 public:
  ZipWriter() : archive_(archive_write_new(), &archive_write_free) {
    archive_write_set_format_zip(archive_.get());
    archive_write_set_bytes_in_last_block(archive_.get(), 1);  // no padding
    archive_write_open(archive_.get(), &zip_, nullptr, &AppendTo, nullptr);
  }

  absl::Status Add(const std::string& name, const std::string& bytes) {
    const std::unique_ptr<archive_entry, decltype(&archive_entry_free)> entry(
        archive_entry_new(), &archive_entry_free);
    archive_entry_set_pathname(entry.get(), name.c_str());
    archive_entry_set_size(entry.get(), static_cast<la_int64_t>(bytes.size()));
    archive_entry_set_filetype(entry.get(), AE_IFREG);
    archive_entry_set_perm(entry.get(), 0644);
    // Set the modification time to 0, so that the same files always give the
    // same archive.
    archive_entry_set_mtime(entry.get(), 0, 0);
    if (archive_write_header(archive_.get(), entry.get()) != ARCHIVE_OK ||
        archive_write_data(archive_.get(), bytes.data(), bytes.size()) !=
            static_cast<la_ssize_t>(bytes.size())) {
      return Error(name);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Finish() {
    if (archive_write_close(archive_.get()) != ARCHIVE_OK) return Error("end");
    return std::move(zip_);
  }

 private:
  absl::Status Error(const std::string& where) const {
    const char* text = archive_error_string(archive_.get());
    return absl::InternalError(
        absl::StrCat("writing the archive of the tokenizer's files failed at ",
                     where, ": ", text ? text : "unknown cause"));
  }

  std::string zip_;
  const std::unique_ptr<archive, decltype(&archive_write_free)> archive_;
};

}  // namespace

absl::StatusOr<TokenizerArchive> ArchiveFiles(const NamedFiles& files) {
  ZipWriter writer;
  for (const auto& [name, bytes] : files) {
    KVASIR_RETURN_IF_ERROR(writer.Add(name, bytes));
  }
  TokenizerArchive made;
  KVASIR_ASSIGN_OR_RETURN(made.zip, writer.Finish());
  made.sha256 = base::Sha256Hex(made.zip);
  return made;
}

absl::StatusOr<TokenizerArchive> ArchiveTokenizer(const std::string& folder) {
  KVASIR_ASSIGN_OR_RETURN(const std::vector<fs::path> files,
                          TokenizerFiles(folder));
  NamedFiles contents;
  for (const fs::path& file : files) {
    KVASIR_ASSIGN_OR_RETURN(contents[file.filename().string()], ReadFile(file));
  }
  return ArchiveFiles(contents);
}

absl::StatusOr<TokenizerArchive> TokenizerBundle::Make() const {
  if (make_files_ == nullptr) return ArchiveTokenizer(folder_);
  KVASIR_ASSIGN_OR_RETURN(const NamedFiles files, make_files_());
  return ArchiveFiles(files);
}

absl::StatusOr<std::shared_ptr<const TokenizerArchive>> TokenizerBundle::Get() {
  base::MutexLock lock(&mutex_);
  if (archive_ == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(TokenizerArchive made, Make());
    archive_ = std::make_shared<const TokenizerArchive>(std::move(made));
  }
  return archive_;
}

}  // namespace kvasir::router
