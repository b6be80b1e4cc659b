#include "router/facades/calls/identity.h"

#include "absl/strings/str_cat.h"

namespace kvasir::router {
std::string CacheSaltOf(const std::string& tenant,
                        const std::string& client_salt) {
  const std::string own = tenant.empty() ? "" : absl::StrCat("tenant/", tenant);
  if (client_salt.empty()) return own;
  // The salt's length stands before the salt. Otherwise a client could choose a
  // salt with which the result is another tenant's cache salt.
  return absl::StrCat("salt/", client_salt.size(), ":", client_salt, own);
}

CanonicalRequest DescribeRequest(const CallIdentity& call, const Caller& caller,
                                 const std::string& facade,
                                 const std::string& model,
                                 const std::string& id) {
  CanonicalRequest request;
  request.model = model;
  request.client_request_id = id;
  request.tenant = caller.tenant;
  request.caller = caller.label;
  request.deadline = call.deadline;
  request.traceparent = call.traceparent;
  request.facade = facade;
  request.peer = call.peer;
  return request;
}

}  // namespace kvasir::router
