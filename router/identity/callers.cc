#include "router/identity/callers.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/string_view.h"

namespace kvasir::router {

absl::StatusOr<std::string> ReadIdentitiesFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat("--identities ", path, ": ", std::strerror(errno)));
  }
  // One more than there may be: told as too long.
  std::string text(kMaxIdentitiesBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) {
    return absl::UnavailableError(
        absl::StrCat("--identities ", path, ": cannot read"));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

absl::StatusOr<std::shared_ptr<Callers>> Callers::Open(
    Options options, CallerObserver* observer) {
  auto callers =
      std::shared_ptr<Callers>(new Callers(std::move(options), observer));
  KVASIR_ASSIGN_OR_RETURN(callers->seen_, callers->options_.read());
  KVASIR_RETURN_IF_ERROR(callers->Take(callers->seen_));
  return callers;
}

absl::Status Callers::Take(const std::string& text) {
  KVASIR_ASSIGN_OR_RETURN(Identities identities,
                          Identities::Parse(text, options_.name));
  KVASIR_RETURN_IF_ERROR(
      identities.CheckListener(options_.proof, options_.name));
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
  return absl::OkStatus();
}

void Callers::Poll() {
  absl::StatusOr<std::string> text = options_.read();
  // What cannot be read is told once, too.
  const std::string seen =
      text.ok() ? *text : absl::StrCat("\n", text.status().ToString());
  if (seen == seen_) return;
  seen_ = seen;
  const absl::Status status = text.ok() ? Take(*text) : text.status();
  if (observer_ != nullptr) observer_->OnIdentitiesRead(status.ok());
  if (status.ok()) {
    base::LogInfo("identities were read again", {{"file", options_.name}});
  } else {
    base::LogError("identities are not read: those from before stay",
                   {{"why", base::StdView(status.message())}});
  }
}

void Callers::Refused(CallerRefusal why) const {
  if (observer_ != nullptr) observer_->OnCallerRefused(why);
}

absl::StatusOr<Caller> Callers::Identify(const Credentials& credentials,
                                         kvasir::v1::Role role,
                                         const std::string& asked) const {
  std::shared_ptr<const Snapshot> now;
  {
    base::MutexLock lock(&mutex_);
    now = now_;
  }
  CallerRefusal why;
  const auto refuse = [this](CallerRefusal reason, absl::Status status) {
    Refused(reason);
    return status;
  };
  const auto found = now->identities.Find(credentials, options_.now(), &why);
  if (!found.ok()) return refuse(why, found.status());
  const auto quota_of = [&now](int idx) {
    return idx < 0 ? now->quotas.back() : now->quotas[static_cast<size_t>(idx)];
  };
  const kvasir::v1::Tenant* tenant = &now->identities.tenant(found->tenant_idx);
  if (!HasRole(*tenant, role)) {
    return refuse(CallerRefusal::kRole,
                  absl::PermissionDeniedError(absl::StrCat(
                      "tenant '", tenant->name(), "' has not the role ",
                      kvasir::v1::Role_Name(role))));
  }
  Caller caller{.tenant = tenant->name(),
                .label = found->label,
                .shared_prefix_cache = tenant->shared_prefix_cache(),
                .quota = quota_of(found->tenant_idx)};
  if (asked.empty() || asked == tenant->name()) return caller;
  if (!tenant->may_set_tenant()) {
    return refuse(CallerRefusal::kTenant,
                  absl::PermissionDeniedError(absl::StrCat(
                      "metadata 'x-tenant-id': tenant '", tenant->name(),
                      "' may not set another (may_set_tenant of "
                      "--identities)")));
  }
  if (const absl::Status name = CheckTenantName(asked); !name.ok()) {
    return refuse(CallerRefusal::kTenant, name);
  }
  caller.tenant = asked;
  // One that is not listed has the gateway's own, with all others like it.
  if (const auto named = now->identities.Named(asked); named.has_value()) {
    caller.shared_prefix_cache =
        now->identities.tenant(*named).shared_prefix_cache();
    caller.quota = quota_of(*named);
  }
  return caller;
}

absl::StatusOr<std::shared_ptr<RequestPlace>> Callers::Enter(
    const Caller& caller) const {
  QuotaLimit met;
  auto place = caller.quota->Enter(options_.clock->Now(), &met);
  if (met == QuotaLimit::kRate) Refused(CallerRefusal::kRate);
  if (met == QuotaLimit::kConcurrency) Refused(CallerRefusal::kConcurrency);
  return place;
}

absl::StatusOr<std::shared_ptr<ByteShare>> Callers::TakeBytes(
    const Caller& caller, size_t bytes,
    std::shared_ptr<ByteShare> outer) const {
  auto share = caller.quota->TakeBytes(bytes, std::move(outer));
  if (!share.ok()) Refused(CallerRefusal::kBytes);
  return share;
}

}  // namespace kvasir::router
