// Counts failed TLS handshakes of servers and clients by cause, and logs them
// at a limited rate.
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
  kNoCertificate,  // the peer showed no certificate
  // the peer's certificate is expired, or not signed by our authorities
  kCertificate,
  // the peer's certificate has no allowed name, or not the dialled host's name
  kNames,
  kPeer,     // the peer refused the handshake and sent an alert
  kNoTls,    // the peer does not speak TLS
  kVersion,  // both sides have no TLS version in common
  kOther,
};

// Returns the cause of a failed handshake from a line of gRPC's log; nothing if
// the line is about something else.
std::optional<TlsRefusal> TlsRefusalOf(absl::string_view grpc_line);

// Threads: its methods may be called from any thread.
class TlsRefusals final : public prometheus::Collectable {
 public:
  explicit TlsRefusals(const Clock& clock = Clock::Real()) : lines_(clock) {}
  // Returns the instance of this process. There is only one, because gRPC's log
  // lines do not name the listener.
  static const std::shared_ptr<TlsRefusals>& OfProcess();

  // Counts the cause. Logs `detail` at most once a minute for each cause,
  // because clients can cause any number of refusals.
  void Add(TlsRefusal cause, absl::string_view detail)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Reads a line of gRPC's log and counts a refusal in it. Returns false if the
  // line is about something else and should be logged itself.
  bool AddGrpcLine(absl::string_view line) ABSL_LOCKS_EXCLUDED(mutex_);

  uint64_t count(TlsRefusal cause) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns kvasir_tls_handshakes_refused_total, by cause.
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  static constexpr size_t kNumCauses =
      static_cast<size_t>(TlsRefusal::kOther) + 1;

  LogLimit lines_;
  mutable Mutex mutex_;
  std::array<uint64_t, kNumCauses> counts_ ABSL_GUARDED_BY(mutex_) = {};
};

}  // namespace kvasir::base
