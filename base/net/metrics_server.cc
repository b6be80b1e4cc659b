#include "base/net/metrics_server.h"

#include <CivetServer.h>

#include <atomic>
#include <exception>
#include <iterator>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/net/listen_address.h"
#include "prometheus/counter.h"
#include "prometheus/registry.h"
#include "prometheus/summary.h"
#include "prometheus/text_serializer.h"

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
                         const std::string& host_flag,
                         const char* library_says) {
  const std::string address = JoinHostPort(host, port);
  const ListenTrouble trouble = ProbeListen(host, port);
  switch (trouble.with) {
    case ListenTrouble::With::kHost:
      return absl::FailedPreconditionError(
          absl::StrCat("metrics: cannot listen on ", address, ": ", host_flag,
                       " ", host, ": ", trouble.cause));
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
        ": this build's HTTP library (civetweb) has no IPv6; give an IPv4 ",
        host_flag, ", such as 127.0.0.1 or 0.0.0.0"));
  }
  return absl::UnavailableError(absl::StrCat("metrics: cannot listen on ",
                                             address, " (", library_says, ")"));
}

void Answer(mg_connection* connection, const char* status, const char* type,
            const std::string& text) {
  mg_printf(connection,
            "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
            "Connection: close\r\n\r\n",
            status, type, text.size());
  mg_write(connection, text.data(), text.size());
}

}  // namespace

class MetricsServer::Http {
  class MetricsPage final : public CivetHandler {
   public:
    MetricsPage() { Add(registry_); }

    void Add(std::shared_ptr<prometheus::Collectable> source) {
      MutexLock lock(&mutex_);
      sources_.push_back(std::move(source));
    }

    bool handleGet(CivetServer*, mg_connection* connection) override {
      const absl::Time start = Clock::Real().Now();
      std::vector<std::shared_ptr<prometheus::Collectable>> sources;
      {
        MutexLock lock(&mutex_);
        sources = sources_;
      }
      std::vector<prometheus::MetricFamily> families;
      for (const auto& source : sources) {
        std::vector<prometheus::MetricFamily> more = source->Collect();
        families.insert(families.end(), std::make_move_iterator(more.begin()),
                        std::make_move_iterator(more.end()));
      }
      const std::string text = prometheus::TextSerializer().Serialize(families);
      Answer(connection, "200 OK", "text/plain; version=0.0.4; charset=utf-8",
             text);
      bytes_.Increment(static_cast<double>(text.size()));
      scrapes_.Increment();
      latencies_.Observe(
          absl::ToDoubleMicroseconds(Clock::Real().Now() - start));
      return true;
    }

   private:
    // By the names that prometheus-cpp's own server gives them.
    const std::shared_ptr<prometheus::Registry> registry_ =
        std::make_shared<prometheus::Registry>();
    prometheus::Counter& bytes_ = prometheus::BuildCounter()
                                      .Name("exposer_transferred_bytes_total")
                                      .Help("Bytes of answers to scrapes")
                                      .Register(*registry_)
                                      .Add({});
    prometheus::Counter& scrapes_ = prometheus::BuildCounter()
                                        .Name("exposer_scrapes_total")
                                        .Help("Answers to scrapes")
                                        .Register(*registry_)
                                        .Add({});
    prometheus::Summary& latencies_ =
        prometheus::BuildSummary()
            .Name("exposer_request_latencies")
            .Help("Microseconds that an answer to a scrape took")
            .Register(*registry_)
            .Add({}, prometheus::Summary::Quantiles{
                         {0.5, 0.05}, {0.9, 0.01}, {0.99, 0.001}});
    Mutex mutex_;
    std::vector<std::shared_ptr<prometheus::Collectable>> sources_
        ABSL_GUARDED_BY(mutex_);
  };

  class HealthPage final : public CivetHandler {
   public:
    bool handleGet(CivetServer*, mg_connection* connection) override {
      if (ready) {
        Answer(connection, "200 OK", "text/plain", "ready\n");
      } else {
        Answer(connection, "503 Service Unavailable", "text/plain",
               "not ready\n");
      }
      return true;
    }

    std::atomic<bool> ready = false;
  };

 public:
  // CivetException when it cannot listen.
  explicit Http(const std::vector<std::string>& options) : server_(options) {
    server_.addHandler("/metrics", metrics);
    server_.addHandler("/healthz", health);
  }
  int port() {
    const std::vector<int> ports = server_.getListeningPorts();
    return ports.empty() ? 0 : ports.front();
  }

  MetricsPage metrics;
  HealthPage health;

 private:
  CivetServer server_;  // ends before what it serves
};

MetricsServer::MetricsServer(std::unique_ptr<Http> http,
                             const std::string& host, int port)
    : http_(std::move(http)), port_(port), knocker_(host, port) {}

MetricsServer::~MetricsServer() { Stop(); }

// The library's listening thread looks at the stop flag when its poll ends:
// after two seconds, or when somebody connects.
int MetricsServer::Stop() {
  if (http_ == nullptr) return 0;
  int taken = 0;
  std::atomic<bool> stopped = false;
  std::thread stop([&] {
    http_.reset();
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
    const std::string& host, int port, const std::string& host_flag) {
  const std::string address = JoinHostPort(host, port);
  try {
    // Each connection takes a thread until it has asked or its time is over:
    // with the library's own settings two idle ones kept everybody out for
    // half a minute. Nothing else asks here than a few scrapers.
    auto http = std::make_unique<Http>(std::vector<std::string>{
        "listening_ports", address, "num_threads", "8", "request_timeout_ms",
        "1000", "enable_keep_alive", "no"});
    const int bound = http->port();
    if (bound == 0) {
      return absl::UnavailableError(
          absl::StrCat("metrics: not listening on ", address));
    }
    return std::unique_ptr<MetricsServer>(
        new MetricsServer(std::move(http), host, bound));
  } catch (const std::exception& error) {
    return ListenError(host, port, host_flag, error.what());
  }
}

void MetricsServer::Add(
    const std::shared_ptr<prometheus::Collectable>& source) {
  http_->metrics.Add(source);
}

void MetricsServer::SetReady(bool ready) { http_->health.ready = ready; }

}  // namespace kvasir::base
