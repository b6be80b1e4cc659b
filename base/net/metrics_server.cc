#include "base/net/metrics_server.h"

#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/net/listen_address.h"
#include "prometheus/exposer.h"

namespace kvasir::base {

const std::vector<double>& TimeToFirstTokenBuckets() {
  static const auto* const buckets = new std::vector<double>{
      .001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
      1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
  return *buckets;
}

const std::vector<double>& InterTokenBuckets() {
  static const auto* const buckets = new std::vector<double>{
      .001, .002, .005, .01, .025, .05, .075, .1, .15, .2, .3,
      .4,   .5,   .75,  1,   2.5,  5,   7.5,  10, 20,  40, 80};
  return *buckets;
}

const std::vector<double>& RequestPhaseBuckets() {
  static const auto* const buckets = new std::vector<double>{
      .001, .005, .01, .025, .05, .1, .3, .5,  .8,  1,   1.5, 2,    2.5, 5,
      10,   15,   20,  30,   40,  50, 60, 120, 240, 480, 960, 1920, 7680};
  return *buckets;
}

const std::vector<double>& FineBuckets() {
  static const auto* const buckets =
      new std::vector<double>{.0001, .0002, .0005, .001, .002, .005, .01, .02,
                              .05,   .1,    .2,    .5,   1,    2,    5};
  return *buckets;
}

std::vector<double> TokenCountBuckets(int64_t max_model_len) {
  std::vector<double> buckets;
  for (double decade = 1;; decade *= 10) {
    for (const double step : {1.0, 2.0, 5.0}) {
      buckets.push_back(step * decade);
      if (buckets.back() >= static_cast<double>(max_model_len)) return buckets;
    }
  }
}

namespace {

// The library says the same whatever is wrong; asking the system tells.
absl::Status ListenError(const std::string& host, int port,
                         const char* library_says) {
  const std::string address = JoinHostPort(host, port);
  const ListenTrouble trouble = ProbeListen(host, port);
  switch (trouble.with) {
    case ListenTrouble::With::kHost:
      return absl::FailedPreconditionError(
          absl::StrCat("metrics: cannot listen on ", address, ": --host ", host,
                       ": ", trouble.cause));
    case ListenTrouble::With::kPort:
      return absl::UnavailableError(
          absl::StrCat("metrics: cannot listen on ", address, ": ",
                       trouble.cause, "; choose another with --metrics-port"));
    case ListenTrouble::With::kNothing:
      break;
  }
  if (host.find(':') != std::string::npos) {
    return absl::FailedPreconditionError(absl::StrCat(
        "metrics: cannot listen on ", address,
        ": this build's HTTP library (civetweb) has no IPv6; give an IPv4 "
        "--host, such as 127.0.0.1 or 0.0.0.0"));
  }
  return absl::UnavailableError(absl::StrCat("metrics: cannot listen on ",
                                             address, " (", library_says, ")"));
}

}  // namespace

MetricsServer::MetricsServer(std::unique_ptr<prometheus::Exposer> exposer,
                             const std::string& host, int port)
    : exposer_(std::move(exposer)), port_(port), knocker_(host, port) {}

MetricsServer::~MetricsServer() { Stop(); }

// The library's listening thread looks at the stop flag when its poll ends:
// after two seconds, or when somebody connects.
int MetricsServer::Stop() {
  if (exposer_ == nullptr) return 0;
  int taken = 0;
  std::atomic<bool> stopped = false;
  std::thread stop([&] {
    exposer_.reset();
    stopped = true;
  });
  while (!stopped) {
    taken += knocker_.Knock() ? 1 : 0;
    absl::SleepFor(absl::Milliseconds(2));
  }
  stop.join();
  return taken;
}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& host, int port) {
  const std::string address = JoinHostPort(host, port);
  try {
    // Each connection takes a thread until it has asked or its time is over:
    // with the library's own settings two idle ones kept everybody out for
    // half a minute. Nothing else asks here than a few scrapers.
    auto exposer =
        std::make_unique<prometheus::Exposer>(std::vector<std::string>{
            "listening_ports", address, "num_threads", "8",
            "request_timeout_ms", "1000", "enable_keep_alive", "no"});
    const std::vector<int> ports = exposer->GetListeningPorts();
    if (ports.empty()) {
      return absl::UnavailableError(
          absl::StrCat("metrics: not listening on ", address));
    }
    return std::unique_ptr<MetricsServer>(
        new MetricsServer(std::move(exposer), host, ports.front()));
  } catch (const std::exception& error) {
    return ListenError(host, port, error.what());
  }
}

void MetricsServer::Add(
    const std::shared_ptr<prometheus::Collectable>& source) {
  exposer_->RegisterCollectable(source);
  sources_.push_back(source);
}

}  // namespace kvasir::base
