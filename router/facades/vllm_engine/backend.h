// State that all calls of the VllmEngine facade share.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "router/facades/calls/backend.h"
#include "router/facades/text/tokenizer_bundle.h"

namespace kvasir::router {

// Threads: any thread; constant except for members that synchronize themselves.
struct VllmEngineBackend : FacadeBackend {
  bool serves_tokenizer() const { return bundle != nullptr && share_tokenizer; }

  // Null: there is no tokenizer.
  std::shared_ptr<TokenizerBundle> bundle;
  // Every client of this listener may fetch it.
  bool share_tokenizer = false;
  absl::Time start;
  // The time of the last Generate; 0: none yet.
  std::atomic<int64_t> last_request_unix_micros{0};
};

}  // namespace kvasir::router
