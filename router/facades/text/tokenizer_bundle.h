// Packs the files of a checkpoint's tokenizer into a zip archive. Gateways that
// tokenize prompts themselves download it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace kvasir::router {

struct TokenizerArchive {
  std::string zip;
  // The archive's SHA-256 as hex digits.
  std::string sha256;
};

// The limits of an archive. Known gateways refuse archives that exceed them.
inline constexpr size_t kMaxBundleFiles = 50;
inline constexpr size_t kMaxBundleBytes = 200'000'000;

// Returns an archive of the files in `folder` that a tokenizer needs: tokenizer
// files, chat templates and the two configuration files. The same files always
// give the same archive. NOT_FOUND if the folder has no such files;
// FAILED_PRECONDITION if they exceed the limits.
absl::StatusOr<TokenizerArchive> ArchiveTokenizer(const std::string& folder);

// The contents of files by their names.
using NamedFiles = std::map<std::string, std::string>;
absl::StatusOr<TokenizerArchive> ArchiveFiles(const NamedFiles& files);

// An archive that is created when it is first requested and then kept.
// Threads: Get may be called from any thread. It may read and compress files,
// so do not call it on a thread that has other work to do.
class TokenizerBundle {
 public:
  using MakeFiles = std::function<absl::StatusOr<NamedFiles>()>;

  // If `make_files` is not null, its files are archived instead of those in
  // the folder.
  explicit TokenizerBundle(std::string folder, MakeFiles make_files = nullptr)
      : folder_(std::move(folder)), make_files_(std::move(make_files)) {}

  // Returns the archive. If it cannot be made, returns the error, and the next
  // call tries again.
  absl::StatusOr<std::shared_ptr<const TokenizerArchive>> Get();

 private:
  absl::StatusOr<TokenizerArchive> Make() const;

  const std::string folder_;
  const MakeFiles make_files_;
  base::Mutex mutex_;
  std::shared_ptr<const TokenizerArchive> archive_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
