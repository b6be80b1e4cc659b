#include "server/runtime/plan_check.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/read_file.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "model/files/json.h"
#include "nlohmann/json.hpp"
#include "worker/load/model_options.h"
#include "worker/load/sample_text.h"

namespace kvasir::cli {
namespace {

// The time limit of --kv-plan auto. It is longer than that of one check,
// because without a result the dense plan is served.
constexpr absl::Duration kAutoTimeLimit = absl::Minutes(1);

// The key of a kept result contains this version. To discard old results,
// change it.
constexpr char kCheckVersion[] = "3\n";

// Returns the folder that keeps the results of checks; empty if there is none.
std::string FolderOfChecks() {
  for (const auto& [variable, below] :
       {std::pair("XDG_CACHE_HOME", ""), std::pair("HOME", "/.cache")}) {
    const char* const folder = std::getenv(variable);
    if (folder != nullptr && folder[0] == '/') {
      return absl::StrCat(folder, below, "/kvasir/plan-checks");
    }
  }
  return "";
}

std::string FileOfCheck(const std::string& key) {
  return absl::StrCat(FolderOfChecks(), "/",
                      base::Sha256Hex(absl::StrCat(kCheckVersion, key)),
                      ".json");
}

std::optional<worker::PlanCheck> KnownCheck(const std::string& key) {
  if (FolderOfChecks().empty()) return std::nullopt;
  constexpr size_t kMostBytes = 4096;
  const auto text = base::ReadFile(FileOfCheck(key), kMostBytes);
  if (!text.ok()) return std::nullopt;
  const auto json = model::ParseJson(*text, "plan check");
  if (!json.ok()) return std::nullopt;
  const model::JsonFields fields(*json, "plan check");
  const auto kl = fields.NumberIn("kl", -1, 1e9);
  const auto tokens = fields.IntIn("tokens", 1, kPlanCheckTokens);
  if (!kl.ok() || !tokens.ok()) return std::nullopt;
  worker::PlanCheck check;
  check.kl = *kl;
  check.tokens = *tokens;
  check.is_known = true;
  return check;
}

// Keeps a result for later starts. If it cannot be written, the next start
// measures again.
void KeepCheck(const worker::PlanCheck& check) {
  if (check.key.empty() || FolderOfChecks().empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(FolderOfChecks(), ignored);
  const std::string file = FileOfCheck(check.key);
  // Rename replaces the whole file at once, so other servers never read a part.
  const std::string part = absl::StrCat(file, ".", ::getpid());
  std::ofstream(part)
      << nlohmann::json{{"kl", check.kl}, {"tokens", check.tokens}}.dump();
  std::filesystem::rename(part, file, ignored);
}

void LogPlanCheck(const worker::PlanCheck& check) {
  if (check.is_dense) return;
  if (!check.skipped.empty()) {
    const auto log = check.skipped == worker::kPlanHasOwnWeights
                         ? &base::LogInfo
                         : &base::LogWarning;
    log("plan check skipped", {{"plan", check.plan}, {"why", check.skipped}});
    return;
  }
  base::LogInfo("plan check",
                {{"plan", check.plan},
                 {"kl_per_token", check.kl},
                 {"tokens", check.tokens},
                 {"seconds", absl::ToDoubleSeconds(check.duration)},
                 {"known", check.is_known ? "yes" : "no"}});
}

absl::Status Judge(const worker::PlanCheck& check, absl::string_view mode) {
  if (check.is_dense || !check.skipped.empty() || check.kl <= kPlanCheckWarns) {
    return absl::OkStatus();
  }
  const std::string found = absl::StrFormat(
      "the plan %s changes this model: the predictions differ from those with "
      "a dense cache by a divergence of %.3f nats a token",
      check.plan, check.kl);
  // This form of the condition also refuses NaN.
  if (mode == "refuse" && !(check.kl <= kPlanCheckRefuses)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s, the limit is %g; use --kv-plan auto, or --plan-check warn to "
        "serve the plan anyway",
        found, kPlanCheckRefuses));
  }
  base::LogWarning(found, {{"recommended_limit", kPlanCheckWarns},
                           {"instead", "--kv-plan auto"}});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<LoadedModel>> LoadWithPlanCheck(
    const model::Tokenizer* tokenizer, absl::string_view mode,
    LoadRequest request) {
  const bool is_auto = request.model.kv_plan == kAutoPlan;
  request.tokenizer = tokenizer;
  // All ranks of a group have the same results, so only the first one logs
  // them.
  const bool logs =
      request.group == nullptr || request.group->shard().rank == 0;
  const auto log_means = [logs](const LoadedModel& model) {
    if (!logs || !model.rank().served_plan()->can_leave_key_means_out()) return;
    base::LogInfo("means of keys",
                  {{"left_out_of_codes",
                    model.rank().leaves_key_means_out() ? "yes" : "no"}});
  };
  if (mode == "off") {
    base::LogInfo("plan check off", {});
    KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<LoadedModel> model,
                            LoadedModel::Load(request));
    log_means(*model);
    return model;
  }
  const bool built_in = !request.plan_check.has_value();
  if (built_in) {
    request.plan_check = {
        .token_ids = SampleTokens(tokenizer, kPlanCheckTokens),
        .known = KnownCheck};
    if (is_auto) request.plan_check->time_limit = kAutoTimeLimit;
  }
  request.plan_check->most_kl = kPlanCheckAuto;
  request.choose_plan = is_auto;
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<LoadedModel> model,
                          LoadedModel::Load(request));
  const worker::Rank& rank = model->rank();
  const std::string& plan = rank.plan().source.method();
  log_means(*model);
  if (logs) {
    for (const worker::PlanCheck& check : rank.plan_checks()) {
      if (built_in) KeepCheck(check);
      LogPlanCheck(check);
    }
    if (is_auto) base::LogInfo("--kv-plan auto", {{"plan", plan}});
  }
  const worker::PlanCheck& served = rank.plan_checks().back();
  KVASIR_RETURN_IF_ERROR(Judge(served, mode));
  return model;
}

}  // namespace kvasir::cli
