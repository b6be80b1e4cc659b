#include "base/net/grpc_server.h"

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/net/listen_address.h"
#include "base/status_macros.h"

namespace kvasir::base {
namespace {

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(std::clamp<int64_t>(
      absl::ToInt64Milliseconds(duration), 0, std::numeric_limits<int>::max()));
}

absl::Status BindError(const ListenAddress& listen, absl::string_view where,
                       absl::string_view cause) {
  return absl::FailedPreconditionError(
      absl::StrCat("cannot listen on ", where, ": ", cause,
                   "; choose another with ", listen.flag));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

// gRPC unlinks an existing socket before it binds, even one that somebody
// serves: ask first.
absl::Status CheckUnixPath(const ListenAddress& listen) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (listen.unix_path.size() >= sizeof(address.sun_path)) {
    return BindError(listen, listen.unix_path,
                     absl::StrCat("the path has ", listen.unix_path.size(),
                                  " bytes, a Unix socket's may have ",
                                  sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, listen.unix_path.data(),
              listen.unix_path.size());
  const Descriptor probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (probe.get() < 0) return BindError(listen, listen.unix_path, "no socket");
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address),
                sizeof(address)) == 0) {
    return BindError(listen, listen.unix_path, "another process serves it");
  }
  return absl::OkStatus();
}

// gRPC only logs why a bind failed; trying oneself gives the cause.
absl::Status TryTcp(const ListenAddress& listen) {
  const std::string where = JoinHostPort(listen.host, listen.port);
  if (listen.port < 0 || listen.port > 65535) {
    return BindError(listen, where, "a port is 0 to 65535");
  }
  const ListenTrouble trouble = ProbeListen(listen.host, listen.port);
  switch (trouble.with) {
    case ListenTrouble::With::kHost:
      return absl::FailedPreconditionError(
          absl::StrCat("cannot listen on ", where, ": ", listen.host_flag, " ",
                       listen.host, ": ", trouble.cause));
    case ListenTrouble::With::kPort:
      return BindError(listen, where, trouble.cause);
    case ListenTrouble::With::kNothing:
      break;
  }
  return absl::OkStatus();
}

void SetLimits(const GrpcServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(std::min<int64_t>(
      options.max_receive_message_bytes, std::numeric_limits<int>::max())));
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                              options.max_concurrent_streams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE,
                              options.max_metadata_bytes);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              Milliseconds(options.handshake_timeout));
  builder->AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
      Milliseconds(options.min_ping_interval));
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES,
                              options.max_ping_strikes);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  if (options.max_connection_age != absl::InfiniteDuration()) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                                Milliseconds(options.max_connection_age));
    // The largest value stands for no limit.
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                                std::numeric_limits<int>::max());
  }
  grpc::ResourceQuota quota("kvasir");
  quota.Resize(static_cast<size_t>(options.transport_quota_bytes));
  builder->SetResourceQuota(quota);
}

// The switch is global and not thread-safe.
void UseHealthService(bool enable) {
  static std::mutex* const mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  if (grpc::DefaultHealthCheckServiceEnabled() != enable) {
    grpc::EnableDefaultHealthCheckService(enable);
  }
}

}  // namespace

int64_t MaxMessageBytesFor(int64_t max_model_len_tokens) {
  return 8 * max_model_len_tokens + (int64_t{1} << 20);
}

absl::Status GrpcServer::CheckAddress(const ListenAddress& listen) {
  return listen.unix_path.empty() ? TryTcp(listen) : CheckUnixPath(listen);
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const GrpcServerOptions& options,
    const std::vector<grpc::Service*>& services) {
  const ListenAddress& listen = options.listen;
  KVASIR_RETURN_IF_ERROR(CheckAddress(listen));
  const bool on_unix = !listen.unix_path.empty();
  const std::string where = on_unix ? absl::StrCat("unix:", listen.unix_path)
                                    : JoinHostPort(listen.host, listen.port);
  UseHealthService(options.health_service);
  grpc::ServerBuilder builder;
  SetLimits(options, &builder);
  int bound = 0;
  builder.AddListeningPort(where,
                           options.credentials == nullptr
                               ? grpc::InsecureServerCredentials()
                               : options.credentials,
                           &bound);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || bound == 0) {
    return BindError(listen, where, "bind failed");
  }
  if (grpc::HealthCheckServiceInterface* health =
          server->GetHealthCheckService()) {
    health->SetServingStatus(false);
  }
  const int port = on_unix ? 0 : bound;
  return std::unique_ptr<GrpcServer>(
      new GrpcServer(std::move(server),
                     on_unix ? where : JoinHostPort(listen.host, port), port));
}

GrpcServer::~GrpcServer() { Shutdown(absl::InfinitePast()); }

void GrpcServer::SetServing(const std::string& service, bool serving) {
  if (grpc::HealthCheckServiceInterface* health =
          server_->GetHealthCheckService()) {
    health->SetServingStatus(service, serving);
  }
}

void GrpcServer::Shutdown(absl::Time deadline) {
  // gRPC's clock cannot hold the infinities.
  const absl::Time bounded =
      std::clamp(deadline, absl::Now() - absl::Seconds(1),
                 absl::Now() + absl::Hours(24 * 365));
  server_->Shutdown(absl::ToChronoTime(bounded));
  server_->Wait();
}

}  // namespace kvasir::base
