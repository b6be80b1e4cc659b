// Who calls, as far as the wire says, and what follows from it for a request.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "router/base/canonical.h"
#include "router/identity/callers.h"
#include "router/identity/credentials.h"

namespace kvasir::router {

struct CallIdentity {
  std::string peer;
  // Judged with each request: what is let in now may not be later.
  Credentials credentials;
  // As the client sent it (header x-tenant-id).
  std::string tenant;
  std::string traceparent;
  absl::Time deadline = absl::InfiniteFuture();
};

// Tenants never share cached prefixes; requests without one (or of tenants that
// share on purpose) share theirs. A
// client's own salt separates further, within its tenant.
std::string CacheSaltOf(const std::string& tenant,
                        const std::string& client_salt = "");

// What the access log says of a request, whether it comes to be or not;
// `caller` is empty where nobody knows him.
CanonicalRequest DescribeRequest(const CallIdentity& call, const Caller& caller,
                                 const std::string& facade,
                                 const std::string& model,
                                 const std::string& id);

}  // namespace kvasir::router
