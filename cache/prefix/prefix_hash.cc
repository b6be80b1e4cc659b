#include "cache/prefix/prefix_hash.h"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/params.h>

#include <vector>

#include "base/check.h"

namespace kvasir::cache {
namespace {

// The first hashed byte distinguishes salts from pages.
constexpr uint8_t kRootDomain = 0;
constexpr uint8_t kPageDomain = 1;

struct FreeMac {
  void operator()(EVP_MAC* mac) const { EVP_MAC_free(mac); }
};
struct FreeMacContext {
  void operator()(EVP_MAC_CTX* context) const { EVP_MAC_CTX_free(context); }
};
using MacContext = std::unique_ptr<EVP_MAC_CTX, FreeMacContext>;

// Hashes the cache id, because the MAC's key has at most 64 bytes, but a cache
// id may have any length.
std::vector<uint8_t> KeyOf(absl::string_view cache_id) {
  std::vector<uint8_t> key(64);
  unsigned int size = 0;
  KVASIR_CHECK(EVP_Digest(cache_id.data(), cache_id.size(), key.data(), &size,
                          EVP_blake2b512(), nullptr) == 1);
  KVASIR_CHECK(size == key.size());
  return key;
}

class Blake2Hasher final : public PrefixHasher {
 public:
  explicit Blake2Hasher(absl::string_view cache_id) {
    const std::unique_ptr<EVP_MAC, FreeMac> mac(
        EVP_MAC_fetch(nullptr, "BLAKE2BMAC", nullptr));
    KVASIR_CHECK(mac != nullptr);
    keyed_.reset(EVP_MAC_CTX_new(mac.get()));
    KVASIR_CHECK(keyed_ != nullptr);
    size_t size = PrefixHash().bytes.size();
    const OSSL_PARAM params[] = {
        OSSL_PARAM_construct_size_t(OSSL_MAC_PARAM_SIZE, &size),
        OSSL_PARAM_construct_end()};
    const std::vector<uint8_t> key = KeyOf(cache_id);
    KVASIR_CHECK(EVP_MAC_init(keyed_.get(), key.data(), key.size(), params) ==
                 1);
  }

  PrefixHash Root(absl::string_view salt) const override {
    const MacContext context = Start(kRootDomain);
    Update(context, salt.data(), salt.size());
    return Finish(context);
  }

  PrefixHash Extend(const PrefixHash& parent,
                    absl::Span<const int32_t> token_ids) const override {
    const MacContext context = Start(kPageDomain);
    Update(context, parent.bytes.data(), parent.bytes.size());
    // Token ids are hashed as little-endian bytes on every machine.
    std::array<uint8_t, 256> buffer;
    size_t used = 0;
    for (int32_t id : token_ids) {
      const auto bits = static_cast<uint32_t>(id);
      for (int shift = 0; shift < 32; shift += 8) {
        buffer[used++] = static_cast<uint8_t>(bits >> shift);
      }
      if (used == buffer.size()) {
        Update(context, buffer.data(), used);
        used = 0;
      }
    }
    Update(context, buffer.data(), used);
    return Finish(context);
  }

 private:
  // Copies the keyed context, so that concurrent calls of const methods share
  // no state.
  MacContext Start(uint8_t domain) const {
    MacContext context(EVP_MAC_CTX_dup(keyed_.get()));
    KVASIR_CHECK(context != nullptr);
    Update(context, &domain, 1);
    return context;
  }

  static void Update(const MacContext& context, const void* data, size_t size) {
    KVASIR_CHECK(EVP_MAC_update(context.get(),
                                static_cast<const unsigned char*>(data),
                                size) == 1);
  }

  static PrefixHash Finish(const MacContext& context) {
    PrefixHash hash;
    size_t size = 0;
    KVASIR_CHECK(EVP_MAC_final(context.get(), hash.bytes.data(), &size,
                               hash.bytes.size()) == 1);
    KVASIR_CHECK(size == hash.bytes.size());
    return hash;
  }

  MacContext keyed_;
};

}  // namespace

std::unique_ptr<PrefixHasher> MakePrefixHasher(absl::string_view cache_id) {
  return std::make_unique<Blake2Hasher>(cache_id);
}

}  // namespace kvasir::cache
