#include "base/net/metrics_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status_macros.h"
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

// Only a few scrapers and probes connect, so this limit is generous.
constexpr size_t kMaxConnections = 64;
// Time limits. kRequestTime: from the start of a connection to the end of its
// request. kAnswerTime: from the end of the request to the end of the answer.
constexpr absl::Duration kRequestTime = absl::Seconds(2);
constexpr absl::Duration kAnswerTime = absl::Seconds(10);
constexpr size_t kMaxRequestBytes = 8 << 10;
constexpr char kEndOfHead[] = "Connection: close\r\n\r\n";

std::string Response(absl::string_view status, absl::string_view type,
                     const std::string& text, absl::string_view header = "") {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                      "\r\nContent-Length: ", text.size(), "\r\n", header,
                      kEndOfHead, text);
}

}  // namespace

// Metrics about scrapes, with the names that prometheus-cpp's own HTTP
// server uses.
struct MetricsServer::OwnMetrics {
  const std::shared_ptr<prometheus::Registry> registry =
      std::make_shared<prometheus::Registry>();
  prometheus::Counter& bytes = prometheus::BuildCounter()
                                   .Name("exposer_transferred_bytes_total")
                                   .Help("Bytes of answers to scrapes")
                                   .Register(*registry)
                                   .Add({});
  prometheus::Counter& scrapes = prometheus::BuildCounter()
                                     .Name("exposer_scrapes_total")
                                     .Help("Answers to scrapes")
                                     .Register(*registry)
                                     .Add({});
  prometheus::Summary& latencies =
      prometheus::BuildSummary()
          .Name("exposer_request_latencies")
          .Help("Microseconds that an answer to a scrape took")
          .Register(*registry)
          .Add({}, prometheus::Summary::Quantiles{
                       {0.5, 0.05}, {0.9, 0.01}, {0.99, 0.001}});
};

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& host, int port, const std::string& host_flag) {
  auto acceptor = Acceptor::Listen({.host = host,
                                    .port = port,
                                    .flag = "--metrics-port",
                                    .host_flag = host_flag});
  if (!acceptor.ok()) {
    // A taken port gives UNAVAILABLE, because it may soon be free again. Other
    // errors, such as an address of another machine, keep their code.
    const bool taken =
        ProbeListen(host, port).with == ListenTrouble::With::kPort;
    return absl::Status(
        taken ? absl::StatusCode::kUnavailable : acceptor.status().code(),
        absl::StrCat("metrics: ", acceptor.status().message()));
  }
  const int wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "metrics: cannot create an eventfd: ", std::strerror(errno)));
  }
  return std::unique_ptr<MetricsServer>(
      new MetricsServer(*std::move(acceptor), wake));
}

MetricsServer::MetricsServer(std::unique_ptr<Acceptor> acceptor, int wake)
    : acceptor_(std::move(acceptor)),
      wake_(wake),
      own_(std::make_unique<OwnMetrics>()) {
  Add(own_->registry);
  thread_ = std::thread([this] { Loop(); });
  // The acceptor's limit is higher than kMaxConnections, so that this server,
  // and not the acceptor, decides which connections are closed.
  acceptor_->Run(
      {.max_connections = 4 * kMaxConnections, .take = [this](int connection) {
         {
           MutexLock lock(&mutex_);
           accepted_.push_back(connection);
         }
         Wake();
       }});
}

MetricsServer::~MetricsServer() {
  acceptor_->StopListening();
  stopping_ = true;
  Wake();
  thread_.join();
  for (const Connection& connection : connections_) ::close(connection.socket);
  for (const int accepted : accepted_) ::close(accepted);
  ::close(wake_);
}

void MetricsServer::Add(
    const std::shared_ptr<prometheus::Collectable>& source) {
  MutexLock lock(&mutex_);
  sources_.push_back(source);
}

void MetricsServer::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof(one));
}

void MetricsServer::Loop() {
  while (!stopping_) {
    std::vector<pollfd> waits = {{.fd = wake_, .events = POLLIN, .revents = 0}};
    absl::Time next = absl::InfiniteFuture();
    for (const Connection& at : connections_) {
      const short events = at.answer.empty() ? POLLIN : POLLOUT;
      waits.push_back({.fd = at.socket, .events = events, .revents = 0});
      next = std::min(next, at.end);
    }
    const absl::Time before = Clock::Real().Now();
    const int wait = next == absl::InfiniteFuture()
                         ? -1
                         : static_cast<int>(std::max<int64_t>(
                               0, absl::ToInt64Milliseconds(absl::Ceil(
                                      next - before, absl::Milliseconds(1)))));
    if (::poll(waits.data(), waits.size(), wait) < 0) {
      // poll() was interrupted, or the kernel is short of memory: try
      // again soon.
      ::poll(nullptr, 0, /*timeout=*/10);
      continue;
    }
    const absl::Time now = Clock::Real().Now();
    std::vector<Connection> open;
    for (size_t i = 0; i < connections_.size(); ++i) {
      Connection& at = connections_[i];
      const bool ready = waits[i + 1].revents != 0;
      // A request that arrived in time is still served, even if a slow scrape
      // delayed this round: Advance then sets a later `end`.
      if ((!ready || Advance(&at)) && at.end > now) {
        open.push_back(std::move(at));
      } else {
        ::close(at.socket);
      }
    }
    connections_.swap(open);
    if (waits[0].revents != 0) TakeAccepted(Clock::Real().Now());
  }
}

void MetricsServer::TakeAccepted(absl::Time now) {
  uint64_t woken;
  [[maybe_unused]] const ssize_t read = ::read(wake_, &woken, sizeof(woken));
  std::vector<int> accepted;
  {
    MutexLock lock(&mutex_);
    accepted.swap(accepted_);
  }
  for (const int socket : accepted) {
    // Close the oldest connection. A client that sends its request immediately
    // is then answered, however many idle connections other clients open.
    if (connections_.size() >= kMaxConnections) {
      ::close(connections_.front().socket);
      connections_.erase(connections_.begin());
    }
    connections_.push_back({.socket = socket, .end = now + kRequestTime});
    if (Advance(&connections_.back())) continue;
    ::close(socket);
    connections_.pop_back();
  }
}

bool MetricsServer::Advance(Connection* connection) {
  while (connection->answer.empty()) {
    char bytes[1024];
    const ssize_t got = ::recv(connection->socket, bytes, sizeof(bytes), 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    connection->request.append(bytes, static_cast<size_t>(got));
    if (connection->request.find("\r\n\r\n") != std::string::npos) {
      connection->answer = Answer(connection->request);
      connection->end = Clock::Real().Now() + kAnswerTime;
    } else if (connection->request.size() > kMaxRequestBytes) {
      return false;
    }
  }
  while (connection->sent < connection->answer.size()) {
    const ssize_t sent =
        ::send(connection->socket, connection->answer.data() + connection->sent,
               connection->answer.size() - connection->sent, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    connection->sent += static_cast<size_t>(sent);
  }
  return false;
}

std::string MetricsServer::Answer(absl::string_view request) {
  const std::vector<absl::string_view> words = absl::StrSplit(
      request.substr(0, request.find('\r')), absl::MaxSplits(' ', 2));
  constexpr char kText[] = "text/plain";
  if (words.size() < 2) return Response("400 Bad Request", kText, "");
  if (words[0] == "HEAD") {
    // Send the same headers as for GET, including Content-Length, but no body.
    std::string answer =
        Answer(absl::StrCat("GET", request.substr(words[0].size())));
    answer.resize(answer.find(kEndOfHead) + sizeof(kEndOfHead) - 1);
    return answer;
  }
  const absl::string_view path = words[1].substr(0, words[1].find('?'));
  if (path != "/metrics" && path != "/healthz") {
    return Response("404 Not Found", kText,
                    "unknown path: use /metrics or /healthz\n");
  }
  if (words[0] != "GET") {
    return Response("405 Method Not Allowed", kText, "use GET or HEAD\n",
                    "Allow: GET, HEAD\r\n");
  }
  if (path == "/metrics") {
    return Response("200 OK", "text/plain; version=0.0.4; charset=utf-8",
                    Scrape());
  }
  return ready_ ? Response("200 OK", kText, "ready\n")
                : Response("503 Service Unavailable", kText, "not ready\n");
}

std::string MetricsServer::Scrape() {
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
  std::string text = prometheus::TextSerializer().Serialize(families);
  own_->bytes.Increment(static_cast<double>(text.size()));
  own_->scrapes.Increment();
  own_->latencies.Observe(
      absl::ToDoubleMicroseconds(Clock::Real().Now() - start));
  return text;
}

}  // namespace kvasir::base
