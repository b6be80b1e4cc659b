#include "base/net/grpc_server.h"

#include <grpc/compression.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/support/server_interceptor.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/net/grpc_status.h"
#include "base/net/header_blocks.h"
#include "base/status_macros.h"

namespace kvasir::base {
namespace {

// The most threads that gRPC may use for reflection calls.
constexpr int kMaxReflectionThreads = 8;

int Milliseconds(absl::Duration duration) {
  return static_cast<int>(std::clamp<int64_t>(
      absl::ToInt64Milliseconds(duration), 0, std::numeric_limits<int>::max()));
}

void SetLimits(const GrpcServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(std::min<int64_t>(
      options.max_receive_message_bytes, std::numeric_limits<int>::max())));
  // A megabyte of gzip may decompress into a message of a gigabyte. Compressed
  // messages are therefore refused (UNIMPLEMENTED) before anything
  // decompresses them.
  builder->AddChannelArgument(
      GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
      1 << GRPC_COMPRESS_NONE);
  builder->AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
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
  // Gateways also ping connections that have no calls. Without this option,
  // pings on such a connection count as strikes if they are less than two hours
  // apart, even if min_ping_interval is shorter.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                              Milliseconds(options.max_connection_idle));
  if (options.max_connection_age != absl::InfiniteDuration()) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                                Milliseconds(options.max_connection_age));
    // The largest value means no limit.
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                                std::numeric_limits<int>::max());
  }
  grpc::ResourceQuota quota("kvasir");
  quota.Resize(static_cast<size_t>(options.transport_quota_bytes));
  quota.SetMaxThreads(kMaxReflectionThreads);
  builder->SetResourceQuota(quota);
}

// Turns reflection on or off for one server. gRPC's reflection library adds
// its plugin to every server of a process that links it; this option removes
// it again.
class Reflection final : public grpc::ServerBuilderOption {
 public:
  explicit Reflection(bool wanted) : wanted_(wanted) {}

  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>*
                         plugins) override {
    auto own =
        std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>();
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [&own](const auto& plugin) {
                                    return plugin->name() == own->name();
                                  }),
                   plugins->end());
    if (wanted_) plugins->push_back(std::move(own));
  }

 private:
  const bool wanted_;
};

// Turns reflection on or off. Reflection is the only service that takes a
// thread for each open call, so the number of threads is limited.
void SetReflection(bool wanted, grpc::ServerBuilder* builder) {
  builder->SetOption(std::make_unique<Reflection>(wanted));
  if (!wanted) return;
  using Option = grpc::ServerBuilder::SyncServerOption;
  builder->SetSyncServerOption(Option::NUM_CQS, 1);
  builder->SetSyncServerOption(Option::MIN_POLLERS, 1);
  builder->SetSyncServerOption(Option::MAX_POLLERS, 1);
}

// Replaces gRPC's answer to requests that cannot be parsed as the call's
// message type. gRPC would answer UNIMPLEMENTED without a text, as if the
// method did not exist.
class ExplainGarbage final : public grpc::experimental::Interceptor {
 public:
  using OnGarbage = decltype(GrpcServerOptions::on_garbage);

  // `call` and `on_garbage` must outlive this interceptor.
  ExplainGarbage(grpc::experimental::ServerRpcInfo* call,
                 const OnGarbage* on_garbage)
      : call_(call), on_garbage_(on_garbage) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    // A null message means that parsing failed. If the method is unknown, gRPC
    // does not reach this point.
    if (batch->QueryInterceptionHookPoint(Point::POST_RECV_MESSAGE) &&
        batch->GetRecvMessage() == nullptr) {
      no_message_ = true;
    }
    if (no_message_ &&
        batch->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS)) {
      const grpc::Status status = batch->GetSendStatus();
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
          status.error_message().empty()) {
        absl::Status end = absl::OkStatus();
        if (*on_garbage_)
          end = (*on_garbage_)(call_->method(), *call_->server_context());
        if (end.ok()) {
          end = absl::InvalidArgumentError(
              absl::StrCat("the request is not a valid protobuf message for ",
                           call_->method()));
        }
        batch->ModifySendStatus(ToGrpcStatus(end));
      }
    }
    batch->Proceed();
  }

 private:
  grpc::experimental::ServerRpcInfo* const call_;
  const OnGarbage* const on_garbage_;
  bool no_message_ = false;
};

class GarbageInterceptors final
    : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit GarbageInterceptors(ExplainGarbage::OnGarbage on_garbage)
      : on_garbage_(std::move(on_garbage)) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    // In a stream of requests, a message that cannot be parsed only ends the
    // stream, so there is no status to change.
    using Kind = grpc::experimental::ServerRpcInfo::Type;
    if (info->type() == Kind::BIDI_STREAMING ||
        info->type() == Kind::CLIENT_STREAMING) {
      return nullptr;
    }
    return new ExplainGarbage(info, &on_garbage_);
  }

 private:
  const ExplainGarbage::OnGarbage on_garbage_;
};

void AddInterceptors(const GrpcServerOptions& options,
                     grpc::ServerBuilder* builder) {
  std::vector<
      std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
      factories;
  factories.push_back(
      std::make_unique<GarbageInterceptors>(options.on_garbage));
  builder->experimental().SetInterceptorCreators(std::move(factories));
}

// Turns gRPC's health service on or off for the servers that are built next.
// gRPC's switch is global and not thread-safe.
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

size_t RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  // The hard limit may be infinite, so it is bounded here.
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, kMaxDescriptors);
  if (limit.rlim_cur < wanted) {
    const rlimit raised{wanted, limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit.rlim_cur = wanted;
  }
  return static_cast<size_t>(std::min<rlim_t>(limit.rlim_cur, kMaxDescriptors));
}

absl::Status GrpcServer::CheckAddress(const ListenAddress& listen) {
  return Acceptor::Check(listen);
}

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const GrpcServerOptions& options,
    const std::vector<grpc::Service*>& services) {
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<Acceptor> acceptor,
                          Acceptor::Listen(options.listen));
  UseHealthService(options.health_service);
  grpc::ServerBuilder builder;
  SetLimits(options, &builder);
  using External = grpc::ServerBuilder::experimental_type;
  if (options.explain_garbage) AddInterceptors(options, &builder);
  SetReflection(options.reflection, &builder);
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> door =
      builder.experimental().AddExternalConnectionAcceptor(
          External::ExternalConnectionType::FROM_FD,
          options.credentials == nullptr ? grpc::InsecureServerCredentials()
                                         : options.credentials);
  for (grpc::Service* service : services) builder.RegisterService(service);
  // Used if there is only the health service: gRPC starts no server without
  // another service.
  auto nothing = std::make_unique<grpc::CallbackGenericService>();
  if (services.empty()) builder.RegisterCallbackGenericService(nothing.get());
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    return absl::InternalError(
        absl::StrCat("cannot start a gRPC server for ", acceptor->target()));
  }
  if (grpc::HealthCheckServiceInterface* health =
          server->GetHealthCheckService()) {
    health->SetServingStatus(false);
  }
  acceptor->Run(
      {.max_connections = options.max_connections > 0
                              ? options.max_connections
                              : RaiseDescriptorLimit() / 2,
       .replace_oldest = options.replace_oldest_connection,
       .probe_interval = options.probe_interval,
       .take = [door,
                plain_text = options.credentials == nullptr](int connection) {
         if (plain_text) LimitHeaderBlocks(connection);
         grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters
             parameters;
         parameters.fd = connection;
         door->HandleNewConnection(&parameters);
       }});
  return std::unique_ptr<GrpcServer>(new GrpcServer(
      std::move(acceptor), std::move(nothing), std::move(server)));
}

GrpcServer::~GrpcServer() { Shutdown(absl::InfinitePast()); }

void GrpcServer::SetServing(const std::string& service, bool serving) {
  if (grpc::HealthCheckServiceInterface* health =
          server_->GetHealthCheckService()) {
    health->SetServingStatus(service, serving);
  }
}

void GrpcServer::Shutdown(absl::Time deadline, bool hang_up) {
  acceptor_->StopListening();
  if (hang_up) {
    acceptor_->HangUp();
    // gRPC notices only later, on its own threads, that the connections
    // are closed.
    while (acceptor_->connections() > 0 && absl::Now() < deadline) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  // gRPC's clock cannot represent the infinities.
  const absl::Time bounded =
      std::clamp(deadline, absl::Now() - absl::Seconds(1),
                 absl::Now() + absl::Hours(24 * 365));
  server_->Shutdown(absl::ToChronoTime(bounded));
  server_->Wait();
}

}  // namespace kvasir::base
