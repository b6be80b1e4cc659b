// `kvasir generate`: streams one completion from a running server, or from a
// model that is served only for this call.
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/cli/flags.h"
#include "nlohmann/json.hpp"
#include "router/client/text_client.h"
#include "server/commands/commands.h"
#include "server/flags/options.h"
#include "server/runtime/serve_stack.h"
#include "worker/load/device.h"
#include "worker/load/model_options.h"

namespace kvasir::cli {
namespace {

struct GenerateFlags {
  std::string endpoint;
  DialTlsFlags tls;
  ModelOptions model;
  TextRequest request;
  bool stream_forever = false;
  bool json = false;
};

void PrintResult(const TextResult& result, bool json) {
  const std::optional<double> prompt = result.prompt_rate();
  const std::optional<double> decode = result.decode_rate();
  if (json) {
    nlohmann::ordered_json object{
        {"text", result.text},
        {"finish_reason", result.finish_reason},
        {"prompt_tokens", result.prompt_tokens},
        {"output_tokens", result.output_tokens},
        {"time_to_first_token_seconds",
         absl::ToDoubleSeconds(result.time_to_first_token)},
        {"seconds", absl::ToDoubleSeconds(result.total)},
        {"prompt_tokens_per_second", nullptr},
        {"decode_tokens_per_second", nullptr}};
    if (prompt) object["prompt_tokens_per_second"] = *prompt;
    if (decode) object["decode_tokens_per_second"] = *decode;
    std::printf("%s\n",
                object
                    .dump(-1, ' ', false,
                          nlohmann::ordered_json::error_handler_t::replace)
                    .c_str());
    return;
  }
  std::printf("\n");
  std::fflush(stdout);
  const std::string summary = absl::StrFormat(
      "[prompt: %d tokens in %.0f ms%s; output: %d tokens%s; %s]\n",
      result.prompt_tokens,
      absl::ToDoubleMilliseconds(result.time_to_first_token),
      prompt ? absl::StrFormat(", %.1f tokens/s", *prompt) : "",
      result.output_tokens,
      decode ? absl::StrFormat(", %.1f tokens/s", *decode) : "",
      result.finish_reason);
  std::fprintf(stderr, "%s", summary.c_str());
}

int Report(const absl::Status& status) {
  PrintError("kvasir generate", status.ToString());
  return absl::IsUnavailable(status) ? kExitUnavailable : kExitFailed;
}

int Generate(GenerateFlags flags) {
  if (!flags.endpoint.empty() &&
      (!flags.model.model.empty() || flags.model.random_weights)) {
    return Report(absl::InvalidArgumentError(absl::StrCat(
        "--endpoint ", flags.endpoint,
        " asks a server, --model or --random-weights runs a model here: give "
        "one of them")));
  }
  if (flags.endpoint.empty() && flags.model.model.empty() &&
      !flags.model.random_weights) {
    flags.endpoint = "127.0.0.1:8001";
  }
  absl::Status used = CheckFlagsAreUsed(flags.model, flags.endpoint);
  if (used.ok() && !flags.endpoint.empty()) {
    used = CheckDeviceIsUsed(flags.model.device, flags.endpoint);
  }
  if (!used.ok()) return Report(used);
  if (flags.request.prompt == "-") {
    flags.request.prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  }
  if (flags.stream_forever) {
    if (!flags.endpoint.empty()) {
      return Report(absl::InvalidArgumentError(absl::StrCat(
          "--stream-forever runs a model here, with --model: the server at ",
          flags.endpoint, " ends at its max_model_len")));
    }
    flags.request.ignore_eos = true;
    flags.request.max_tokens = kEndlessTokens;
  }
  std::unique_ptr<EphemeralServer> server;
  if (flags.endpoint.empty()) {
    auto started =
        EphemeralServer::Start(flags.model, flags.request.prompt,
                               flags.request.max_tokens, flags.stream_forever);
    if (!started.ok()) return Report(started.status());
    server = *std::move(started);
    flags.endpoint = server->endpoint();
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  if (server == nullptr) {
    auto made = DialCredentials(flags.tls, flags.endpoint);
    if (!made.ok()) return Report(made.status());
    credentials = *std::move(made);
  }
  TextClient client(flags.endpoint, std::move(credentials));
  // True after the prompt was printed, which happens before the first generated
  // text.
  bool begun = false;
  const auto result =
      client.Generate(flags.request, [&](std::string_view delta) {
        if (flags.json) return;
        if (!begun) std::printf("%s", flags.request.prompt.c_str());
        begun = true;
        std::fwrite(delta.data(), 1, delta.size(), stdout);
        std::fflush(stdout);
      });
  if (!result.ok()) {
    if (begun) std::printf("\n");
    return Report(result.status());
  }
  PrintResult(*result, flags.json);
  return kExitOk;
}

}  // namespace

void AddGenerateCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = app->add_subcommand(
      "generate", "stream one completion from a server, or from --model");
  AddFlag(command, "--endpoint", flags->endpoint,
          "the server's gRPC port; default 127.0.0.1:8001 without --model")
      ->type_name("HOST:PORT");
  AddDialTlsFlags(command, &flags->tls);
  AddModelFlags(command, &flags->model);
  AddDeviceFlags(command, &flags->model.device);
  AddFlag(command, "--model-name", flags->request.model,
          "which of the server's models; default: its first");
  command
      ->add_option("--prompt", flags->request.prompt,
                   "the text to continue; - reads standard input")
      ->required();
  AddFlag(command, "--max-tokens", flags->request.max_tokens, "at most")
      ->check(CLI::Range(1, 1 << 24));
  AddFlag(command, "--temperature", flags->request.temperature, "0 is greedy")
      ->check(AtLeast(0));
  AddFlag(command, "--top-p", flags->request.top_p, "1 is off")
      ->check(Above(0))
      ->check(Between(0, 1));
  AddFlag(command, "--top-k", flags->request.top_k, "0 or -1 is off")
      ->check(AtLeast(-1));
  AddFlag(command, "--min-p", flags->request.min_p, "0 is off")
      ->check(Between(0, 1));
  AddFlag(command, "--repetition-penalty", flags->request.repetition_penalty,
          "1 is off")
      ->check(Above(0));
  AddFlag(command, "--request-eviction-budget", flags->request.eviction_budget,
          "the request's eviction_budget, where the plan evicts: slots that "
          "stay (256), a share of the prompt (0.2), or none to evict nothing")
      ->group("Eviction");
  CLI::Option* seed =
      AddFlag(command, "--seed", flags->request.seed, "default: random");
  command->add_option("--stop", flags->request.stop,
                      "text that ends the output; several");
  AddSwitch(command, "--ignore-eos", flags->request.ignore_eos,
            "go on past the end-of-text token");
  AddSwitch(command, "--stream-forever", flags->stream_forever,
            "go on until it is stopped, in a cache that stays the same; the "
            "plan must evict down to a number of slots (--eviction streaming "
            "--eviction-budget 1024 --eviction-rolling)");
  AddSwitch(command, "--json", flags->json, "print one JSON object at the end");
  command->callback([flags, seed, exit_code] {
    flags->request.has_seed = seed->count() > 0;
    *exit_code = Generate(*flags);
  });
}

}  // namespace kvasir::cli
