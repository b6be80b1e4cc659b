#include "cli/compress/shape_flags.h"

#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cli/flags.h"
#include "cli/options.h"

namespace kvasir::cli {

void AddShapeFlags(CLI::App* command, const std::string& name_flag,
                   ShapeFlags& flags) {
  const std::string known = absl::StrJoin(model::KnownShapeNames(), ", ");
  AddFlag(command, name_flag, flags.name, "Shape to start from: " + known)
      ->check(ShapeName());
  model::ModelShape& sizes = flags.sizes;
  auto size = [&](const char* flag, auto& value, const char* help) {
    command->add_option(flag, value, help)
        ->envname(EnvironmentName(flag))
        ->check(Above(0))
        ->group(kSizesGroup);
  };
  size("--layers", sizes.num_layers, "Layers");
  // What the server reads.
  command->get_option("--layers")->check(Between(1, 1024));
  size("--hidden", sizes.hidden_size, "Width of the residual stream");
  size("--intermediate", sizes.intermediate_size, "Width of the MLP");
  size("--heads", sizes.num_query_heads, "Query heads");
  size("--kv-heads", sizes.num_kv_heads, "KV heads");
  size("--head-dim", sizes.head_dim, "Numbers per head");
  size("--context", sizes.max_position, "Longest context, tokens");
  size("--rope-theta", flags.rope_theta, "RoPE base");
  command->add_option("--output-head", flags.head, "tied or untied")
      ->envname(EnvironmentName("--output-head"))
      ->check(CLI::IsMember({"tied", "untied"}))
      ->group(kSizesGroup);
}

absl::StatusOr<model::ModelShape> ShapeOf(const ShapeFlags& flags) {
  KVASIR_ASSIGN_OR_RETURN(model::ModelShape shape,
                          model::FindShape(flags.name));
  const model::ModelShape& sizes = flags.sizes;
  auto replace = [](int64_t& target, int64_t value) {
    if (value > 0) target = value;
  };
  replace(shape.num_layers, sizes.num_layers);
  replace(shape.hidden_size, sizes.hidden_size);
  replace(shape.intermediate_size, sizes.intermediate_size);
  replace(shape.num_query_heads, sizes.num_query_heads);
  replace(shape.num_kv_heads, sizes.num_kv_heads);
  replace(shape.head_dim, sizes.head_dim);
  replace(shape.max_position, sizes.max_position);
  replace(shape.vocab_size, sizes.vocab_size);
  if (flags.rope_theta > 0.0) shape.rope_theta = flags.rope_theta;
  if (!flags.head.empty()) shape.tied_embedding = flags.head == "tied";
  return shape;
}

}  // namespace kvasir::cli
