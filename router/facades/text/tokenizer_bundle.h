// The files of a checkpoint that its tokenizer is made of, as one zip archive:
// for gateways that tokenize by themselves.
#pragma once

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace kvasir::router {

struct TokenizerArchive {
  std::string zip;
  // In hex.
  std::string sha256;
};

// What the gateways that ask for it take at most.
inline constexpr size_t kMaxBundleFiles = 50;
inline constexpr size_t kMaxBundleBytes = 200'000'000;

// Tokenizer files, chat templates and the two configurations beside them, never
// weights. The same files give the same bytes. NOT_FOUND for a folder without
// any; FAILED_PRECONDITION above the limits.
absl::StatusOr<TokenizerArchive> ArchiveTokenizer(const std::string& folder);

// Made once, when it is first asked for.
// Threads: any thread; reads and compresses, so none that others wait for.
class TokenizerBundle {
 public:
  explicit TokenizerBundle(std::string folder) : folder_(std::move(folder)) {}

  // ArchiveTokenizer's errors, which are not kept.
  absl::StatusOr<std::shared_ptr<const TokenizerArchive>> Get();

 private:
  const std::string folder_;
  base::Mutex mutex_;
  std::shared_ptr<const TokenizerArchive> archive_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvasir::router
