// The file of --identities: read, judged, and asked who a caller is. Constant
// once it is read.
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

// Bounds of the file: every call's token is compared with all of them.
inline constexpr size_t kMaxIdentitiesBytes = 1 << 20;
inline constexpr int kMaxTenants = 1024;
inline constexpr size_t kMaxTokens = 4096;
inline constexpr int kMaxCertificatesOfTenant = 64;

// Why a caller was not let in. Label values: Name.
enum class CallerRefusal {
  kNoCredentials,
  kMalformed,  // metadata 'authorization'
  kNoTls,      // a token without TLS
  kUnknown,    // token
  kExpired,    // token
  kDisagree,   // certificate and token, or certificate and certificate
  kTenant,     // metadata 'x-tenant-id' that he may not set, or is no name
  kRole,       // he has not the one that is needed
  kRate,       // the rest are quotas
  kConcurrency,
  kBytes,     // of what runs: there is room later
  kTooLarge,  // more bytes than the quota ever has
};
inline constexpr CallerRefusal kCallerRefusals[] = {
    CallerRefusal::kNoCredentials, CallerRefusal::kMalformed,
    CallerRefusal::kNoTls,         CallerRefusal::kUnknown,
    CallerRefusal::kExpired,       CallerRefusal::kDisagree,
    CallerRefusal::kTenant,        CallerRefusal::kRole,
    CallerRefusal::kRate,          CallerRefusal::kConcurrency,
    CallerRefusal::kBytes,         CallerRefusal::kTooLarge};
const char* CallerRefusalName(CallerRefusal refusal);

// INVALID_ARGUMENT, naming no value, for what is no tenant's name: at most 128
// letters, digits and -_.:@/.
absl::Status CheckTenantName(absl::string_view name);

// INVALID_ARGUMENT for what is no token's label: 1 to 64 of the same letters.
absl::Status CheckTokenLabel(absl::string_view label);

// What the listeners give to know callers by.
struct ListenerProof {
  bool tls = false;
  // Certificates are asked for, and verified: at the clients' port, and at the
  // admin port.
  bool client_certificates = false;
  bool admin_certificates = false;
  // The admin port lets nobody in who is not ADMIN.
  bool admin_asks = false;
};

// Threads: any thread; constant.
class Identities {
 public:
  // INVALID_ARGUMENT: no JSON of the message, an unknown field, a bound, an
  // entry that has no meaning, or two that are at odds. The text begins with
  // `name`, the file, names entry and field, and has no token and no hash.
  static absl::StatusOr<Identities> Parse(absl::string_view text,
                                          absl::string_view name);

  // FAILED_PRECONDITION where nobody may call; where the listeners can never
  // see what the file tells callers by: tokens without TLS, certificates that
  // the port of the tenant's role asks nobody for; and where the admin port
  // asks for ADMIN, which nobody can be. The text names the ways out. For a
  // start: a file that takes somebody out must be taken whatever is left.
  absl::Status CheckListener(const ListenerProof& proof,
                             absl::string_view name) const;

  struct Found {
    // Of Identities.tenants; -1: anonymous.
    int tenant_idx = 0;
    // Of the token, or the certificate's name; empty for anonymous.
    std::string label;
  };
  struct Refused {
    CallerRefusal why = CallerRefusal::kNoCredentials;
    // Who it is all the same: his token is over, what he shows disagrees (then
    // by the certificate), or his certificate tells him whatever is wrong with
    // the token.
    std::optional<Found> known;
  };
  // UNAUTHENTICATED, and `*refused`, for who is not let in. The text says what
  // is wanted, and no value.
  absl::StatusOr<Found> Find(const Credentials& credentials, absl::Time now,
                             Refused* refused) const;

  // By Found's index.
  const kvasir::v1::Tenant& tenant(int idx) const {
    return idx < 0 ? file_.anonymous() : file_.tenants(idx);
  }
  // nullopt: none of that name is listed.
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
  // The one whom all names of a certificate tell; nullopt: nobody's.
  absl::StatusOr<std::optional<Found>> FindCertificate(
      const std::vector<std::string>& names, Refused* refused) const;
  // What a caller may show here.
  std::string Wanted() const;

  kvasir::v1::Identities file_;
  // Of the tokens, side by side with who shows them.
  std::vector<std::string> hashes_;
  std::vector<TokenOwner> owners_;
  std::map<std::string, int> by_certificate_;
  std::map<std::string, int> by_name_;
};

// Whether two texts are equal.
using Equal = std::function<bool(std::string_view, std::string_view)>;
// The index of the one of `hashes` that equals `hash`, by `equal`, which is
// asked of every one of them whatever it said before; nullopt: none does.
std::optional<size_t> FindHash(const std::vector<std::string>& hashes,
                               const std::string& hash, const Equal& equal);

bool HasRole(const kvasir::v1::Tenant& tenant, kvasir::v1::Role role);

}  // namespace kvasir::router
