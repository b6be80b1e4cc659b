#include "server/runtime/serve_stack.h"

#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/cli/process.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "model/shapes/config.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::cli {
namespace {

constexpr absl::string_view kWorkerSocket = "/worker.sock";
constexpr absl::string_view kRouterSocket = "/router.sock";

// Creates the folder for the sockets. Uses /tmp if paths in the temporary
// folder would be too long for a Unix socket.
absl::StatusOr<std::string> MakeFolderOfSockets() {
  const std::string parent = TemporaryFolder();
  const size_t longest = parent.size() + kPrivateFolderName.size() +
                         std::max(kWorkerSocket.size(), kRouterSocket.size());
  return MakePrivateFolder(longest < sizeof(sockaddr_un::sun_path) ? parent
                                                                   : "/tmp");
}

void RemoveFolder(const std::string& folder) {
  if (folder.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServeStack>> ServeStack::Create(
    ServeStackOptions options) {
  auto stack = std::unique_ptr<ServeStack>(new ServeStack());
  std::shared_ptr<const model::Tokenizer> tokenizer = options.tokenizer;
  if (tokenizer == nullptr && !options.model.model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(tokenizer, LoadTokenizer(options.model.model));
  }

  WorkerRuntimeOptions worker;
  worker.model = options.model;
  worker.engine = options.engine;
  worker.group = std::move(options.group);
  worker.listen = [stack =
                       stack.get()]() -> absl::StatusOr<base::ListenAddress> {
    KVASIR_ASSIGN_OR_RETURN(stack->socket_folder_, MakeFolderOfSockets());
    base::ListenAddress address;
    address.unix_path = absl::StrCat(stack->socket_folder_, kWorkerSocket);
    return address;
  };
  worker.tokenizer = tokenizer;
  worker.on_fatal = std::move(options.on_fatal);
  worker.progress = std::move(options.progress);
  KVASIR_ASSIGN_OR_RETURN(stack->worker_,
                          WorkerRuntime::Create(std::move(worker)));

  RouterRuntimeOptions router;
  router.router = std::move(options.router);
  router.router.workers = {stack->worker_->target()};
  router.workers_in_process = true;
  router.listen = std::move(options.listen);
  router.credentials = std::move(options.credentials);
  router.callers = std::move(options.callers);
  router.max_connections = options.max_connections;
  router.max_connection_age = options.max_connection_age;
  if (options.listens_privately) {
    router.listen.unix_path =
        absl::StrCat(stack->socket_folder_, kRouterSocket);
    // Connections to a private server have no age limit, because gRPC 1.51 may
    // cut off an answer when it closes an aged connection. Its only client has
    // no other server anyway.
    router.max_connection_age = absl::InfiniteDuration();
  }
  router.on_health = std::move(options.on_health);
  router.queue_timeout = options.engine.queue_timeout;
  router.default_max_tokens = options.engine.default_max_tokens;
  router.tokenizer = std::move(tokenizer);
  router.tokenizer_folder = options.model.model;
  KVASIR_ASSIGN_OR_RETURN(stack->router_,
                          RouterRuntime::Create(std::move(router)));
  return stack;
}

ServeStack::~ServeStack() {
  router_.reset();
  worker_.reset();
  RemoveFolder(socket_folder_);
}

NodeReport ServeStack::Report() const {
  NodeReport report = router_->Report();
  report.ranks = worker_->Report().ranks;
  return report;
}

Node::MetricsSources ServeStack::Metrics() const {
  MetricsSources sources = worker_->Metrics();
  for (auto& source : router_->Metrics()) sources.push_back(std::move(source));
  return sources;
}

DrainOutcome ServeStack::Drain(absl::Duration deadline) {
  const DrainOutcome outcome = router_->Drain(deadline);
  // A short time suffices, because all requests came through the router, which
  // has been drained.
  worker_->Drain(absl::Seconds(5));
  return outcome;
}

absl::StatusOr<std::unique_ptr<EphemeralServer>> EphemeralServer::Start(
    const ModelOptions& model, const std::string& prompt, int64_t max_tokens,
    bool endless) {
  base::InitLogging(base::LogFormat::kText, base::LogLevel::kWarning);
  ServeStackOptions options;
  options.model = model;
  if (!model.random_weights) {
    KVASIR_ASSIGN_OR_RETURN(options.tokenizer, LoadTokenizer(model.model));
  }
  if (options.tokenizer == nullptr) {
    return absl::NotFoundError(absl::StrCat(
        model.random_weights
            ? "--random-weights has no tokenizer"
            : absl::StrCat("--model ", model.model, " has no tokenizer"),
        ", so a text cannot be tokenized; `kvasir serve` accepts token ids "
        "(docs/kserve.md)"));
  }
  KVASIR_ASSIGN_OR_RETURN(const model::DecoderSpec spec,
                          model::LoadModelConfig(model.model));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                          options.tokenizer->Encode(prompt));
  options.engine.plan_check = "off";  // the context may be too short for it
  options.engine.max_num_seqs = 1;
  // Do not exceed the model's maximum length, so that the error for a longer
  // prompt names it.
  options.engine.max_model_len = std::min(
      endless ? kEndlessTokens : spec.max_position_embeddings,
      std::max<int64_t>(2, static_cast<int64_t>(ids.size()) + max_tokens));
  auto server = std::unique_ptr<EphemeralServer>(new EphemeralServer());
  options.listens_privately = true;
  // Do nothing, because a failed engine makes the command's own call fail.
  options.on_fatal = [](const std::string&) {};
  KVASIR_ASSIGN_OR_RETURN(server->stack_,
                          ServeStack::Create(std::move(options)));
  return server;
}

}  // namespace kvasir::cli
