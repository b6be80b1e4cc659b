#include "worker/load/group_identity.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/cli/version.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "kernels/device/dtype.h"
#include "model/shapes/config.h"
#include "worker/ranks/group/rank_identity.h"
#include "worker/ranks/rank.h"

namespace kvasir::cli {
namespace {

// Hashes the config and the names, types and shapes of all tensors. Checkpoints
// that differ only in the values of weights get the same id. Ranks find such a
// difference later, when they compare fingerprints of their weights.
absl::StatusOr<std::string> CheckpointId(const ModelSource& source,
                                         uint64_t weights_seed) {
  if (!source.checkpoint.has_value()) {
    return absl::StrCat("random weights of ", source.name, ", seed ",
                        weights_seed);
  }
  KVASIR_ASSIGN_OR_RETURN(std::string text,
                          model::LoadConfigText(source.checkpoint->folder()));
  for (const auto& [name, entry] : source.checkpoint->tensors().entries()) {
    absl::StrAppend(&text, "\n", name, " ", static_cast<int>(entry.info->type),
                    " ", absl::StrJoin(entry.info->shape, "x"));
  }
  return base::Sha256Hex(text);
}

}  // namespace

absl::StatusOr<kvasir::v1::RankIdentity> IdentityOf(
    const ModelSource& source, uint64_t weights_seed,
    const kernels::Device* device, const RunSettings& settings) {
  kvasir::v1::RankIdentity identity;
  identity.set_api_version(worker::kRankApiVersion);
  identity.set_build(kVersion);
  KVASIR_ASSIGN_OR_RETURN(*identity.mutable_checkpoint_id(),
                          CheckpointId(source, weights_seed));
  const kvasir::v1::KvPlan& plan = source.plan->source;
  identity.set_plan_id(base::Sha256Hex(plan.SerializeAsString()));
  identity.set_page_format_id(
      worker::CacheIdOf(plan, source.spec, settings.page_tokens, "",
                        /*key_bias_left_out=*/false, /*key_means=*/""));
  identity.set_page_tokens(static_cast<uint32_t>(settings.page_tokens));
  identity.set_device(device == nullptr ? "cpu" : device->name());
  identity.set_numerics_id(
      device == nullptr
          ? "cpu"
          : absl::StrCat(device->numerics(), "-",
                         kernels::DTypeName(device->activations())));
  identity.set_deterministic(settings.deterministic);
  identity.set_graphs(settings.graphs);
  identity.set_plan_check(settings.plan_check);
  identity.set_key_means(settings.key_means);
  identity.set_max_model_len(static_cast<uint32_t>(settings.max_model_len));
  identity.set_max_num_seqs(static_cast<uint32_t>(settings.max_num_seqs));
  identity.set_max_batched_tokens(
      static_cast<uint32_t>(settings.max_batched_tokens));
  identity.set_vocab_size(static_cast<uint32_t>(source.spec.vocab_size));
  return identity;
}

}  // namespace kvasir::cli
