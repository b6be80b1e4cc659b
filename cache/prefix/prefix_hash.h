// Names prefixes of token sequences by a keyed 128-bit hash over (cache_id,
// salt, parent, token ids), page by page. Routers use the same names to send a
// prompt to the replica that has its pages. Pages are reused only after their
// tokens have been compared.
//
//   root = Root(salt);  h0 = Extend(root, page 0);  h1 = Extend(h0, page 1) ...
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvasir::cache {

// Increase this number whenever a change of the code gives the same inputs
// other hashes. Routers and workers must have the same version.
inline constexpr uint32_t kPrefixHashVersion = 1;

struct PrefixHash {
  std::array<uint8_t, 16> bytes{};

  friend bool operator==(const PrefixHash&, const PrefixHash&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const PrefixHash& hash) {
    return H::combine(std::move(state), hash.bytes);
  }
};

// Threads: const methods may be called from any thread.
class PrefixHasher {
 public:
  virtual ~PrefixHasher() = default;

  // The name of the empty prefix under a tenant's salt.
  virtual PrefixHash Root(absl::string_view salt) const = 0;
  // The name of the tokens of `parent` followed by `token_ids` (a full page).
  virtual PrefixHash Extend(const PrefixHash& parent,
                            absl::Span<const int32_t> token_ids) const = 0;
};

// Makes the hasher that is used in production: BLAKE2b with 128 bits, keyed by
// cache_id. The results are equal on every machine.
std::unique_ptr<PrefixHasher> MakePrefixHasher(absl::string_view cache_id);

}  // namespace kvasir::cache
