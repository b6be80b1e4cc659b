#include "base/net/grpc_callbacks.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <memory>

namespace kvasir::base {
namespace {

// A gRPC server without an address. It exists only because its reference keeps
// the callback threads alive.
struct Keeper {
  Keeper() {
    grpc::ServerBuilder builder;
    builder.RegisterCallbackGenericService(&service);
    server = builder.BuildAndStart();
  }
  grpc::CallbackGenericService service;
  std::unique_ptr<grpc::Server> server;
};

}  // namespace

void KeepGrpcCallbackThreads() {
  // Never freed, because its destructor would end the threads. It stays
  // reachable, so that leak checkers do not report it.
  [[gnu::used]] static Keeper* const keeper = new Keeper;
}

}  // namespace kvasir::base
