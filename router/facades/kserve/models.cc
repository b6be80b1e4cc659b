#include "router/facades/kserve/models.h"

#include <string>

#include "base/check.h"
#include "router/facades/kserve/request.h"
#include "router/facades/kserve/response.h"

namespace kvasir::router {
namespace {

constexpr char kPlatform[] = "kvasir";

inference::DataType ConfigType(const std::string& datatype) {
  if (datatype == "BYTES") return inference::TYPE_STRING;
  if (datatype == "BOOL") return inference::TYPE_BOOL;
  if (datatype == "INT32") return inference::TYPE_INT32;
  if (datatype == "UINT32") return inference::TYPE_UINT32;
  if (datatype == "UINT64") return inference::TYPE_UINT64;
  KVASIR_CHECK(datatype == "FP32");
  return inference::TYPE_FP32;
}

void SetTensor(const KserveTensorSpec& spec,
               inference::ModelMetadataResponse::TensorMetadata* tensor) {
  tensor->set_name(spec.name);
  tensor->set_datatype(spec.datatype);
  for (const int64_t dim : spec.shape) tensor->add_shape(dim);
}

}  // namespace

inference::ModelMetadataResponse KserveMetadataOf(const ModelStatus& model) {
  inference::ModelMetadataResponse metadata;
  metadata.set_name(model.name);
  metadata.add_versions(kKserveModelVersion);
  metadata.set_platform(kPlatform);
  for (const KserveTensorSpec& spec : KserveInputSpecs()) {
    SetTensor(spec, metadata.add_inputs());
  }
  for (const KserveTensorSpec& spec : KserveOutputSpecs()) {
    SetTensor(spec, metadata.add_outputs());
  }
  return metadata;
}

inference::ModelConfig KserveConfigOf(const ModelStatus& model) {
  inference::ModelConfig config;
  config.set_name(model.name);
  config.set_platform(kPlatform);
  config.set_backend(kPlatform);
  config.mutable_model_transaction_policy()->set_decoupled(true);
  for (const KserveTensorSpec& spec : KserveInputSpecs()) {
    inference::ModelInput* input = config.add_input();
    input->set_name(spec.name);
    input->set_data_type(ConfigType(spec.datatype));
    for (const int64_t dim : spec.shape) input->add_dims(dim);
    input->set_optional(true);
  }
  for (const KserveTensorSpec& spec : KserveOutputSpecs()) {
    inference::ModelOutput* output = config.add_output();
    output->set_name(spec.name);
    output->set_data_type(ConfigType(spec.datatype));
    for (const int64_t dim : spec.shape) output->add_dims(dim);
  }
  inference::ModelInstanceGroup* group = config.add_instance_group();
  group->set_name("replicas");
  group->set_kind(inference::ModelInstanceGroup::KIND_MODEL);
  group->set_count(1);
  for (uint32_t i = 0; i < model.num_replicas; ++i) {
    group->add_gpus(static_cast<int32_t>(i));
  }
  if (model.info) {
    (*config.mutable_parameters())["max_model_len"].set_string_value(
        std::to_string(model.info->max_model_len()));
    (*config.mutable_parameters())["lifts_prompts"].set_string_value(
        model.info->lifts_prompts() ? "true" : "false");
  }
  return config;
}

inference::RepositoryIndexResponse::ModelIndex KserveIndexOf(
    const ModelStatus& model) {
  inference::RepositoryIndexResponse::ModelIndex index;
  index.set_name(model.name);
  index.set_version(kKserveModelVersion);
  index.set_state(model.ready ? "READY" : "UNAVAILABLE");
  if (!model.ready) {
    index.set_reason(std::to_string(model.num_ready_replicas) + " of " +
                     std::to_string(model.num_replicas) + " replicas ready");
  }
  return index;
}

}  // namespace kvasir::router
