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
    return Report(absl::InvalidArgumentError(
        absl::StrCat("--endpoint ", flags.endpoint,
                     " sends the prompt to a server, but --model and "
                     "--random-weights run a model here: give only one of "
                     "them")));
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
          "--stream-forever needs a model that runs here (--model): "
          "the server at ",
          flags.endpoint, " ends each text at its max_model_len")));
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
  // True after the prompt has been printed, which happens just before the first
  // generated text.
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
      "generate",
      "stream one completion from a server, or from a model "
      "that runs only for this call (--model)");
  AddFlag(command, "--endpoint", flags->endpoint,
          "HOST:PORT or unix:/path of the server's gRPC port; "
          "default without --model: 127.0.0.1:8001")
      ->type_name("HOST:PORT");
  AddDialTlsFlags(command, &flags->tls);
  AddModelFlags(command, &flags->model);
  AddDeviceFlags(command, &flags->model.device);
  AddFlag(command, "--model-name", flags->request.model,
          "the server's model to use; default: its first model");
  command
      ->add_option("--prompt", flags->request.prompt,
                   "the text to continue; - reads standard input")
      ->required();
  AddFlag(command, "--max-tokens", flags->request.max_tokens,
          "the most tokens to generate")
      ->check(CLI::Range(1, 1 << 24));
  AddFlag(command, "--temperature", flags->request.temperature,
          "sampling temperature; 0: always the most probable token")
      ->check(AtLeast(0));
  AddFlag(command, "--top-p", flags->request.top_p,
          "sample only from the most probable tokens that together have this "
          "probability; 1: from all")
      ->check(Above(0))
      ->check(Between(0, 1));
  AddFlag(command, "--top-k", flags->request.top_k,
          "sample only from the K most probable tokens; 0 or -1: "
          "from all")
      ->check(AtLeast(-1));
  AddFlag(command, "--min-p", flags->request.min_p,
          "sample only tokens with at least this fraction of the "
          "largest probability; 0: all")
      ->check(Between(0, 1));
  AddFlag(command, "--repetition-penalty", flags->request.repetition_penalty,
          "penalty for tokens that already occurred; above 1 they become less "
          "likely, 1: off")
      ->check(Above(0));
  AddFlag(command, "--request-eviction-budget", flags->request.eviction_budget,
          "the request's eviction_budget, if the plan evicts: a "
          "number of slots that stay (256), a share of the prompt "
          "(0.2), or none to evict nothing")
      ->group("Eviction");
  CLI::Option* seed =
      AddFlag(command, "--seed", flags->request.seed, "default: random");
  command->add_option("--stop", flags->request.stop,
                      "text that ends the output; may be given several times");
  AddSwitch(command, "--ignore-eos", flags->request.ignore_eos,
            "continue after the end-of-text token");
  AddSwitch(
      command, "--stream-forever", flags->stream_forever,
      "continue until the program is stopped, in a cache of constant "
      "size; the plan must evict to a number of slots (--eviction streaming "
      "--eviction-budget 1024 --eviction-rolling)");
  AddSwitch(command, "--json", flags->json, "print one JSON object at the end");
  command->callback([flags, seed, exit_code] {
    flags->request.has_seed = seed->count() > 0;
    *exit_code = Generate(*flags);
  });
}

}  // namespace kvasir::cli
