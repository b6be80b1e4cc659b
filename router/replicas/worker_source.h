// The sources of a router's workers: the entries of --workers.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "router/replicas/membership.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

// A list of workers that changes.
class WorkerSource {
 public:
  virtual ~WorkerSource() = default;
  // The entry of --workers, for texts.
  virtual const std::string& name() const = 0;
  virtual MembershipRules rules() const = 0;
  // Looks the workers up, and may block for minutes. An empty list means that
  // there are certainly none; an error means that they are unknown. Only one
  // thread at a time calls it.
  virtual absl::StatusOr<std::vector<WorkerAddress>> Look() = 0;
};

// Returns the addresses of a host, without a port. NOT_FOUND: the name has
// none. After other errors, this is unknown.
using ResolveHost =
    std::function<absl::StatusOr<std::vector<std::string>>(const std::string&)>;

// Asks the system's resolver (getaddrinfo), so that /etc/hosts and search
// domains work. It does not return times to live; headless Services have short
// ones, so a fixed period is enough. If the host has IPv4 addresses,
// returns only these. Otherwise a worker with an address of each family would
// count twice.
absl::StatusOr<std::vector<std::string>> ResolveBySystem(
    const std::string& host);

struct WorkerList {
  std::vector<WorkerAddress> fixed;
  std::vector<std::unique_ptr<WorkerSource>> sources;
};

// Parses entries of --workers:
//   host:port, unix:/path    one worker
//   dns:///host:port         one worker for each address of the host; their
//                            certificates must have the host's name
//   file:/path               a file with one worker in each line, as host:port
//                            or unix:/path; "#" begins a comment
// Returns INVALID_ARGUMENT for other texts and for an empty list.
absl::StatusOr<WorkerList> ParseWorkers(
    const std::vector<std::string>& entries,
    const ResolveHost& resolve = ResolveBySystem);

}  // namespace kvasir::router
