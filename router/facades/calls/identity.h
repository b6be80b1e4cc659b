// Who calls, as far as the wire says, and what follows from it for a request.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "router/canonical.h"

namespace kvasir::router {

struct CallIdentity {
  std::string peer;
  // As the client sent it (header x-tenant-id); checked with each request.
  std::string tenant;
  std::string traceparent;
  absl::Time deadline = absl::InfiniteFuture();
};

// INVALID_ARGUMENT shows no value: it may be a secret, or not printable.
absl::Status CheckTenant(const std::string& tenant);

// Tenants never share cached prefixes; requests without one share theirs. A
// client's own salt separates further, within its tenant.
std::string CacheSaltOf(const std::string& tenant,
                        const std::string& client_salt = "");

// What the access log says of a request, whether it comes to be or not.
CanonicalRequest DescribeRequest(const CallIdentity& call,
                                 const std::string& facade,
                                 const std::string& model,
                                 const std::string& id);

}  // namespace kvasir::router
