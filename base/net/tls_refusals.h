// Handshakes of TLS that came to nothing, whoever refused: counted by their
// cause, and told in the log now and then.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/log_limit.h"
#include "base/mutex.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvasir::base {

enum class TlsRefusal {
  kNoCertificate,  // the other showed none
  kCertificate,    // of none of our authorities, or over
  kNames,          // none of its names is allowed, or is what was dialled
  kPeer,           // the other side refused
  kNoTls,          // it does not speak it
  kVersion,        // none that both speak
  kOther,
};

// What gRPC's log says of a handshake that failed; nothing of other lines.
std::optional<TlsRefusal> TlsRefusalOf(absl::string_view grpc_line);

// Threads: any.
class TlsRefusals final : public prometheus::Collectable {
 public:
  explicit TlsRefusals(const Clock& clock = Clock::Real()) : lines_(clock) {}
  // gRPC's log is one for the process, and knows no listener.
  static const std::shared_ptr<TlsRefusals>& OfProcess();

  // Counts, and logs `detail` where the cause has not been in the log for a
  // minute: whoever dials writes these lines.
  void Add(TlsRefusal cause, absl::string_view detail)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The same of a line of gRPC's log; false where it is about something else,
  // which is then worth a line of its own.
  bool AddGrpcLine(absl::string_view line) ABSL_LOCKS_EXCLUDED(mutex_);

  uint64_t count(TlsRefusal cause) const ABSL_LOCKS_EXCLUDED(mutex_);
  // kvasir_tls_handshakes_refused_total, by cause.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  static constexpr size_t kNumCauses =
      static_cast<size_t>(TlsRefusal::kOther) + 1;

  LogLimit lines_;
  mutable Mutex mutex_;
  std::array<uint64_t, kNumCauses> counts_ ABSL_GUARDED_BY(mutex_) = {};
};

}  // namespace kvasir::base
