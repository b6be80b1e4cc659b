// A call's metadata, and what a request derives from it.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "router/base/canonical.h"
#include "router/identity/callers.h"
#include "router/identity/credentials.h"

namespace kvasir::router {

struct CallIdentity {
  std::string peer;
  // Checked with each request, because access may end while a stream is open.
  Credentials credentials;
  // As the client sent it (header x-tenant-id).
  std::string tenant;
  std::string traceparent;
  absl::Time deadline = absl::InfiniteFuture();
};

// Tenants never share cached prefixes. Requests without a tenant (or of tenants
// that share on purpose) share theirs. A client's own salt separates further
// within its tenant.
std::string CacheSaltOf(const std::string& tenant,
                        const std::string& client_salt = "");

// The request's fields for the access log, whether or not it is accepted.
// `caller` is empty if it is unknown.
CanonicalRequest DescribeRequest(const CallIdentity& call, const Caller& caller,
                                 const std::string& facade,
                                 const std::string& model,
                                 const std::string& id);

}  // namespace kvasir::router
