#include "router/replicas/worker_source.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/read_file.h"
#include "base/status_macros.h"

namespace kvasir::router {
namespace {

constexpr absl::string_view kDns = "dns:";
constexpr absl::string_view kFile = "file:";
constexpr absl::string_view kUnix = "unix:";
constexpr size_t kMostFileBytes = 1 << 20;
// Answers of name servers can be incomplete or outdated.
constexpr MembershipRules kDnsRules = {.answers_to_remove = 3,
                                       .empty_keeps_live = true};

absl::Status Wrong(absl::string_view entry, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("--workers ", entry, ": ", what));
}

struct HostPort {
  std::string host;  // without brackets
  int port = 0;
};

// Parses "host:port" or "[IPv6]:port".
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text) {
  HostPort parsed;
  const size_t colon = text.rfind(':');
  const absl::string_view host =
      colon == absl::string_view::npos ? "" : text.substr(0, colon);
  if (host.empty() || !absl::SimpleAtoi(text.substr(colon + 1), &parsed.port) ||
      parsed.port < 1 || parsed.port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", text, "' is not HOST:PORT with a port of 1 to 65535"));
  }
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    parsed.host = std::string(host.substr(1, host.size() - 2));
  } else if (absl::StrContains(host, ':') || absl::StrContains(host, '/')) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", host,
                     "' is not a host (IPv6 addresses need "
                     "brackets, as in [::1]:8100)"));
  } else {
    parsed.host = std::string(host);
  }
  return parsed;
}

class DnsSource final : public WorkerSource {
 public:
  DnsSource(std::string name, HostPort at, ResolveHost resolve)
      : name_(std::move(name)), at_(std::move(at)), resolve_(resolve) {}

  const std::string& name() const override { return name_; }
  MembershipRules rules() const override { return kDnsRules; }
  absl::StatusOr<std::vector<WorkerAddress>> Look() override {
    const absl::StatusOr<std::vector<std::string>> found = resolve_(at_.host);
    std::vector<WorkerAddress> workers;
    if (absl::IsNotFound(found.status())) return workers;
    KVASIR_RETURN_IF_ERROR(found.status());
    for (const std::string& address : *found) {
      const bool v6 = absl::StrContains(address, ':');
      workers.push_back({.target = absl::StrCat(v6 ? "[" : "", address,
                                                v6 ? "]:" : ":", at_.port),
                         .tls_name = at_.host});
    }
    return workers;
  }

 private:
  const std::string name_;
  const HostPort at_;
  const ResolveHost resolve_;
};

class FileSource final : public WorkerSource {
 public:
  explicit FileSource(std::string name)
      : name_(std::move(name)), path_(name_.substr(kFile.size())) {}

  const std::string& name() const override { return name_; }
  MembershipRules rules() const override { return {}; }
  absl::StatusOr<std::vector<WorkerAddress>> Look() override {
    KVASIR_ASSIGN_OR_RETURN(const std::string text,
                            base::ReadFile(path_, kMostFileBytes));
    std::vector<WorkerAddress> workers;
    int number = 0;
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      ++number;
      line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
      if (line.empty()) continue;
      if (!absl::StartsWith(line, kUnix)) {
        const absl::Status status = ParseHostPort(line).status();
        if (!status.ok()) {
          return absl::InvalidArgumentError(
              absl::StrCat("line ", number, ": ", status.message()));
        }
      }
      workers.push_back({std::string(line)});
    }
    return workers;
  }

 private:
  const std::string name_;
  const std::string path_;
};

// The addresses of one family; empty if the host has none.
absl::StatusOr<std::vector<std::string>> ResolveFamily(const std::string& host,
                                                       int family) {
  addrinfo hints = {};
  hints.ai_family = family;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  std::vector<std::string> addresses;
  if (error == EAI_NONAME || error == EAI_NODATA || error == EAI_ADDRFAMILY) {
    return addresses;
  }
  if (error != 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot resolve ", host, ": ",
        error == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(error)));
  }
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    char text[NI_MAXHOST];
    if (::getnameinfo(at->ai_addr, at->ai_addrlen, text, sizeof(text), nullptr,
                      0, NI_NUMERICHOST) == 0) {
      addresses.emplace_back(text);
    }
  }
  ::freeaddrinfo(found);
  return addresses;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ResolveBySystem(
    const std::string& host) {
  KVASIR_ASSIGN_OR_RETURN(std::vector<std::string> found,
                          ResolveFamily(host, AF_INET));
  if (!found.empty()) return found;
  KVASIR_ASSIGN_OR_RETURN(found, ResolveFamily(host, AF_INET6));
  if (!found.empty()) return found;
  return absl::NotFoundError(absl::StrCat(host, " has no addresses"));
}

absl::StatusOr<WorkerList> ParseWorkers(const std::vector<std::string>& entries,
                                        const ResolveHost& resolve) {
  WorkerList list;
  for (const std::string& entry : entries) {
    if (absl::StartsWith(entry, kDns)) {
      absl::string_view at = absl::string_view(entry).substr(kDns.size());
      if (absl::StartsWith(at, "//") && !absl::StartsWith(at, "///")) {
        return Wrong(entry, "a name server cannot be chosen: dns:///HOST:PORT");
      }
      absl::ConsumePrefix(&at, "///");
      const absl::StatusOr<HostPort> parsed = ParseHostPort(at);
      if (!parsed.ok()) return Wrong(entry, parsed.status().message());
      list.sources.push_back(
          std::make_unique<DnsSource>(entry, *parsed, resolve));
    } else if (absl::StartsWith(entry, kFile)) {
      if (entry.size() == kFile.size()) return Wrong(entry, "give file:PATH");
      list.sources.push_back(std::make_unique<FileSource>(entry));
    } else if (!entry.empty()) {
      list.fixed.push_back({entry});
    }
  }
  if (list.fixed.empty() && list.sources.empty()) {
    return absl::InvalidArgumentError(
        "--workers: give at least one worker, as HOST:PORT, unix:/PATH, "
        "dns:///HOST:PORT or file:PATH");
  }
  return list;
}

}  // namespace kvasir::router
