#include "plan/eviction_flags.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/status_macros.h"
#include "plan/plan.h"

namespace kvasir::cli {
namespace {

// The eviction's settings as text for the plan's method name, including the
// defaults.
std::string OptionsOf(const EvictionFlags& flags,
                      const plan::EvictionSettings& settings) {
  std::string options =
      absl::StrCat("--eviction ", flags.method, " --eviction-budget ",
                   flags.budget, " --eviction-every ", settings.every_tokens);
  if (settings.method == plan::EvictionMethod::kQHitter) {
    absl::StrAppend(&options, " --eviction-lambda ", settings.lambda);
  }
  if (settings.rolling) absl::StrAppend(&options, " --eviction-rolling");
  const auto given = [&](const char* flag, auto value) {
    absl::StrAppend(&options, " ", flag, " ", value);
  };
  if (settings.sinks) given("--eviction-sinks", *settings.sinks);
  if (settings.recent) given("--eviction-recent", *settings.recent);
  if (settings.decay != 1) given("--eviction-decay", settings.decay);
  if (settings.observation_window > 0) {
    given("--eviction-observation-window", settings.observation_window);
  }
  if (settings.half_friendliness) {
    absl::StrAppend(&options, " --eviction-half-friendliness");
  }
  return options;
}

}  // namespace

void AddEvictionFlags(CLI::App* command, EvictionFlags& flags, bool of_plan) {
  AddFlag(command, "--eviction", flags.method,
          of_plan
              ? "Give up tokens, with any plan: h2o keeps those that were "
                "attended to most, q-hitter weighs that against what their "
                "codes lose, streaming keeps the first and the latest. For "
                "texts longer than the cache, or more of them than it holds; "
                "what needs a token that went is answered without it, and no "
                "prefix is reused (docs/guide.md has what it costs)"
              : "Which tokens stay, on top of any method: q-hitter, h2o or "
                "streaming")
      ->check(CLI::IsMember({"q-hitter", "h2o", "streaming"}))
      ->group("Eviction");
  AddFlag(command, "--eviction-budget", flags.budget,
          "Slots that stay: a share of the prompt (0.2), or a number (256)")
      ->check(Checked([](const std::string& text) {
        return plan::ParseEvictionBudget(text).status();
      }))
      ->group("Eviction");
  AddEvictionSettings(command, flags.settings);
}

void AddEvictionSettings(CLI::App* command, plan::EvictionSettings& settings) {
  const auto add = [&](const char* name, auto& value, const char* help) {
    return AddFlag(command, name, value, help)->group("Eviction");
  };
  add("--eviction-sinks", settings.sinks,
      "First tokens that always stay (default: 4, or the plan's exact sinks)");
  add("--eviction-recent", settings.recent,
      "Last tokens that always stay (default: 64, or a quarter of a budget in "
      "slots; the plan's exact window where that is more)");
  add("--eviction-every", settings.every_tokens,
      "Slots go at multiples of so many tokens, and at the prompt's end")
      ->check(Above(0));
  add("--eviction-lambda", settings.lambda,
      "Weight of attention received (q-hitter); the rest is friendliness to "
      "quantization (1: none, as h2o)")
      ->check(Between(0.0, 1.0));
  add("--eviction-decay", settings.decay,
      "What is left of attention received behind each eviction")
      ->check(Above(0))
      ->check(Between(0.0, 1.0));
  add("--eviction-observation-window", settings.observation_window,
      "Last queries before an eviction that count in a prompt (0: all)");
  AddSwitch(command, "--eviction-half-friendliness", settings.half_friendliness,
            "Friendliness counts half, as in the code of Q-Hitter's authors")
      ->group("Eviction");
  AddSwitch(command, "--eviction-rolling", settings.rolling,
            "Positions count the slots that stay, not the tokens seen: for "
            "texts beyond the model's own length. Keys are rotated when they "
            "are read")
      ->group("Eviction");
}

absl::Status CheckEvictionIsUsed(const EvictionFlags& flags) {
  if (!flags.method.empty() || flags == EvictionFlags()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "--eviction-budget and the like say how --eviction evicts: give that, "
      "too");
}

absl::Status PutEviction(const EvictionFlags& flags,
                         const plan::AttentionShape& shape,
                         kvasir::v1::KvPlan* plan,
                         const std::vector<int>& others) {
  if (flags.method.empty()) return absl::OkStatus();
  plan::EvictionSettings settings = flags.settings;
  KVASIR_ASSIGN_OR_RETURN(settings.method,
                          plan::ParseEvictionMethod(flags.method));
  KVASIR_ASSIGN_OR_RETURN(settings.budget,
                          plan::ParseEvictionBudget(flags.budget));
  const auto evicts = [](const kvasir::v1::KvPlan& of) {
    return std::any_of(of.layers().begin(), of.layers().end(),
                       [](const auto& layer) { return layer.has_eviction(); });
  };
  const kvasir::v1::KvPlan before = *plan;
  KVASIR_RETURN_IF_ERROR(plan::ApplyEviction(settings, shape, plan));
  for (const int l : others) *plan->mutable_layers(l) = before.layers(l);
  if (!evicts(*plan)) {
    return absl::InvalidArgumentError(
        "no layer that is to evict can: each sees a sliding window of tokens, "
        "behind which they are given up already");
  }
  KVASIR_RETURN_IF_ERROR(plan::ValidatePlan(*plan, shape));
  // If the plan already had an eviction, replaces its part of the method name.
  const std::string of_tokens = plan->method().substr(
      0, evicts(before) ? plan->method().rfind('+') : std::string::npos);
  const bool alone = of_tokens.empty() || of_tokens == "full" ||
                     plan::ParseEvictionMethod(of_tokens).ok();
  plan->set_method(alone ? flags.method
                         : absl::StrCat(of_tokens, "+", flags.method));
  auto* options = plan->mutable_provenance()->mutable_options();
  absl::StrAppend(options, options->empty() ? "" : " ",
                  OptionsOf(flags, settings));
  return absl::OkStatus();
}

}  // namespace kvasir::cli
