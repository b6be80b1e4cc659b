#include "server/runtime/identity_watch.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/net/tls.h"
#include "base/status_macros.h"

namespace kvasir::cli {
namespace {

constexpr absl::Duration kPollInterval = absl::Seconds(5);

}  // namespace

absl::StatusOr<std::unique_ptr<IdentityWatch>> IdentityWatch::Start(
    const RouterFlags& router, const ListenFlags& listen) {
  auto watch = std::unique_ptr<IdentityWatch>(new IdentityWatch());
  const std::string& path = router.identities;
  if (path.empty()) return watch;
  KVASIR_ASSIGN_OR_RETURN(
      watch->callers_,
      router::Callers::Open(
          {.name = absl::StrCat("--identities ", path),
           .read = [path] { return router::ReadIdentitiesFile(path); },
           .proof = {.tls = !listen.tls.certificate.empty(),
                     .client_certificates = !listen.tls.client_ca.empty(),
                     .admin_certificates = !listen.admin_client_ca.empty(),
                     .admin_asks = !listen.admin_client_ca.empty() ||
                                   !base::IsLocal(AdminAddress(listen))}},
          &watch->metrics_));
  watch->timers_ = std::make_unique<router::TimerThread>();
  watch->PollLater();
  return watch;
}

IdentityWatch::~IdentityWatch() {
  if (timers_ != nullptr) timers_->Stop();
}

void IdentityWatch::PollLater() {
  timers_->At(base::Clock::Real().Now() + kPollInterval, [this] {
    callers_->Poll();
    PollLater();
  });
}

}  // namespace kvasir::cli
