#include "router/facades/calls/metadata.h"

#include <vector>

#include "absl/strings/str_join.h"
#include "base/net/grpc_deadline.h"

namespace kvasir::router {

std::string MetadataOf(const grpc::CallbackServerContext& context,
                       const char* key) {
  std::vector<std::string> values;
  const auto [begin, end] = context.client_metadata().equal_range(key);
  for (auto it = begin; it != end; ++it) {
    values.emplace_back(it->second.data(), it->second.size());
  }
  return absl::StrJoin(values, ",");
}

CallIdentity IdentityOf(const grpc::CallbackServerContext& context) {
  CallIdentity call;
  call.peer = context.peer();
  call.tenant = MetadataOf(context, "x-tenant-id");
  call.traceparent = MetadataOf(context, "traceparent");
  call.deadline = base::FromGrpcDeadline(context.deadline());
  return call;
}

}  // namespace kvasir::router
