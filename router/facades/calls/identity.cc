#include "router/facades/calls/identity.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace kvasir::router {
namespace {

constexpr size_t kMaxTenantBytes = 128;

}  // namespace

absl::Status CheckTenant(const std::string& tenant) {
  if (tenant.size() > kMaxTenantBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("metadata 'x-tenant-id': want at most ", kMaxTenantBytes,
                     " bytes, have ", tenant.size()));
  }
  for (const char c : tenant) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
        absl::StrContains("-_.:@/", c)) {
      continue;
    }
    return absl::InvalidArgumentError(
        "metadata 'x-tenant-id': want one value of letters, digits and "
        "-_.:@/ only");
  }
  return absl::OkStatus();
}

std::string CacheSaltOf(const std::string& tenant,
                        const std::string& client_salt) {
  const std::string own = tenant.empty() ? "" : absl::StrCat("tenant/", tenant);
  if (client_salt.empty()) return own;
  // Its length first: no salt says the name of a tenant.
  return absl::StrCat("salt/", client_salt.size(), ":", client_salt, own);
}

CanonicalRequest DescribeRequest(const CallIdentity& call,
                                 const std::string& facade,
                                 const std::string& model,
                                 const std::string& id) {
  CanonicalRequest request;
  request.model = model;
  request.client_request_id = id;
  // One that was refused for it may be anything.
  if (CheckTenant(call.tenant).ok()) request.tenant = call.tenant;
  request.deadline = call.deadline;
  request.traceparent = call.traceparent;
  request.facade = facade;
  request.peer = call.peer;
  return request;
}

}  // namespace kvasir::router
