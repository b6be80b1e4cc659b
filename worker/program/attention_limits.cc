#include "worker/program/attention_limits.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention/ops.h"

namespace kvasir::worker {
namespace {

absl::Status AtMost(int64_t limit, int64_t value, const std::string& where,
                    const char* what) {
  if (value <= limit) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      where, ": ", value, " ", what, "; this build serves at most ", limit));
}

// The latents of a part in the form that the attention op takes. `view` points
// into the other members.
struct Latents {
  Latents(const PartProgram& part, const plan::ResolvedPart& resolved) {
    for (const LatentProgram& latent : part.latents) {
      kernels::LatentGroup& group = groups.emplace_back();
      group.width = latent.width;
      exact_groups.push_back(group);
      group.num_runs = resolved.NumRanges(
          resolved.latents[static_cast<size_t>(latent.index)]);
    }
    view.groups = groups.data();
    view.num_groups = static_cast<int64_t>(groups.size());
    if (part.static_ranges) {
      view.static_scale = kernels::DevicePtr<const float>(&kPresent);
    }
    exact.ring.groups = exact_groups.data();
    exact.ring.num_groups = view.num_groups;
  }
  Latents(const Latents&) = delete;
  Latents(Latents&&) = default;

  // The checks compare some arrays only with null. All pointers to such arrays
  // point here.
  static constexpr float kPresent = 0.0f;

  std::vector<kernels::LatentGroup> groups;
  std::vector<kernels::LatentGroup> exact_groups;
  kernels::LatentPart view;
  // The exact rows of the part's side, if the side keeps any.
  kernels::ExactRows exact;
};

absl::Status CheckLatents(const Latents& latents, const std::string& where) {
  for (const kernels::LatentGroup& group : latents.groups) {
    KVASIR_RETURN_IF_ERROR(AtMost(kernels::kAttentionMaxWidth, group.width,
                                  where, "numbers in a latent"));
    KVASIR_RETURN_IF_ERROR(AtMost(kernels::kAttentionMaxRuns, group.num_runs,
                                  where, "runs of codes in a latent"));
  }
  return absl::OkStatus();
}

// Whether the attention op can launch the program: for prompts if `prompts`,
// else for decode. The caller has checked the limits of each single part.
bool LaunchFits(const AttentionProgram& program,
                const plan::ResolvedAttention& attention, bool prompts) {
  std::vector<Latents> latents;
  // Reserves memory first, because `keys` will point into `latents`.
  latents.reserve(program.key.size());
  std::vector<kernels::KeyRebuild> rebuilds(program.key.size());
  std::vector<kernels::AttentionKeyPart> keys(program.key.size());
  const std::vector<kernels::DevicePtr<const float>> lift(
      static_cast<size_t>(program.heads.kv.count));
  for (size_t p = 0; p < program.key.size(); ++p) {
    const KeyProgram& part = program.key[p];
    latents.emplace_back(part, attention.key.parts[p]);
    keys[p].latents = latents.back().view;
    keys[p].exact = &latents.back().exact;
    if (prompts && part.prompt_lift.has_value()) {
      rebuilds[p].dims = part.prompt_lift->dims;
      rebuilds[p].up = lift.data();
    } else if (part.rebuild.has_value()) {
      rebuilds[p].dims = part.rebuild->dims;
      rebuilds[p].num_pairs = part.rebuild->rotation.num_pairs;
      if (part.rebuild->lifted) rebuilds[p].up = lift.data();
    } else {
      continue;
    }
    keys[p].rebuild = &rebuilds[p];
  }
  const Latents value(program.value, attention.value.parts[0]);
  kernels::AttentionValuePart values;
  values.latents = value.view;
  values.exact = &value.exact;
  kernels::ValueLift value_lift;
  if (prompts && program.value.prompt_lift.has_value()) {
    value_lift.dims = program.value.prompt_lift->dims;
    value_lift.up = lift.data();
    values.lift = &value_lift;
  }

  kernels::PagedAttentionParams params;
  params.num_heads = program.heads.query.count;
  params.num_kv_heads = program.heads.kv.count;
  params.keys = keys.data();
  params.num_key_parts = static_cast<int64_t>(keys.size());
  params.values = &values;
  params.num_value_parts = 1;
  // The op treats exact (uncompressed) rows as additional parts, so they count
  // towards its limits.
  params.key_exact.sinks = attention.key.exact_sinks;
  params.key_exact.window = attention.key.exact_window;
  params.value_exact.sinks = attention.value.exact_sinks;
  params.value_exact.window = attention.value.exact_window;
  return kernels::Fits(params);
}

}  // namespace

absl::Status CheckAttentionLimits(const AttentionProgram& program,
                                  int64_t layer,
                                  const plan::ResolvedAttention& attention) {
  const std::string name = absl::StrCat("layer ", layer);
  for (size_t p = 0; p < program.key.size(); ++p) {
    const KeyProgram& part = program.key[p];
    const std::string where = absl::StrCat(name, " key part ", p);
    const Latents latents(part, attention.key.parts[p]);
    KVASIR_RETURN_IF_ERROR(CheckLatents(latents, where));
    if (!part.rebuild.has_value()) continue;
    KVASIR_RETURN_IF_ERROR(AtMost(kernels::kAttentionMaxHeadDim,
                                  part.rebuild->dims, where,
                                  "numbers in a rebuilt key"));
  }
  const Latents value(program.value, attention.value.parts[0]);
  KVASIR_RETURN_IF_ERROR(CheckLatents(value, name + " value part 0"));
  if (LaunchFits(program, attention, /*prompts=*/false))
    return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(name,
                   ": for one query, the parts of keys and values together "
                   "need more than the ",
                   kernels::kAttentionScratchBytes,
                   " bytes of scratch memory that this build has for them"));
}

void DropPromptLiftsBeyondLimits(const plan::ResolvedAttention& attention,
                                 AttentionProgram* program) {
  if (LaunchFits(*program, attention, /*prompts=*/true)) return;
  program->value.prompt_lift.reset();
  for (KeyProgram& part : program->key) part.prompt_lift.reset();
}

}  // namespace kvasir::worker
