#include "router/facades/vllm_engine/models.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "router/facades/calls/only_model.h"

namespace kvasir::router {
namespace {

double ShareOf(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0.0
                    : static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

vllm::grpc::engine::HealthCheckResponse VllmHealthOf(
    const RequestRouter& router) {
  const RouterHealth health = router.Health();
  vllm::grpc::engine::HealthCheckResponse response;
  response.set_healthy(health.ready);
  response.set_message(health.ready ? "ready" : health.detail);
  return response;
}

absl::StatusOr<vllm::grpc::engine::GetModelInfoResponse> VllmModelInfoOf(
    const ModelStatus& model, bool serves_tokenizer) {
  if (!model.info) {
    return absl::UnavailableError(absl::StrCat(
        "no worker of model '", model.name, "' has been reached yet"));
  }
  vllm::grpc::engine::GetModelInfoResponse response;
  // For gateways, false would mean a model that produces embeddings instead
  // of text.
  response.set_is_generation(true);
  response.set_served_model_name(model.name);
  // This path must not exist on any machine and must not be the name of a model
  // on a hub. A gateway first tries to load it, and calls GetTokenizer only if
  // that fails. Without a path, the gateway would use the tokenizer that its
  // own flags name.
  if (serves_tokenizer) {
    response.set_tokenizer_path(absl::StrCat("/nonexistent/", model.name));
  }
  response.set_model_type(model.info->model_type());
  response.set_max_context_length(model.info->max_model_len());
  response.set_vocab_size(model.info->vocab_size());
  *response.mutable_eos_token_ids() = model.info->eos_token_ids();
  // The longest prompt must leave room for one output token.
  response.set_max_req_input_len(
      ToInt32(std::max(1U, model.info->max_model_len()) - 1));
  return response;
}

vllm::grpc::engine::GetServerInfoResponse VllmServerInfoOf(
    const ModelStatus& model) {
  vllm::grpc::engine::GetServerInfoResponse response;
  response.set_active_requests(
      static_cast<uint32_t>(ToInt32(model.load.running + model.load.waiting)));
  response.set_server_type("kvasir");
  response.set_data_parallel_size(1);
  if (model.info) response.set_block_size(ToInt32(model.info->page_tokens()));
  response.set_max_num_seqs(ToInt32(model.load.max_num_seqs));
  return response;
}

vllm::grpc::engine::SchedulerLoad VllmLoadOf(const ModelStatus& model) {
  const ModelLoad& load = model.load;
  vllm::grpc::engine::SchedulerLoad response;
  response.set_num_running_reqs(ToInt32(load.running));
  response.set_num_waiting_reqs(ToInt32(load.waiting));
  response.set_num_total_reqs(ToInt32(load.running + load.waiting));
  response.set_num_used_tokens(ToInt32(load.used_tokens));
  response.set_max_total_num_tokens(ToInt32(load.total_tokens));
  response.set_token_usage(ShareOf(load.used_tokens, load.total_tokens));
  response.set_utilization(ShareOf(load.running, load.max_num_seqs));
  response.set_max_running_requests(ToInt32(load.max_num_seqs));
  return response;
}

}  // namespace kvasir::router
