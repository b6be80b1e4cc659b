// `kvasir check-plan`: compares a model's predictions with a plan's cache and
// with a dense cache, as servers do when they start.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/cli/exit_code.h"
#include "base/cli/flags.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "server/commands/commands.h"
#include "server/runtime/plan_check.h"
#include "server/runtime/router_runtime.h"
#include "worker/load/model_options.h"
#include "worker/load/model_source.h"
#include "worker/load/text_tokens.h"

namespace kvasir::cli {
namespace {

struct CheckPlanFlags {
  ModelOptions model;
  std::string text;
  int64_t tokens = kPlanCheckTokens;
  bool json = false;
};

void Print(const worker::PlanCheck& check, bool json) {
  if (json) {
    nlohmann::ordered_json found{{"plan", check.plan}};
    if (check.is_dense || check.tokens > 0) {
      found["kl"] = check.kl;
      found["tokens"] = check.tokens;
      found["seconds"] = absl::ToDoubleSeconds(check.duration);
    } else {
      found["not_compared"] = check.skipped;
    }
    std::printf("%s\n", found.dump().c_str());
  } else if (check.is_dense) {
    std::printf("plan check: the cache is not compressed\n");
  } else if (!check.skipped.empty()) {
    std::printf("plan check: %s: not compared: %s\n", check.plan.c_str(),
                check.skipped.c_str());
  } else {
    std::printf(
        "plan check: %s: KL %.4f a token over %lld tokens, %s\n",
        check.plan.c_str(), check.kl, static_cast<long long>(check.tokens),
        check.is_known
            ? "measured earlier"
            : absl::StrFormat("%.1f s", absl::ToDoubleSeconds(check.duration))
                  .c_str());
  }
}

absl::Status Run(const CheckPlanFlags& flags) {
  LoadRequest request = {.model = flags.model, .prefix_reuse = false};
  std::shared_ptr<const model::Tokenizer> tokenizer;
  if (!flags.model.model.empty()) {
    KVASIR_ASSIGN_OR_RETURN(tokenizer, LoadTokenizer(flags.model.model));
  }
  KVASIR_ASSIGN_OR_RETURN(const ModelSource source,
                          OpenModelSource(flags.model, PlanUse::kLook));
  request.max_model_len =
      std::min(flags.tokens, source.spec.max_position_embeddings);
  if (!flags.text.empty()) {
    KVASIR_ASSIGN_OR_RETURN(TextTokens text,
                            ReadTextTokens(flags.model.model, flags.text));
    text.ids.resize(
        std::min(text.ids.size(), static_cast<size_t>(request.max_model_len)));
    request.plan_check = {.token_ids = std::move(text.ids),
                          .time_limit = absl::InfiniteDuration()};
  }
  KVASIR_ASSIGN_OR_RETURN(
      const std::unique_ptr<LoadedModel> model,
      LoadWithPlanCheck(tokenizer.get(), "refuse", std::move(request)));
  Print(model->rank().plan_checks().back(), flags.json);
  return absl::OkStatus();
}

}  // namespace

void AddCheckPlanCommand(CLI::App* app, int* exit_code) {
  auto flags = std::make_shared<CheckPlanFlags>();
  CLI::App* command = app->add_subcommand(
      "check-plan",
      "compare the predictions of a model with a plan's cache and with a dense "
      "cache, as serve and worker do when they start");
  AddModelFlags(command, &flags->model);
  AddDeviceFlags(command, &flags->model.device);
  CLI::Option* const text = AddFlag(
      command, "--text", flags->text,
      "text to predict instead of the built-in one, with no limit of time; the "
      "second half of its tokens is compared");
  AddFlag(command, "--tokens", flags->tokens,
          "with --text: the number of its first tokens to use; give more than "
          "four times the tokens that the plan keeps exact")
      ->check(CLI::Range(2, 1 << 20))
      ->needs(text);
  AddSwitch(command, "--json", flags->json, "print JSON");
  command->callback([flags, exit_code] {
    RequireModel(flags->model);
    base::InitLogging(base::LogFormat::kText, base::LogLevel::kWarning);
    const absl::Status status = Run(*flags);
    if (status.ok()) return;
    PrintError("kvasir check-plan", status.ToString());
    *exit_code = kExitFailed;
  });
}

}  // namespace kvasir::cli
