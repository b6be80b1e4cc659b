// The state that all calls of the VllmEngine facade share.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "router/facades/calls/backend.h"
#include "router/facades/text/tokenizer_bundle.h"

namespace kvasir::router {

// State that all calls of the VllmEngine facade share.
// Threads: any thread may use it, because its members are constant or
// protect themselves.
struct VllmEngineBackend : FacadeBackend {
  bool serves_tokenizer() const { return bundle != nullptr && share_tokenizer; }

  // The tokenizer's files; null if there is no tokenizer.
  std::shared_ptr<TokenizerBundle> bundle;
  // If true, every client of this server may download the tokenizer's files.
  bool share_tokenizer = false;
  absl::Time start;
  // The time of the last Generate call; 0 if there has been none.
  std::atomic<int64_t> last_request_unix_micros{0};
};

}  // namespace kvasir::router
