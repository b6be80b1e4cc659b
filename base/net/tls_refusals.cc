#include "base/net/tls_refusals.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "base/log.h"

namespace kvasir::base {
namespace {

const char* NameOf(TlsRefusal cause) {
  switch (cause) {
    case TlsRefusal::kNoCertificate:
      return "no_certificate";
    case TlsRefusal::kCertificate:
      return "certificate";
    case TlsRefusal::kNames:
      return "names";
    case TlsRefusal::kPeer:
      return "peer";
    case TlsRefusal::kNoTls:
      return "no_tls";
    case TlsRefusal::kVersion:
      return "version";
    case TlsRefusal::kOther:
      break;
  }
  return "other";
}

}  // namespace

std::optional<TlsRefusal> TlsRefusalOf(absl::string_view grpc_line) {
  const auto has = [grpc_line](absl::string_view text) {
    return absl::StrContains(grpc_line, text);
  };
  if (!has("Handshake failed with fatal error")) return std::nullopt;
  if (has("did not return a certificate")) return TlsRefusal::kNoCertificate;
  if (has("certificate verify failed")) return TlsRefusal::kCertificate;
  if (has(" alert ")) return TlsRefusal::kPeer;
  if (has("wrong version number") || has("http request") ||
      has("proxy request")) {
    return TlsRefusal::kNoTls;
  }
  if (has("unsupported protocol") || has("version too low")) {
    return TlsRefusal::kVersion;
  }
  return TlsRefusal::kOther;
}

const std::shared_ptr<TlsRefusals>& TlsRefusals::OfProcess() {
  static const auto* const refusals =
      new std::shared_ptr<TlsRefusals>(std::make_shared<TlsRefusals>());
  return *refusals;
}

void TlsRefusals::Add(TlsRefusal cause, absl::string_view detail) {
  const std::optional<uint64_t> unlogged = lines_.Take(NameOf(cause));
  if (unlogged.has_value()) {
    LogWarning("TLS handshake refused",
               {{"cause", NameOf(cause)},
                {"detail", std::string_view(detail.data(), detail.size())},
                {"since_last_line", *unlogged}});
  }
  // Count after logging, so that a test that sees the count also finds the
  // log line.
  MutexLock lock(&mutex_);
  ++counts_[static_cast<size_t>(cause)];
}

bool TlsRefusals::AddGrpcLine(absl::string_view line) {
  // gRPC logs this for every certificate without the dialled name, even if
  // another of its names is allowed. So the line is not counted: OneOfNames
  // counts the certificates that it refuses.
  if (absl::StrContains(line, "No match found for server name")) return true;
  const std::optional<TlsRefusal> cause = TlsRefusalOf(line);
  if (cause.has_value()) Add(*cause, line);
  return cause.has_value();
}

uint64_t TlsRefusals::count(TlsRefusal cause) const {
  MutexLock lock(&mutex_);
  return counts_[static_cast<size_t>(cause)];
}

std::vector<prometheus::MetricFamily> TlsRefusals::Collect() const {
  prometheus::MetricFamily family;
  family.name = "kvasir_tls_handshakes_refused_total";
  family.help = "TLS handshakes that failed, by cause";
  family.type = prometheus::MetricType::Counter;
  for (size_t i = 0; i < kNumCauses; ++i) {
    const auto cause = static_cast<TlsRefusal>(i);
    prometheus::ClientMetric metric;
    metric.label = {{"cause", NameOf(cause)}};
    metric.counter.value = static_cast<double>(count(cause));
    family.metric.push_back(std::move(metric));
  }
  return {std::move(family)};
}

}  // namespace kvasir::base
