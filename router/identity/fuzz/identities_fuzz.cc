// A libFuzzer target that parses any bytes as an identities file
// (--identities).
#include <cstdint>
#include <string_view>

#include "absl/strings/ascii.h"
#include "base/check.h"
#include "base/fuzz/parser_cost.h"
#include "router/identity/identities.h"

namespace {

constexpr uint64_t kWorkPerByte = 200;

void Parse(std::string_view text) {
  using namespace kvasir::router;
  const auto read =
      Identities::Parse(absl::string_view(text.data(), text.size()), "file");
  if (!read.ok()) {
    KVASIR_CHECK(absl::IsInvalidArgument(read.status()));
    return;
  }
  for (int idx = 0; idx < read->num_tenants(); ++idx) {
    const kvasir::v1::Tenant& tenant = read->tenant(idx);
    KVASIR_CHECK(!tenant.name().empty() && CheckTenantName(tenant.name()).ok());
    KVASIR_CHECK(read->Named(tenant.name()) == idx);
    // In a valid file, every token and every certificate name must identify
    // its tenant.
    for (const auto& token : tenant.tokens()) {
      Credentials credentials{.encrypted = true,
                              .token = Credentials::Token::kGiven};
      credentials.token_sha256 = absl::AsciiStrToLower(token.sha256());
      Identities::Refused refused;
      const auto found =
          read->Find(credentials, absl::InfinitePast(), &refused);
      KVASIR_CHECK(found.ok() && found->tenant_idx == idx);
    }
    for (const auto& name : tenant.certificates()) {
      Credentials credentials{.encrypted = true, .certificate_names = {name}};
      Identities::Refused refused;
      const auto found =
          read->Find(credentials, absl::InfinitePast(), &refused);
      KVASIR_CHECK(found.ok() && found->tenant_idx == idx);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kvasir::base::ParseAtLinearCost(data, size, kWorkPerByte, Parse);
  return 0;
}
