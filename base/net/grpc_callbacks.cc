#include "base/net/grpc_callbacks.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <memory>

namespace kvasir::base {
namespace {

// A server that nobody can reach: it holds a reference to the threads.
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
  // Never freed: its end would be the end of the threads. Stays reachable, so
  // that it is no leak.
  [[gnu::used]] static Keeper* const keeper = new Keeper;
}

}  // namespace kvasir::base
