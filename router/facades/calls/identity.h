// A call's metadata, and the fields of a request that depend on it.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "router/base/canonical.h"
#include "router/identity/callers.h"
#include "router/identity/credentials.h"

namespace kvasir::router {

struct CallIdentity {
  std::string peer;
  // These are checked again with each request, because the caller may lose its
  // access while a stream is open.
  Credentials credentials;
  // The header x-tenant-id as the client sent it.
  std::string tenant;
  std::string traceparent;
  absl::Time deadline = absl::InfiniteFuture();
};

// Returns the cache salt of a request. Requests share cached prefixes only if
// their salts are equal. Different tenants and different values of
// `client_salt` give different salts. `tenant` is empty for callers without a
// tenant, and for tenants that share prefixes with each other.
std::string CacheSaltOf(const std::string& tenant,
                        const std::string& client_salt = "");

// Returns a request with only the fields that the access log needs, also for
// refused requests. `caller` is empty if it is unknown.
CanonicalRequest DescribeRequest(const CallIdentity& call, const Caller& caller,
                                 const std::string& facade,
                                 const std::string& model,
                                 const std::string& id);

}  // namespace kvasir::router
