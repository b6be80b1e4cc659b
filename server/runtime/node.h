// The interface of a node: the running server of the command `serve`, `router`,
// `worker` or `rank`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "model/tokenizer/tokenizer.h"
#include "prometheus/collectable.h"
#include "server/runtime/admin_service.h"
#include "worker/ranks/group/rank_leader.h"

namespace kvasir::cli {

// The addresses and names of a node that is ready.
struct NodeReport {
  // the address that clients call; of a worker: the address that routers call
  std::string grpc;
  std::string leader;  // only for a rank: its leader's address
  // a model name that clients may request; empty for a worker
  std::string model;
  // null: requests must contain token ids
  const model::Tokenizer* tokenizer = nullptr;
  // The other ranks of the node's group; empty if there is no group.
  std::vector<worker::RankMember> ranks;
};

// Runs from its creation until it is drained. Each kind of node has a static
// Create(options), which returns when the node is ready.
// Threads: one thread calls Create, Drain and the destructor.
class Node {
 public:
  using MetricsSources = std::vector<std::shared_ptr<prometheus::Collectable>>;

  virtual ~Node() = default;
  virtual NodeReport Report() const = 0;
  // The value of the label `model_name` of metrics.
  virtual std::string model_name() const = 0;
  // The sources of the node's metrics, which may be read even after the node
  // is destroyed.
  virtual MetricsSources Metrics() const = 0;
  // Refuses new requests, waits at most `deadline` for running ones, and aborts
  // the rest.
  virtual DrainOutcome Drain(absl::Duration deadline) = 0;
};

}  // namespace kvasir::cli
