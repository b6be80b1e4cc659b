// The file of --identities: parses and checks it, and finds callers in it.
// Constant once it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/identity.pb.h"
#include "router/identity/credentials.h"

namespace kvasir::router {

// Limits of the file: every call's token is compared with all of its tokens.
inline constexpr size_t kMaxIdentitiesBytes = 1 << 20;
inline constexpr int kMaxTenants = 1024;
inline constexpr size_t kMaxTokens = 4096;
inline constexpr int kMaxCertificatesOfTenant = 64;

// Why a caller was refused. CallerRefusalName gives the label values.
enum class CallerRefusal {
  kNoCredentials,
  kMalformed,  // metadata 'authorization'
  kNoTls,      // a token without TLS
  kUnknown,    // token
  kExpired,    // token
  kDisagree,   // certificate and token, or two names of a certificate
  kTenant,     // metadata 'x-tenant-id': not allowed, or not a name
  kRole,       // the tenant does not have the required role
  kRate,       // from here on: quotas
  kConcurrency,
  kBytes,     // held by running requests; there is room later
  kTooLarge,  // more bytes than the quota allows at all
};
inline constexpr CallerRefusal kCallerRefusals[] = {
    CallerRefusal::kNoCredentials, CallerRefusal::kMalformed,
    CallerRefusal::kNoTls,         CallerRefusal::kUnknown,
    CallerRefusal::kExpired,       CallerRefusal::kDisagree,
    CallerRefusal::kTenant,        CallerRefusal::kRole,
    CallerRefusal::kRate,          CallerRefusal::kConcurrency,
    CallerRefusal::kBytes,         CallerRefusal::kTooLarge};
const char* CallerRefusalName(CallerRefusal refusal);

// INVALID_ARGUMENT, without the value, unless it is a tenant's name: at most
// 128 letters, digits and -_.:@/.
absl::Status CheckTenantName(absl::string_view name);

// INVALID_ARGUMENT unless it is a token's label: 1 to 64 of the same
// characters.
absl::Status CheckTokenLabel(absl::string_view label);

// How the listeners can identify callers.
struct ListenerProof {
  bool tls = false;
  // The clients' port, and the admin port, ask for certificates and verify
  // them.
  bool client_certificates = false;
  bool admin_certificates = false;
  // The admin port accepts only callers with the role ADMIN.
  bool admin_asks = false;
};

// Threads: any thread; constant.
class Identities {
 public:
  // INVALID_ARGUMENT if the text is not JSON of the message, has an unknown
  // field, exceeds a limit, or has an entry that is meaningless or contradicts
  // another. The error begins with `name`, the file; it names entry and field,
  // and contains no token and no hash.
  static absl::StatusOr<Identities> Parse(absl::string_view text,
                                          absl::string_view name);

  // FAILED_PRECONDITION if no caller could be accepted: the file has none; the
  // listeners never see what it lists (tokens without TLS, or certificates at a
  // port that does not ask for them); or the admin port requires ADMIN, which
  // no tenant has. The text names the ways out. Only for a start: later a file
  // that removes a caller must be used, whatever is left.
  absl::Status CheckListener(const ListenerProof& proof,
                             absl::string_view name) const;

  struct Found {
    // Index of Identities.tenants; -1: anonymous.
    int tenant_idx = 0;
    // The token's label, or the certificate's name; empty for anonymous
    // callers.
    std::string label;
  };
  struct Refused {
    CallerRefusal why = CallerRefusal::kNoCredentials;
    // The caller if it is known although it is refused: its token has expired,
    // its certificate and token disagree (then the certificate's tenant), or
    // its token is wrong and its certificate is known.
    std::optional<Found> known;
  };
  // UNAUTHENTICATED, and `*refused`, for a refused caller. The text says what
  // is wanted, without any value.
  absl::StatusOr<Found> Find(const Credentials& credentials, absl::Time now,
                             Refused* refused) const;

  // The tenant with this index of Found; negative: the anonymous tenant.
  const kvasir::v1::Tenant& tenant(int idx) const {
    return idx < 0 ? file_.anonymous() : file_.tenants(idx);
  }
  // nullopt: no tenant of that name is listed.
  std::optional<int> Named(const std::string& tenant) const;
  int num_tenants() const { return file_.tenants_size(); }
  bool has_anonymous() const { return file_.has_anonymous(); }

 private:
  struct TokenOwner {
    int tenant_idx = 0;
    std::string label;
    absl::Time not_after;
  };

  absl::Status Read();
  absl::Status ReadTenant(int idx);
  absl::Status ReadToken(int idx, const kvasir::v1::Token& token,
                         const std::string& at);
  absl::Status ReadCertificate(int idx, const std::string& certificate,
                               const std::string& at);
  absl::Status CheckProof(const kvasir::v1::Tenant& tenant,
                          const ListenerProof& proof,
                          absl::string_view name) const;
  // The tenant of all names of a certificate; nullopt: none is listed.
  absl::StatusOr<std::optional<Found>> FindCertificate(
      const std::vector<std::string>& names, Refused* refused) const;
  // The kinds of credentials that are accepted, as a text.
  std::string Wanted() const;

  kvasir::v1::Identities file_;
  // The tokens' hashes, parallel to their owners.
  std::vector<std::string> hashes_;
  std::vector<TokenOwner> owners_;
  std::map<std::string, int> by_certificate_;
  std::map<std::string, int> by_name_;
};

// Compares two texts for equality.
using Equal = std::function<bool(std::string_view, std::string_view)>;
// Returns the index of the entry of `hashes` that equals `hash`, or nullopt.
// Calls `equal` for every entry, so that the time does not depend on the
// result.
std::optional<size_t> FindHash(const std::vector<std::string>& hashes,
                               const std::string& hash, const Equal& equal);

bool HasRole(const kvasir::v1::Tenant& tenant, kvasir::v1::Role role);

}  // namespace kvasir::router
