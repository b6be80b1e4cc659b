// The parsed file of --identities: parses the file, checks it, and finds
// callers in it.
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

// Limits of the file. The number of tokens is limited because each call's token
// is compared with all of them.
inline constexpr size_t kMaxIdentitiesBytes = 1 << 20;
inline constexpr int kMaxTenants = 1024;
inline constexpr size_t kMaxTokens = 4096;
inline constexpr int kMaxCertificatesOfTenant = 64;

// Why a caller was refused. CallerRefusalName returns the names that metrics
// and logs use.
enum class CallerRefusal {
  kNoCredentials,
  kMalformed,  // the metadata 'authorization' is malformed
  kNoTls,      // a token was sent without TLS
  kUnknown,    // the token is unknown
  kExpired,    // the token has expired
  // The certificate and the token, or two names of the certificate, belong to
  // different tenants.
  kDisagree,
  kTenant,  // the metadata 'x-tenant-id' is not allowed or malformed
  kRole,    // the tenant does not have the required role
  kRate,    // this one and the next three: a limit of the quota was exceeded
  kConcurrency,
  kBytes,     // too few bytes are free now; a later request may fit
  kTooLarge,  // the request needs more bytes than the quota has
};
inline constexpr CallerRefusal kCallerRefusals[] = {
    CallerRefusal::kNoCredentials, CallerRefusal::kMalformed,
    CallerRefusal::kNoTls,         CallerRefusal::kUnknown,
    CallerRefusal::kExpired,       CallerRefusal::kDisagree,
    CallerRefusal::kTenant,        CallerRefusal::kRole,
    CallerRefusal::kRate,          CallerRefusal::kConcurrency,
    CallerRefusal::kBytes,         CallerRefusal::kTooLarge};
const char* CallerRefusalName(CallerRefusal refusal);

// Returns INVALID_ARGUMENT unless `name` is a valid tenant name: at most 128
// letters, digits and -_.:@/. The error does not contain the name.
absl::Status CheckTenantName(absl::string_view name);

// Returns INVALID_ARGUMENT unless `label` is a valid label of a token: 1 to 64
// of the characters that are allowed in tenant names.
absl::Status CheckTokenLabel(absl::string_view label);

// How the server's ports can identify callers.
struct ListenerProof {
  bool tls = false;
  // Whether the clients' port (client_certificates) and the admin port
  // (admin_certificates) ask for certificates and verify them.
  bool client_certificates = false;
  bool admin_certificates = false;
  // True if the admin port accepts only callers with the role ADMIN.
  bool admin_asks = false;
};

// The parsed file.
// Threads: it never changes, so any thread may use it.
class Identities {
 public:
  // Parses the file's text. Returns INVALID_ARGUMENT if it is not the JSON form
  // of the message Identities, exceeds a limit, or has an entry that is invalid
  // or contradicts another. The error begins with `name`, the file's name, and
  // names the entry and the field. It never contains a token or a hash.
  static absl::StatusOr<Identities> Parse(absl::string_view text,
                                          absl::string_view name);

  // Checks that callers can be accepted. Returns FAILED_PRECONDITION in three
  // cases: the file has no callers; the ports never see the callers'
  // credentials (tokens without TLS, or certificates at a port that does not
  // ask for them); the admin port requires the role ADMIN and no tenant has it.
  // The text says what to change. Use this only when the server starts. A later
  // change of the file must always be used, because a removed caller must lose
  // its access.
  absl::Status CheckListener(const ListenerProof& proof,
                             absl::string_view name) const;

  struct Found {
    // The index of the tenant in the file's list of tenants; -1 for the
    // anonymous tenant.
    int tenant_idx = 0;
    // The token's label or the certificate's name; empty for anonymous callers.
    std::string label;
  };
  struct Refused {
    CallerRefusal why = CallerRefusal::kNoCredentials;
    // The refused caller, if it is known: the owner of the expired token or of
    // the certificate.
    std::optional<Found> known;
  };
  // Finds the caller with these credentials. If the caller is refused, returns
  // UNAUTHENTICATED and sets `*refused`. The error text says which kinds of
  // credentials are accepted, and never contains the caller's credentials.
  absl::StatusOr<Found> Find(const Credentials& credentials, absl::Time now,
                             Refused* refused) const;

  // Returns the tenant with this index (Found::tenant_idx); the anonymous
  // tenant if it is negative.
  const kvasir::v1::Tenant& tenant(int idx) const {
    return idx < 0 ? file_.anonymous() : file_.tenants(idx);
  }
  // Returns the index of the tenant with this name; nullopt if the file
  // has none.
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
  // Returns the tenant to which the names of a certificate belong; nullopt if
  // the file lists none of the names.
  absl::StatusOr<std::optional<Found>> FindCertificate(
      const std::vector<std::string>& names, Refused* refused) const;
  // Returns the kinds of credentials that are accepted, as a text for errors.
  std::string Wanted() const;

  kvasir::v1::Identities file_;
  // The hashes of all tokens. owners_ has each token's owner at the same index.
  std::vector<std::string> hashes_;
  std::vector<TokenOwner> owners_;
  std::map<std::string, int> by_certificate_;
  std::map<std::string, int> by_name_;
};

using Equal = std::function<bool(std::string_view, std::string_view)>;
// Returns the index of `hash` in `hashes`, or nullopt. Always calls `equal` for
// every entry, so that the time of a call does not reveal the result.
std::optional<size_t> FindHash(const std::vector<std::string>& hashes,
                               const std::string& hash, const Equal& equal);

bool HasRole(const kvasir::v1::Tenant& tenant, kvasir::v1::Role role);

}  // namespace kvasir::router
