#include "router/facades/vllm_inference/models.h"

#include "absl/strings/str_cat.h"

namespace kvasir::router {

absl::StatusOr<vllm::ServerInfo> ControlServerInfoOf(
    const ModelStatus& model, const std::string& server_version) {
  if (!model.info) {
    return absl::UnavailableError(absl::StrCat(
        "no worker of model '", model.name, "' has been reached yet"));
  }
  vllm::ServerInfo info;
  info.set_engine_version(server_version);
  // Clients accept only this value.
  info.set_api_version("vllm");
  // Clients see all replicas as a single rank.
  vllm::ParallelismInfo* parallelism = info.mutable_parallelism();
  parallelism->set_tensor_parallel_size(1);
  parallelism->set_pipeline_parallel_size(1);
  parallelism->set_data_parallel_size(1);
  parallelism->set_world_size(1);
  info.set_max_model_len(model.info->max_model_len());
  info.set_kv_block_size(model.info->page_tokens());
  if (model.info->page_tokens() > 0) {
    info.set_total_kv_blocks(model.load.total_tokens /
                             model.info->page_tokens());
  }
  info.set_max_running_requests(model.load.max_num_seqs);
  info.set_max_batched_tokens(model.info->max_batched_tokens());
  return info;
}

vllm::ModelInfo ControlModelInfoOf(const ModelStatus& model,
                                   const std::vector<ModelStatus>& names,
                                   bool has_tokenizer) {
  vllm::ModelInfo info;
  info.set_model_id(model.name);
  info.set_served_model_name(model.name);
  for (const ModelStatus& other : names) {
    if (other.name != model.name) info.add_served_model_aliases(other.name);
  }
  info.set_supports_text_input(has_tokenizer);
  info.set_supports_token_ids_input(true);
  return info;
}

}  // namespace kvasir::router
