// `kvasir drain`: asks a running process to finish and exit.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/cli/flags.h"
#include "base/net/grpc_channel.h"
#include "nlohmann/json.hpp"
#include "proto/kvasir/v1/admin.grpc.pb.h"
#include "server/commands/commands.h"
#include "server/flags/options.h"

namespace kvasir::cli {
namespace {

struct DrainFlags {
  std::string endpoint = "127.0.0.1:8003";
  absl::Duration deadline = absl::ZeroDuration();
  DialTlsFlags tls;
  bool json = false;
};

// Returns the deadline in milliseconds. In the request, 0 means the server's
// own deadline, so other deadlines are rounded up to at least 1 ms.
uint32_t DeadlineMilliseconds(absl::Duration deadline) {
  if (deadline <= absl::ZeroDuration()) return 0;
  const int64_t milliseconds =
      absl::ToInt64Milliseconds(absl::Ceil(deadline, absl::Milliseconds(1)));
  return static_cast<uint32_t>(
      std::min<int64_t>(milliseconds, std::numeric_limits<uint32_t>::max()));
}

int Drain(const DrainFlags& flags) {
  const auto credentials = DialCredentials(flags.tls, flags.endpoint);
  if (!credentials.ok()) {
    PrintError("kvasir drain", credentials.status().ToString());
    return kExitUsage;
  }
  const auto stub = kvasir::v1::Admin::NewStub(
      base::NewGrpcChannel(flags.endpoint, *credentials));
  grpc::ClientContext context;
  if (flags.deadline > absl::ZeroDuration()) {
    // At the drain's deadline, the server aborts the remaining requests. The
    // call's deadline is 10 s later, so that the server has time to answer.
    context.set_deadline(
        absl::ToChronoTime(absl::Now() + flags.deadline + absl::Seconds(10)));
  }
  kvasir::v1::AdminDrainRequest request;
  request.set_deadline_ms(DeadlineMilliseconds(flags.deadline));
  kvasir::v1::AdminDrainResponse response;
  const grpc::Status status = stub->Drain(&context, request, &response);
  if (!status.ok()) {
    // If the server has no Admin service, gRPC's error has no text.
    const bool no_admin =
        status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
        status.error_message().empty();
    std::fprintf(
        stderr, "kvasir drain: %s: %s\n", flags.endpoint.c_str(),
        no_admin
            ? "is a gRPC server that cannot be drained: probably a port for "
              "clients; give the address of the --admin-port"
            : status.error_message().c_str());
    return status.error_code() == grpc::StatusCode::UNAVAILABLE
               ? kExitUnavailable
               : kExitFailed;
  }
  if (flags.json) {
    std::printf("%s\n", nlohmann::json{{"finished", response.finished()},
                                       {"aborted", response.aborted()}}
                            .dump()
                            .c_str());
  } else {
    std::printf("drained: %u requests finished, %u aborted\n",
                response.finished(), response.aborted());
  }
  return kExitOk;
}

}  // namespace

void AddDrainCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<DrainFlags>();
  CLI::App* command = app->add_subcommand(
      "drain", "ask a running kvasir to refuse new requests, finish, and exit");
  AddFlag(command, "--endpoint", flags->endpoint,
          "HOST:PORT or unix:/path of the server's admin port")
      ->type_name("HOST:PORT");
  AddDialTlsFlags(command, &flags->tls);
  AddDuration(command, "--deadline", flags->deadline,
              "abort what still runs after this; 0: the server's "
              "--drain-timeout");
  AddSwitch(command, "--json", flags->json, "print a JSON object");
  command->callback([flags, exit_code] { *exit_code = Drain(*flags); });
}

}  // namespace kvasir::cli
