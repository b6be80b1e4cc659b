#include "router/identity/callers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/read_file.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "router/base/refusal_reason.h"

namespace kvasir::router {

absl::StatusOr<std::string> ReadIdentitiesFile(const std::string& path) {
  absl::StatusOr<std::string> text = base::ReadFile(path, kMaxIdentitiesBytes);
  if (text.ok()) return text;
  return absl::Status(
      text.status().code(),
      absl::StrCat("--identities ", path, ": ", text.status().message()));
}

absl::StatusOr<std::shared_ptr<Callers>> Callers::Open(
    Options options, CallerObserver* observer) {
  auto callers =
      std::shared_ptr<Callers>(new Callers(std::move(options), observer));
  KVASIR_ASSIGN_OR_RETURN(callers->seen_, callers->options_.read());
  const Options& opened = callers->options_;
  KVASIR_ASSIGN_OR_RETURN(Identities identities,
                          Identities::Parse(callers->seen_, opened.name));
  KVASIR_RETURN_IF_ERROR(identities.CheckListener(opened.proof, opened.name));
  callers->Take(std::move(identities));
  return callers;
}

void Callers::Take(Identities identities) {
  auto snapshot = std::make_shared<Snapshot>();
  base::MutexLock lock(&mutex_);
  std::map<std::string, std::shared_ptr<TenantQuota>> listed;
  const auto add =
      [&](const kvasir::v1::Tenant& tenant) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        const auto known = quotas_.find(tenant.name());
        std::shared_ptr<TenantQuota> quota;
        if (known != quotas_.end()) {
          quota = known->second;
          quota->SetLimits(tenant.quota());
        } else {
          quota = std::make_shared<TenantQuota>(tenant.name(), tenant.quota());
        }
        listed[tenant.name()] = quota;
        snapshot->quotas.push_back(std::move(quota));
      };
  for (int idx = 0; idx < identities.num_tenants(); ++idx) {
    add(identities.tenant(idx));
  }
  if (identities.has_anonymous()) add(identities.tenant(-1));
  for (auto& [name, quota] : quotas_) {
    if (!listed.contains(name) && !quota->idle()) listed[name] = quota;
  }
  quotas_ = std::move(listed);
  snapshot->identities = std::move(identities);
  now_ = std::move(snapshot);
}

void Callers::Poll() {
  absl::StatusOr<std::string> text = options_.read();
  // If the file cannot be read, `seen` is the error. So the same error is
  // reported only once.
  const std::string seen =
      text.ok() ? *text : absl::StrCat("\n", text.status().ToString());
  if (seen == seen_) return;
  seen_ = seen;
  absl::StatusOr<Identities> read =
      text.ok() ? Identities::Parse(*text, options_.name) : text.status();
  if (read.ok()) {
    const absl::Status at_a_start =
        read->CheckListener(options_.proof, options_.name);
    Take(*std::move(read));
    base::LogInfo("identities were read again", {{"file", options_.name}});
    if (!at_a_start.ok()) {
      base::LogWarning("the identities in use would be refused at a start",
                       {{"why", base::StdView(at_a_start.message())}});
    }
  } else {
    base::LogError("identities cannot be read: the previous ones stay in use",
                   {{"why", base::StdView(read.status().message())}});
  }
  if (observer_ != nullptr) observer_->OnIdentitiesRead(read.ok());
}

absl::Status Callers::Refused(CallerRefusal why, absl::Status status) const {
  if (observer_ != nullptr) observer_->OnCallerRefused(why);
  SetRefusalReason(CallerRefusalName(why), &status);
  return status;
}

absl::StatusOr<Caller> Callers::Identify(const Credentials& credentials,
                                         kvasir::v1::Role role,
                                         const std::string& asked,
                                         Caller* refused) const {
  std::shared_ptr<const Snapshot> now;
  {
    base::MutexLock lock(&mutex_);
    now = now_;
  }
  const auto describe = [&](const Identities::Found& found) {
    if (refused == nullptr) return;
    refused->tenant = now->identities.tenant(found.tenant_idx).name();
    refused->label = found.label;
  };
  Identities::Refused why;
  const auto found = now->identities.Find(credentials, options_.now(), &why);
  if (!found.ok()) {
    if (why.known.has_value()) describe(*why.known);
    return Refused(why.why, found.status());
  }
  describe(*found);
  const auto quota_of = [&now](int idx) {
    return idx < 0 ? now->quotas.back() : now->quotas[static_cast<size_t>(idx)];
  };
  const auto check_role = [&](const kvasir::v1::Tenant& tenant) {
    if (HasRole(tenant, role)) return absl::OkStatus();
    return Refused(CallerRefusal::kRole,
                   absl::PermissionDeniedError(absl::StrCat(
                       "tenant '", tenant.name(), "' does not have the role ",
                       kvasir::v1::Role_Name(role))));
  };
  const kvasir::v1::Tenant& tenant = now->identities.tenant(found->tenant_idx);
  KVASIR_RETURN_IF_ERROR(check_role(tenant));
  Caller caller{.tenant = tenant.name(),
                .label = found->label,
                .shared_prefix_cache = tenant.shared_prefix_cache(),
                .least_priority = tenant.least_priority(),
                .quota = quota_of(found->tenant_idx)};
  if (asked.empty() || asked == tenant.name()) return caller;
  if (!tenant.may_set_tenant()) {
    return Refused(CallerRefusal::kTenant,
                   absl::PermissionDeniedError(absl::StrCat(
                       "metadata 'x-tenant-id': tenant '", tenant.name(),
                       "' may not set another tenant")));
  }
  if (absl::Status name = CheckTenantName(asked); !name.ok()) {
    return Refused(CallerRefusal::kTenant, std::move(name));
  }
  caller.tenant = asked;
  // A tenant that the gateway names shares the gateway's quota if it is
  // not in the file. It never gets the gateway's shared_prefix_cache
  // and least_priority.
  caller.shared_prefix_cache = false;
  caller.least_priority = 0;
  if (const auto named = now->identities.Named(asked); named.has_value()) {
    // Not only the gateway, but also the named tenant must have the role.
    KVASIR_RETURN_IF_ERROR(check_role(now->identities.tenant(*named)));
    caller.shared_prefix_cache =
        now->identities.tenant(*named).shared_prefix_cache();
    caller.least_priority = now->identities.tenant(*named).least_priority();
    caller.quota = quota_of(*named);
  }
  return caller;
}

absl::Status CheckPriority(const Caller& caller, int32_t priority) {
  if (priority >= caller.least_priority) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("priority: ", priority, " is below ", caller.least_priority,
                   ", the lowest number that this caller may use"));
}

absl::StatusOr<std::shared_ptr<RequestPlace>> Callers::Enter(
    const Caller& caller) const {
  QuotaLimit met;
  auto place = caller.quota->Enter(options_.clock->Now(), &met);
  if (place.ok()) return place;
  return Refused(met == QuotaLimit::kRate ? CallerRefusal::kRate
                                          : CallerRefusal::kConcurrency,
                 place.status());
}

absl::Status Callers::CountSamples(RequestPlace* place, uint32_t n) const {
  absl::Status status = place->CountSamples(n);
  if (status.ok()) return status;
  return Refused(CallerRefusal::kConcurrency, std::move(status));
}

absl::StatusOr<std::shared_ptr<ByteShare>> Callers::TakeBytes(
    const Caller& caller, size_t bytes,
    std::shared_ptr<ByteShare> outer) const {
  auto share = caller.quota->TakeBytes(bytes, std::move(outer));
  if (share.ok()) return share;
  return Refused(absl::IsInvalidArgument(share.status())
                     ? CallerRefusal::kTooLarge
                     : CallerRefusal::kBytes,
                 share.status());
}

}  // namespace kvasir::router
